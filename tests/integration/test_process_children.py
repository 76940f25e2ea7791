"""Daemon children for real: they die with us, and are watched without threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import pytest

from chv.common.errors import NotFound
from chv.common.process import procfs, spawn_child
from tests.helpers import wait_until
from tests.integration.process_helpers import children_of, descriptors_of

STUBBORN = "import signal,time;signal.signal(signal.SIGTERM,signal.SIG_IGN);print('up',flush=True)"


async def test_exit_codes_and_signals_are_told() -> None:
    assert await (await spawn_child(("sh", "-c", "exit 7"))).wait() == 7
    child = await spawn_child(("sleep", "1000"))
    child.send(signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL
    assert await child.wait() == -signal.SIGKILL
    assert not child.send(signal.SIGKILL)


async def test_the_rung_that_ended_a_child_is_told(tmp_path: Path) -> None:
    polite = await spawn_child(("sleep", "1000"))
    assert await polite.terminate(grace_s=5) == "term"
    assert await polite.terminate(grace_s=5) == "gone"
    log = tmp_path / "log"
    argv = (sys.executable, "-c", STUBBORN + ";time.sleep(99)")
    stubborn = await spawn_child(argv, log_path=str(log))
    await wait_until(lambda: log.read_text() == "up\n")
    assert await stubborn.terminate(grace_s=0.05) == "kill"
    assert stubborn.returncode == -signal.SIGKILL


async def test_several_tasks_may_wait_for_one_child() -> None:
    child = await spawn_child(("sleep", "1000"))
    codes: list[int] = []

    async def wait() -> None:
        codes.append(await child.wait())

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(wait)
        await anyio.lowlevel.checkpoint()
        child.send(signal.SIGTERM)
    assert codes == [-signal.SIGTERM] * 3


async def test_a_child_gets_its_descriptors_environment_and_log(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    script = "echo to-log; echo $X >&5; echo $RUST_LOG >&5"
    log = tmp_path / "daemon.log"
    child = await spawn_child(
        ("sh", "-c", script), log_path=str(log), environment={"X": "1"}, fds={5: writer}
    )
    os.close(writer)
    assert await child.wait() == 0
    assert os.read(reader, 100) == b"1\n\n"
    os.close(reader)
    assert log.read_text() == "to-log\n"
    assert log.stat().st_mode & 0o777 == 0o600


async def test_a_child_that_cannot_be_started_leaves_nothing() -> None:
    before = descriptors_of(os.getpid())
    with pytest.raises(NotFound):
        await spawn_child(("/no/such/daemon",))
    assert children_of(os.getpid()) == []
    assert descriptors_of(os.getpid()) == before


async def test_children_need_no_threads_and_leave_no_descriptors() -> None:
    before = (descriptors_of(os.getpid()), threading.active_count())
    children = [await spawn_child(("sleep", "1000")) for _ in range(10)]
    for child in children:
        assert await child.terminate(grace_s=5) == "term"
    assert (descriptors_of(os.getpid()), threading.active_count()) == before


PARENT = """
import sys
import anyio
from chv.common.process import run, spawn_child

async def main():
    if sys.argv[1] == "child":
        await spawn_child(("sleep", "1000"))
        print("started", flush=True)
        await anyio.sleep_forever()
    print("started", flush=True)
    await run(("sleep", "1000"), timeout_s=1000)

anyio.run(main)
"""


@pytest.mark.parametrize("kind", ["child", "command"])
async def test_children_and_commands_die_with_a_killed_parent(kind: str) -> None:
    argv = [sys.executable, "-c", PARENT, kind]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as parent:  # noqa: ASYNC220
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        (child,) = await wait_until(lambda: children_of(parent.pid))
        await wait_until(lambda: procfs.cmdline(child)[:1] == ("sleep",))
        stat = procfs.stat(child)
        assert stat is not None
        parent.kill()
    await wait_until(lambda: is_dead(child, stat.start_time))


def is_dead(pid: int, start_time: int) -> bool:
    stat = procfs.stat(pid)
    return stat is None or stat.dead or stat.start_time != start_time
