"""From a Program to a running process: open everything, fork, wait for exec, tell what failed.

`start_detached` forks twice, so the process is nobody's child; `start_attached` forks once and the
process dies with us. Both fork from the main thread only: the parent-death signal follows the
forking thread. All errors are typed; after an error no process of the attempt is left.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import anyio

from chv.common.errors import ChvError, DeadlineExceeded, FailedPrecondition, Internal, NotFound
from chv.common.process import landlock, pidfd, procfs, syscalls
from chv.common.process.become import EXIT_NOT_STARTED, Launch, become
from chv.common.process.spec import Program, check, resolve, start_error, whole_environment

EXEC_WAIT_S_MAX = 10.0
REPORT_BYTES_MAX = 4096
_LOG_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LOG_MODE = 0o600


@dataclass(frozen=True, slots=True)
class Started:
    """A process whose exec has succeeded."""

    pid: int
    start_time: int


@contextmanager
def prepared(program: Program, *, cgroup: str = "", dies_with_parent: bool) -> Iterator[Launch]:
    """Open all that the child needs, check all that can be checked, close it afterwards.

    `cgroup`: directory of the one that the process starts in.
    """
    check(program)
    executable = resolve(program)
    with ExitStack() as stack:
        try:
            launch = _open_all(stack, program, executable, (cgroup, dies_with_parent))
        except OSError as error:
            raise start_error(program, "open", error.errno or 0) from error
        yield launch


def _open_all(
    stack: ExitStack, program: Program, executable: str, lifetime: tuple[str, bool]
) -> Launch:
    cgroup, dies_with_parent = lifetime
    floor = max(2, *program.fds) + 1 if program.fds else 3

    def own(fd: int) -> int:
        stack.callback(os.close, fd)
        return fd

    def lifted(fd: int) -> int:
        return own(syscalls.lift(fd, floor))

    null = lifted(own(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)))
    log = lifted(own(_open_log(program.log_path))) if program.log_path else null
    given = {target: lifted(source) for target, source in program.fds.items()}
    netns = lifted(own(_open_netns(program.netns))) if program.netns else -1
    rules = lifted(_own_ruleset(own, program)) if program.landlock and landlock.abi() else -1
    leaf = procs = -1
    if cgroup:
        leaf = lifted(own(os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)))
        procs = lifted(own(os.open(f"{cgroup}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)))
    return Launch(
        executable=executable,
        argv=program.argv,
        environment=whole_environment(program),
        privileged=os.geteuid() == 0,
        uid=program.uid,
        gid=program.gid,
        groups=program.groups,
        capabilities=syscalls.capability_mask(program.keep_capabilities),
        no_new_privs=program.no_new_privs,
        cwd=program.cwd,
        umask=program.umask,
        oom_score_adj=program.oom_score_adj,
        fds={0: null, 1: log, 2: log} | given,
        fd_floor=floor,
        netns_fd=netns,
        empty_netns=program.empty_netns,
        own_devices=tuple((path, _device(path)) for path in program.own_devices),
        landlock_fd=rules,
        cgroup_fd=leaf,
        cgroup_procs_fd=procs,
        dies_with_parent=dies_with_parent,
    )


def _device(path: str) -> int:
    try:
        status = Path(path).stat()
    except OSError as error:
        raise NotFound(f"no device {path}: {error.strerror}", field="own_devices") from error
    if not stat.S_ISCHR(status.st_mode):
        raise FailedPrecondition(f"{path} is not a character device", field="own_devices")
    return status.st_rdev


def _own_ruleset(own: Callable[[int], int], program: Program) -> int:
    try:
        return own(landlock.make_ruleset(program.landlock))
    except OSError as error:
        raise start_error(program, "landlock", error.errno or 0) from error


def _open_log(path: str) -> int:
    try:
        fd = os.open(path, _LOG_FLAGS, _LOG_MODE)
    except OSError as error:
        kind = NotFound if error.errno == errno.ENOENT else FailedPrecondition
        raise kind(f"cannot open log {path!r}: {error.strerror}", field="log_path") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FailedPrecondition(f"log {path!r} is not a regular file", field="log_path")
    os.set_blocking(fd, True)
    return fd


def _open_netns(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(f"no network namespace {path!r}", field="netns") from error


async def start_detached(program: Program, launch: Launch) -> Started:
    """Start a process that is not our child and outlives us; return once its exec succeeded."""
    return await _start(program, launch, _detach)


async def start_attached(program: Program, launch: Launch) -> Started:
    """Start a child that dies with us; the caller must reap it."""
    return await _start(program, launch, _attach)


async def _start(
    program: Program, launch: Launch, child: Callable[[Launch, int, int], NoReturn]
) -> Started:
    with ExitStack() as stack:
        reader, writer = _report_pipe(launch)
        stack.callback(os.close, reader)
        parent_pid = os.getpid()
        try:
            pid = _fork(lambda: child(launch, writer, parent_pid))
        except OSError as error:
            raise start_error(program, "fork", error.errno or 0) from error
        finally:
            os.close(writer)
        # A start is whole or undone: milliseconds, so cancellation waits.
        with anyio.CancelScope(shield=True):
            report = await _read_report(reader)
        if not report.complete:
            _abandon(pid, report, reader)
            raise DeadlineExceeded(
                f"{program.argv[0]!r} was not executed within {EXEC_WAIT_S_MAX:.0f} s; killed"
            )
    # The shepherd of a detached start has done its work; a failed child is dead.
    shepherd = child is _detach
    status = _reap(pid) if shepherd or report.started is None else 0
    if report.started is None or (shepherd and status):
        raise _failure(program, report)
    return report.started


@dataclass(frozen=True, slots=True)
class _Report:
    """What came through the report pipe; `complete` when all writers are gone."""

    text: str
    complete: bool

    @property
    def first(self) -> Started | None:
        """The process, whether or not it got to its exec."""
        head, newline, _ = self.text.partition("\n")
        return Started(*(int(word) for word in head.split())) if newline else None

    @property
    def failure(self) -> str:
        """`<stage> <errno>`, empty when exec succeeded."""
        return self.text.partition("\n")[2].strip()

    @property
    def started(self) -> Started | None:
        """The process when its exec succeeded."""
        return self.first if self.complete and not self.failure else None


def _failure(program: Program, report: _Report) -> ChvError:
    if not report.failure:
        return Internal(f"the process for {program.argv[0]!r} ended before its exec")
    stage, number = report.failure.split()
    return start_error(program, stage, int(number))


def _abandon(pid: int, report: _Report, reader: int) -> None:
    """Kill our child, and the worker too when that is another process."""
    kill_and_reap(pid)
    with contextlib.suppress(BlockingIOError):
        rest = os.read(reader, REPORT_BYTES_MAX)
        report = _Report(report.text + rest.decode(), complete=False)
    if report.first is not None and report.first.pid != pid:
        _kill_exactly(report.first)


def kill_and_reap(pid: int) -> None:
    """End a child of ours that is not reaped yet."""
    os.kill(pid, signal.SIGKILL)
    _reap(pid)


def _reap(pid: int) -> int:
    """Return the wait status of a child that has ended or is about to."""
    return os.waitpid(pid, 0)[1]


def _kill_exactly(worker: Started) -> None:
    fd = pidfd.open_pid(worker.pid)
    if fd is None:
        return
    stat_now = procfs.stat(worker.pid)
    if stat_now is not None and stat_now.start_time == worker.start_time:
        pidfd.send_to(fd, signal.SIGKILL)
    os.close(fd)


def _report_pipe(launch: Launch) -> tuple[int, int]:
    """Return a pipe whose writing end the child's descriptors cannot overwrite."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return reader, syscalls.lift(writer, launch.fd_floor)
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)


