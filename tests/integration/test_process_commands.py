"""Helper commands for real: input, output, limits, and that nothing of them is left behind."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import pytest

from chv.common.errors import DeadlineExceeded, NotFound, ResourceExhausted
from chv.common.process import CommandFailed, command, procfs, run
from tests.helpers import wait_until
from tests.integration.process_helpers import children_of, descriptors_of

needs_root = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change uid and namespaces"),
]
USER = 1_999_999


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    before = (descriptors_of(os.getpid()), threading.active_count(), children_of(os.getpid()))
    yield
    after = (descriptors_of(os.getpid()), threading.active_count(), children_of(os.getpid()))
    assert after == before


async def test_output_errors_and_code_are_returned() -> None:
    completed = await run(shell("echo out; echo err >&2; exit 3"), timeout_s=10, check=False)
    assert completed.stdout == b"out\n"
    assert completed.stderr == b"err\n"
    assert completed.returncode == 3


async def test_input_larger_than_a_pipe_passes_through() -> None:
    data = os.urandom(1_000_000)
    assert (await run(["cat"], stdin=data, timeout_s=10)).stdout == data


async def test_empty_input_is_an_end_of_file() -> None:
    assert (await run(["cat"], stdin=b"", timeout_s=10)).stdout == b""


async def test_a_command_without_input_reads_nothing_of_ours() -> None:
    assert (await run(["cat"], timeout_s=10)).stdout == b""


async def test_a_command_may_ignore_its_input() -> None:
    completed = await run(["true"], stdin=b"x" * 1_000_000, timeout_s=10)
    assert completed.returncode == 0


async def test_a_failure_names_the_program_and_its_last_words_but_no_argument() -> None:
    with pytest.raises(CommandFailed) as raised:
        await run(shell("echo first >&2; echo no such pool >&2; exit 5 # hush"), timeout_s=10)
    assert raised.value.returncode == 5
    assert "sh failed with code 5: no such pool" in str(raised.value)
    assert "hush" not in str(raised.value)


async def test_death_by_a_signal_is_a_negative_code() -> None:
    completed = await run(shell("kill -9 $$"), timeout_s=10, check=False)
    assert completed.returncode == -9


async def test_a_missing_program_is_not_found() -> None:
    with pytest.raises(NotFound, match="no-such-program"):
        await run(["no-such-program"], timeout_s=10)


async def test_the_environment_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUST_BACKTRACE", "1")
    completed = await run(["env"], environment={"X": "1"}, timeout_s=10)
    names = {line.partition("=")[0] for line in completed.stdout.decode().splitlines()}
    assert names == {"PATH", "LANG", "HOME", "X"}


async def test_given_descriptors_can_be_read_by_the_command() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"secret")
    os.close(writer)
    completed = await run(["cat", "/dev/fd/9"], fds={9: reader}, timeout_s=10)
    os.close(reader)
    assert completed.stdout == b"secret"


async def test_time_out_kills_the_command_and_its_grandchildren(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 1000 & echo $! $$ > {pids}; wait"
    with pytest.raises(DeadlineExceeded, match="sh did not end within"):
        await run(shell(script), timeout_s=0.3)
    await all_dead(pids)


async def test_cancellation_kills_the_command_and_its_grandchildren(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    async with anyio.create_task_group() as group:

        async def start() -> None:
            await run(shell(f"sleep 1000 & echo $! $$ > {pids}; wait"), timeout_s=60)

        group.start_soon(start)
        await wait_until(lambda: pids.exists() and pids.read_text())
        group.cancel_scope.cancel()
    await all_dead(pids)


async def test_what_a_command_leaves_in_the_background_is_killed_when_it_ends(
    tmp_path: Path,
) -> None:
    pids = tmp_path / "pids"
    with anyio.fail_after(5):
        completed = await run(shell(f"sleep 1000 & echo $! > {pids}; echo done"), timeout_s=60)
    assert completed.stdout == b"done\n"
    await all_dead(pids)


async def test_a_stray_in_another_session_does_not_hold_the_caller_up(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with anyio.fail_after(5):
        await run(shell(f"setsid sh -c 'echo $$ > {pid}; exec sleep 5' & sleep 0.2"), timeout_s=60)
    os.kill(int(pid.read_text()), 9)


async def all_dead(file: Path) -> None:
    for word in file.read_text().split():
        await wait_until(partial(is_dead, int(word)))


def is_dead(pid: int) -> bool:
    stat = procfs.stat(pid)
    return stat is None or stat.dead


async def test_output_over_the_limit_kills_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "OUTPUT_BYTES_MAX", 100_000)
    with pytest.raises(ResourceExhausted, match="more than 100000 bytes"):
        await run(shell("exec cat /dev/zero"), timeout_s=10)


async def test_many_commands_at_once_use_no_threads() -> None:
    results: list[bytes] = []

    async def one(number: int) -> None:
        results.append((await run(["echo", str(number)], timeout_s=30)).stdout)

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(one, number)
    assert sorted(results) == sorted(f"{number}\n".encode() for number in range(20))


class TestAsRoot:
    pytestmark = needs_root

    async def test_another_uid_has_no_privilege(self) -> None:
        script = "id -u; id -g; id -G; grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status"
        lines = (await run(shell(script), uid=USER, gid=USER + 1, timeout_s=10)).stdout.split()
        assert lines[:3] == [str(USER).encode(), *[str(USER + 1).encode()] * 2]
        assert lines[4::2] == [b"0" * 16, b"0" * 16, b"1"]

    @pytest.fixture
    def netns(self) -> Iterator[str]:
        name = f"chvtest-{os.getpid()}"
        subprocess.run(["ip", "netns", "add", name], check=True)
        yield f"/run/netns/{name}"
        subprocess.run(["ip", "netns", "delete", name], check=True)

    async def test_a_command_runs_inside_a_network_namespace(self, netns: str) -> None:
        completed = await run(["ip", "-o", "link"], netns=netns, timeout_s=10)
        assert [line.split()[1] for line in completed.stdout.splitlines()] == [b"lo:"]
