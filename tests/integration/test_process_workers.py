"""Detached workers for real: what they get, what they do not get, and that they outlive us."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import msgspec
import pytest

from chv.common.errors import (
    ChvError,
    DeadlineExceeded,
    FailedPrecondition,
    InUse,
    InvalidArgument,
    NotFound,
    PermissionDenied,
)
from chv.common.process import (
    AdoptVerdict,
    Provider,
    WorkerRecord,
    launch,
    scan,
    send,
    terminate,
    verify,
    wait_gone,
)
from tests.helpers import wait_until
from tests.integration.process_helpers import (
    SLEEP,
    children_of,
    descriptors_of,
    environment_of,
    new_layout,
    open_provider,
    python_worker,
    sleeper,
    status_of,
    worker_id,
)

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change uid and namespaces"),
]
USER = 1_999_999
PR_SET_CHILD_SUBREAPER = 36
SLEEP_FOUND = os.path.realpath(SLEEP)


@pytest.fixture(params=["plain", "cgroup"])
async def provider(request: pytest.FixtureRequest) -> AsyncIterator[Provider]:
    async with open_provider(request.param) as made:
        if made.name != request.param:
            pytest.skip("no writable cgroup v2 hierarchy here")
        yield made


@pytest.fixture
def netns() -> Iterator[str]:
    name = f"chvtest-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    yield f"/run/netns/{name}"
    subprocess.run(["ip", "netns", "delete", name], check=True)


async def test_a_spawned_worker_is_alive_under_its_record(provider: Provider) -> None:
    spec = sleeper(provider.layout)
    record = await provider.spawn(spec)
    assert record.worker_id == spec.worker_id
    assert record.executable == SLEEP_FOUND
    assert provider.adopt(record).verdict is AdoptVerdict.ALIVE
    (found,) = provider.find(spec.worker_id)
    assert found.record() == record


async def test_a_worker_is_not_our_child_and_leads_a_session(provider: Provider) -> None:
    record = await provider.spawn(sleeper(provider.layout))
    assert int(status_of(record)["PPid"]) != os.getpid()
    assert os.getsid(record.pid) == record.pid
    assert children_of(os.getpid()) == []


async def test_nothing_of_our_environment_reaches_a_worker(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUST_BACKTRACE", "full")
    record = await provider.spawn(sleeper(provider.layout, environment={"X": "1"}))
    environment = environment_of(record)
    assert set(environment) == {"PATH", "LANG", "HOME", "X"}
    assert environment["HOME"] == "/"


async def test_a_worker_of_another_uid_has_no_privilege_left(provider: Provider) -> None:
    record = await provider.spawn(sleeper(provider.layout, uid=USER, gid=USER + 1))
    status = status_of(record)
    assert status["Uid"].split() == [str(USER)] * 4
    assert status["Gid"].split() == [str(USER + 1)] * 4
    assert status["Groups"] == ""
    sets = {status[f"Cap{name}"] for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")}
    assert sets == {"0" * 16}
    assert status["NoNewPrivs"] == "1"


async def test_extra_groups_are_exactly_those_given(provider: Provider) -> None:
    spec = sleeper(provider.layout, uid=USER, gid=USER, groups=(USER + 2, USER + 3))
    assert status_of(await provider.spawn(spec))["Groups"].split() == [
        str(USER + 2),
        str(USER + 3),
    ]


async def test_kept_capabilities_are_the_only_ones(provider: Provider) -> None:
    keep = ("CAP_NET_ADMIN", "CAP_NET_RAW")
    spec = sleeper(provider.layout, uid=USER, gid=USER, keep_capabilities=keep)
    status = status_of(await provider.spawn(spec))
    mask = f"{1 << 12 | 1 << 13:016x}"
    assert {status[f"Cap{name}"] for name in ("Prm", "Eff", "Bnd", "Amb")} == {mask}


async def test_root_with_kept_capabilities_has_no_others(provider: Provider) -> None:
    spec = sleeper(provider.layout, keep_capabilities=("CAP_NET_ADMIN",))
    status = status_of(await provider.spawn(spec))
    assert {status[f"Cap{name}"] for name in ("Prm", "Eff", "Bnd")} == {f"{1 << 12:016x}"}


async def test_signals_start_unblocked_and_with_their_defaults(provider: Provider) -> None:
    status = status_of(await provider.spawn(sleeper(provider.layout)))
    assert {status[name] for name in ("SigBlk", "SigIgn", "SigCgt")} == {"0" * 16}


async def test_context_limits_and_umask_are_set(provider: Provider, tmp_path: Path) -> None:
    spec = sleeper(provider.layout, cwd=str(tmp_path), umask=0o027, oom_score_adj=321)
    record = await provider.spawn(spec)
    process = Path(f"/proc/{record.pid}")
    assert (process / "cwd").resolve() == tmp_path
    assert status_of(record)["Umask"] == "0027"
    assert (process / "oom_score_adj").read_text().strip() == "321"
    assert resource.prlimit(record.pid, resource.RLIMIT_CORE) == (0, 0)


async def test_given_descriptors_arrive_at_their_numbers_and_no_others(
    provider: Provider,
) -> None:
    left, right = socket.socketpair()
    reader, writer = os.pipe()
    leaked = os.open("/proc/self/status", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    # Crosswise: each target number is the other's source.
    fds = {reader: right.fileno(), right.fileno(): reader}
    record = await provider.spawn(sleeper(provider.layout, fds=fds))
    expected = {reader: "socket", right.fileno(): "pipe"}
    seen = descriptors_of(record.pid)
    assert {number: seen[number].partition(":")[0] for number in expected} == expected
    assert set(seen) == {0, 1, 2, *expected}
    left.close()
    right.close()
    for fd in (reader, writer, leaked):
        os.close(fd)


@pytest.mark.parametrize("executable", [SLEEP, "/no/such/program"])
async def test_descriptors_may_take_numbers_that_the_start_itself_uses(
    provider: Provider, executable: str
) -> None:
    reader, writer = os.pipe()
    # The numbers that the descriptors made for the start would get: sources and report pipes.
    fds = {number: (reader, writer)[number % 2] for number in range(writer + 8, writer + 28)}
    spec = sleeper(provider.layout, fds=fds, executable=executable)
    if executable == SLEEP:
        record = await provider.spawn(spec)
        seen = descriptors_of(record.pid)
        ours = {number: flags_of(os.getpid(), source) for number, source in fds.items()}
        assert {number: flags_of(record.pid, number) for number in fds} == ours
        assert set(seen) == {0, 1, 2, *fds}
    else:
        with pytest.raises(NotFound):
            await provider.spawn(spec)
    os.close(reader)
    os.close(writer)


def flags_of(pid: int, fd: int) -> str:
    """Return `0` for the reading and `1` for the writing end of a pipe."""
    (line,) = (
        line
        for line in Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines()
        if line.startswith("flags:")
    )
    return line[-1]


@pytest.fixture
def _subreaper() -> Iterator[None]:
    """Orphans come to us, as to the first process of a container that reaps nobody."""
    libc = ctypes.CDLL(None)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0


@pytest.mark.usefixtures("_subreaper")
async def test_a_failed_start_leaves_no_zombie_where_nobody_reaps(provider: Provider) -> None:
    with pytest.raises(NotFound):
        await provider.spawn(sleeper(provider.layout, executable="/no/such/program"))
    assert children_of(os.getpid()) == []


@pytest.mark.usefixtures("_subreaper")
async def test_a_zombie_that_nobody_reaps_is_gone_and_cleaned_up(provider: Provider) -> None:
    record = await provider.spawn(sleeper(provider.layout))
    assert children_of(os.getpid()) == [record.pid]
    assert await terminate(record, grace_s=5) == "term"
    assert Path(f"/proc/{record.pid}").exists()
    assert verify(record) is AdoptVerdict.GONE
    assert provider.find(record.worker_id) == []
    await wait_gone(record)
    await provider.cleanup(record)
    os.waitpid(record.pid, 0)  # noqa: ASYNC222


async def test_output_is_appended_to_a_private_log(provider: Provider, tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    for line in ("one", "two"):
        spec = python_worker(
            provider.layout, f"print('{line}')", log_path=str(log), uid=USER, gid=USER
        )
        await wait_gone(await provider.spawn(spec))
    assert log.read_text() == "one\ntwo\n"
    assert log.stat().st_mode & 0o777 == 0o600
    assert log.stat().st_uid == 0


async def test_a_log_that_is_a_link_is_refused(provider: Provider, tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("/etc/passwd")
    with pytest.raises(FailedPrecondition, match="log"):
        await provider.spawn(sleeper(provider.layout, log_path=str(tmp_path / "log")))


async def test_a_worker_joins_the_network_namespace(provider: Provider, netns: str) -> None:
    record = await provider.spawn(sleeper(provider.layout, netns=netns, uid=USER, gid=USER))
    inside = Path(f"/proc/{record.pid}/ns/net").stat()
    assert inside.st_ino == Path(netns).stat().st_ino
    assert inside.st_ino != Path("/proc/self/ns/net").stat().st_ino


@pytest.mark.parametrize(
    ("context", "expected", "said"),
    [
        ({"executable": "/no/such/program"}, NotFound, "/no/such/program"),
        ({"executable": "no-such-program"}, NotFound, "no-such-program"),
        ({"executable": "/etc/passwd"}, PermissionDenied, "/etc/passwd"),
        ({"netns": "/run/netns/chv-none"}, NotFound, "chv-none"),
        ({"netns": "/etc/hostname"}, FailedPrecondition, "network namespace"),
        ({"cwd": "/no/such/directory"}, FailedPrecondition, "working directory"),
        ({"log_path": "/no/such/directory/log"}, NotFound, "log"),
        ({"fds": {5: 9999}}, ChvError, "Bad file descriptor"),
        ({"uid": USER}, InvalidArgument, "group 0"),
    ],
)
async def test_a_start_that_fails_is_typed_and_leaves_nothing(
    provider: Provider, context: dict[str, object], expected: type[ChvError], said: str
) -> None:
    spec = sleeper(provider.layout, **context)
    before = descriptors_of(os.getpid())
    with pytest.raises(expected, match=said):
        await provider.spawn(spec)
    assert provider.find(spec.worker_id) == []
    assert children_of(os.getpid()) == []
    assert descriptors_of(os.getpid()) == before
    assert await provider.sweep() == []


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.002, 0.003, 0.004, 0.006])
async def test_a_start_that_takes_too_long_is_undone(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, after_s: float
) -> None:
    monkeypatch.setattr(launch, "EXEC_WAIT_S_MAX", after_s)
    spec = sleeper(provider.layout)
    try:
        record = await provider.spawn(spec)
    except DeadlineExceeded:
        await wait_until(lambda: not provider.find(spec.worker_id))
        await wait_until(lambda: children_of(os.getpid()) == [])
    else:  # it was faster than that
        assert verify(record) is AdoptVerdict.ALIVE


async def test_a_file_that_is_no_program_is_refused(provider: Provider, tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"\x01\x02\x03junk")
    (tmp_path / "junk").chmod(0o755)
    with pytest.raises(FailedPrecondition, match="junk"):
        await provider.spawn(sleeper(provider.layout, executable=str(tmp_path / "junk")))


async def test_waiting_ends_when_a_worker_ends_and_at_once_for_one_that_is_gone(
    provider: Provider,
) -> None:
    record = await provider.spawn(sleeper(provider.layout))
    threads = threading.active_count()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as waiters:
            for _ in range(3):
                waiters.start_soon(wait_gone, record)
            await anyio.lowlevel.checkpoint()
            assert threading.active_count() == threads
            assert send(record, signal.SIGKILL)
        await wait_gone(record)
    assert verify(record).dead


async def test_cancelling_a_wait_leaves_the_worker_alone(provider: Provider) -> None:
    record = await provider.spawn(sleeper(provider.layout))
    with anyio.move_on_after(0.01) as scope:
        await wait_gone(record)
    assert scope.cancelled_caught
    assert verify(record) is AdoptVerdict.ALIVE


async def test_the_rung_that_ended_a_worker_is_told(provider: Provider) -> None:
    polite = await provider.spawn(sleeper(provider.layout))
    assert await terminate(polite, grace_s=5) == "term"
    assert await terminate(polite, grace_s=5) == "gone"
    reader, writer = os.pipe()
    code = "import os,signal as s,time;s.signal(s.SIGTERM,s.SIG_IGN);os.close(7);time.sleep(99)"
    stubborn = await provider.spawn(python_worker(provider.layout, code, fds={7: writer}))
    os.close(writer)
    await anyio.wait_readable(reader)  # end of file: it ignores SIGTERM by now
    os.close(reader)
    assert await terminate(stubborn, grace_s=0.05) == "kill"
    stopped = await provider.spawn(sleeper(provider.layout))
    send(stopped, signal.SIGSTOP)
    assert await terminate(stopped, grace_s=0) == "kill"


async def test_a_reused_pid_is_neither_signalled_nor_waited_for(provider: Provider) -> None:
    record = await provider.spawn(sleeper(provider.layout))
    stale = msgspec.structs.replace(record, start_time=record.start_time - 1)
    assert verify(stale) is AdoptVerdict.OTHER
    assert not send(stale, signal.SIGKILL)
    with anyio.fail_after(1):
        await wait_gone(stale)
    assert await terminate(stale, grace_s=1) == "gone"
    assert verify(record) is AdoptVerdict.ALIVE


async def test_a_living_worker_is_not_cleaned_up(provider: Provider) -> None:
    record = await provider.spawn(sleeper(provider.layout))
    with pytest.raises(InUse):
        await provider.cleanup(record)
    with pytest.raises(InUse):
        await provider.retire()
    assert verify(record) is AdoptVerdict.ALIVE
    await terminate(record, grace_s=0)
    await provider.cleanup(record)
    await provider.cleanup(record)


async def test_a_program_replaced_by_an_upgrade_is_still_ours(
    provider: Provider, tmp_path: Path
) -> None:
    program, new = tmp_path / "worker", tmp_path / "worker.new"
    program.write_bytes(Path(SLEEP).read_bytes())
    program.chmod(0o755)
    record = await provider.spawn(sleeper(provider.layout, executable=str(program)))
    new.write_bytes(program.read_bytes())
    new.rename(program)
    assert verify(record) is AdoptVerdict.ALIVE


SPAWNER = """
import os, signal, sys
import anyio
from pathlib import Path
from chv.common.layout import Layout
from chv.common.process import PlainProvider, choose_provider
from tests.integration.process_helpers import sleeper
import chv.common.process.launch as launch