async def _read_report(fd: int) -> _Report:
    """Return what the child wrote within the time limit."""
    data = b""
    with anyio.move_on_after(EXEC_WAIT_S_MAX):
        while True:
            await anyio.wait_readable(fd)
            part = os.read(fd, REPORT_BYTES_MAX)
            if not part:
                return _Report(data.decode(), complete=True)
            data += part
    return _Report(data.decode(), complete=False)


def _fork(child: Callable[[], NoReturn]) -> int:
    """Fork; run `child` in the new process with signals blocked and the collector off.

    The collector must not run finalizers in the child, and a signal must not reach the Python
    handlers that the child shares with us, nor the event loop's wakeup descriptor.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("processes are started from the main thread only")
    collecting = gc.isenabled()
    gc.disable()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns about threads; the child takes no lock and only execs.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            child()
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if collecting:
            gc.enable()


def _attach(launch: Launch, report_fd: int, parent_pid: int) -> NoReturn:
    with contextlib.suppress(BaseException):
        _announce(report_fd)
        become(launch, report_fd, parent_pid)
    os._exit(EXIT_NOT_STARTED)


def _announce(report_fd: int) -> None:
    """Tell who we are, before anything else: whatever runs its exec has been told of."""
    pid = os.getpid()
    own = procfs.stat(pid)
    assert own is not None
    os.write(report_fd, f"{pid} {own.start_time}\n".encode())


def _detach(launch: Launch, report_fd: int, parent_pid: int) -> NoReturn:
    """Fork the worker and stay until its exec, to reap it should that fail.

    Until its exec the worker dies with us, and we with the spawner: a spawner killed in the
    middle leaves no process that nobody knows of.
    """
    with contextlib.suppress(BaseException):
        syscalls.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() == parent_pid:
            _shepherd(launch, report_fd)
    os._exit(EXIT_NOT_STARTED)


def _shepherd(launch: Launch, report_fd: int) -> None:
    own_pid = os.getpid()
    reader, low = os.pipe()
    writer = syscalls.lift(low, launch.fd_floor)
    os.close(low)
    pid, launch = _fork_worker(launch)
    if pid == 0:
        os.close(reader)
        _announce(report_fd)
        become(launch, writer, own_pid)
    os.close(writer)
    failure = os.read(reader, REPORT_BYTES_MAX)
    if failure:
        os.waitpid(pid, 0)
        os.write(report_fd, failure)
    os._exit(0)


def _fork_worker(launch: Launch) -> tuple[int, Launch]:
    """Fork, into the cgroup where there is one and that works; return what is left to do."""
    if launch.cgroup_fd >= 0:
        with contextlib.suppress(OSError):
            pid = syscalls.fork_into_cgroup(launch.cgroup_fd)
            return pid, replace(launch, cgroup_procs_fd=-1)
    return os.fork(), launch