async def main(moment):
    layout = Layout(sys.argv[2])
    if moment == "waiting":
        async def die(fd):
            os.kill(os.getpid(), signal.SIGKILL)
        launch._read_report = die
    choose = PlainProvider if sys.argv[3] == "plain" else choose_provider
    await choose(layout).spawn(sleeper(layout))
    os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main, sys.argv[1])
"""


async def run_spawner(moment: str, provider: Provider) -> int:
    """Spawn a worker from a process that is killed before it could record anything."""
    argv = [sys.executable, "-c", SPAWNER, moment, provider.layout.instance, provider.name]
    process = await anyio.to_thread.run_sync(lambda: subprocess.run(argv, check=False))
    return process.returncode


async def test_a_worker_survives_its_killed_spawner_and_is_found_by_its_id(
    provider: Provider,
) -> None:
    assert await run_spawner("recorded", provider) == -signal.SIGKILL
    (found,) = provider.find(provider.layout.worker_prefix)
    assert verify(found.record()) is AdoptVerdict.ALIVE
    assert int(status_of(found.record())["PPid"]) != os.getpid()


@pytest.mark.parametrize("attempt", range(4))
async def test_a_spawner_killed_before_exec_leaves_a_findable_worker_or_none(
    attempt: int,
) -> None:
    async with open_provider("cgroup") as provider:
        assert await run_spawner("waiting", provider) == -signal.SIGKILL
        # Only processes of ours carry the instance; one that had not got to its exec dies.
        await wait_until(lambda: no_shepherd(provider.layout.instance))
        assert len(provider.find(provider.layout.worker_prefix)) <= 1


def no_shepherd(instance: str) -> bool:
    """Tell whether no process is left that still shows the spawner's own command line."""
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                lines.append((entry / "cmdline").read_bytes())
            except OSError:
                continue
    return not any(b"waiting\0" + instance.encode() in line for line in lines)


async def test_a_hundred_workers_leave_no_descriptor_thread_or_process(
    provider: Provider,
) -> None:
    first = await provider.spawn(sleeper(provider.layout))
    await terminate(first, grace_s=0)
    await provider.cleanup(first)
    before = (descriptors_of(os.getpid()), threading.active_count(), gc.isenabled())
    for _ in range(100):
        record = await provider.spawn(sleeper(provider.layout, uid=USER, gid=USER))
        assert verify(record) is AdoptVerdict.ALIVE
        await provider.kill(record, signal.SIGKILL)
        await wait_gone(record)
        await provider.cleanup(record)
    assert (descriptors_of(os.getpid()), threading.active_count(), gc.isenabled()) == before
    assert children_of(os.getpid()) == []
    assert scan(provider.layout.worker_prefix) == []


async def test_workers_started_at_once_are_all_started(provider: Provider) -> None:
    records: list[WorkerRecord] = []

    async def start() -> None:
        records.append(await provider.spawn(sleeper(provider.layout)))

    async with anyio.create_task_group() as starts:
        for _ in range(20):
            starts.start_soon(start)
    assert len({record.pid for record in records}) == 20
    assert {verify(record) for record in records} == {AdoptVerdict.ALIVE}


async def test_starting_from_another_thread_is_refused(provider: Provider) -> None:
    layout = new_layout()
    argv = (worker_id(layout), "1")

    async def start() -> None:
        spec = sleeper(layout)
        await provider.spawn(msgspec.structs.replace(spec, argv=(spec.worker_id, argv[1])))

    with pytest.raises(RuntimeError, match="main thread"):
        await anyio.to_thread.run_sync(anyio.run, start)


async def test_cancellation_does_not_lose_a_worker_in_the_middle_of_its_start(
    provider: Provider,
) -> None:
    records: list[WorkerRecord] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        records.append(await provider.spawn(sleeper(provider.layout)))
    assert [verify(record) for record in records] == [AdoptVerdict.ALIVE]
