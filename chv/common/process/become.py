"""The steps by which a forked child becomes the program, ending in exec. Runs in the child only.

No logging, no imports, no locks: another thread may have held any lock when we forked. Each step
is a name and a function; a step that fails is told to the parent as `<name> <errno>` through the
report descriptor, which an exec that works closes. Nothing here returns to the caller.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from chv.common.process import landlock, syscalls

EXIT_NOT_STARTED = 127
NODE_SCRATCH = "/run"  # is there on every host; covered for a moment, in our namespace alone
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


@dataclass(frozen=True, slots=True)
class Launch:
    """A start with everything resolved and opened before the fork.

    Descriptors on the right side of `fds` lie above all numbers on the left. `privileged`: the
    spawner is root and sets the identity; otherwise the child stays who it is. `netns_fd`,
    `landlock_fd`, `cgroup_fd` (the directory) and `cgroup_procs_fd` are -1 where not wanted.
    """

    executable: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    privileged: bool
    uid: int
    gid: int
    groups: tuple[int, ...]
    capabilities: int
    no_new_privs: bool
    cwd: str
    umask: int
    oom_score_adj: int
    fds: dict[int, int]
    fd_floor: int
    netns_fd: int
    empty_netns: bool
    own_devices: tuple[tuple[str, int], ...]  # path, device number
    landlock_fd: int
    cgroup_fd: int
    cgroup_procs_fd: int
    dies_with_parent: bool


def become(launch: Launch, report_fd: int, parent_pid: int) -> NoReturn:
    """Turn this forked child into the program; on failure report and exit."""
    stage = "fork"
    try:
        _bind_to(parent_pid)
        for stage, step in _STEPS:  # noqa: B007  the name is told when its step fails
            step(launch)
        if launch.dies_with_parent:
            _bind_to(parent_pid)  # a change of uid has cleared it
        else:
            syscalls.set_parent_death_signal(0)
        stage = "exec"
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execve(launch.executable, launch.argv, launch.environment)  # noqa: S606
    except OSError as error:
        _report(report_fd, stage, error.errno or 0)
    except BaseException:  # noqa: BLE001, ASYNC103  told to the parent, which raises
        _report(report_fd, stage, 0)
    finally:
        os._exit(EXIT_NOT_STARTED)


def _report(fd: int, stage: str, number: int) -> None:
    os.write(fd, f"{stage} {number}\n".encode())


def _bind_to(parent_pid: int) -> None:
    syscalls.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(EXIT_NOT_STARTED)


def _session(_: Launch) -> None:
    os.setsid()


def _signals(_: Launch) -> None:
    signal.set_wakeup_fd(-1)  # the event loop's own, which we share with the parent
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_DFL:  # asks no kernel: half a ms less
            signal.signal(number, signal.SIG_DFL)


def _cgroup(launch: Launch) -> None:
    if launch.cgroup_procs_fd >= 0:
        os.write(launch.cgroup_procs_fd, b"0")


def _oom(launch: Launch) -> None:
    if not launch.privileged and launch.oom_score_adj == 0:
        return  # only root may go below what a user session was given
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    os.write(fd, str(launch.oom_score_adj).encode())
    os.close(fd)


def _netns(launch: Launch) -> None:
    if launch.netns_fd >= 0:
        syscalls.join_netns(launch.netns_fd)
    if launch.empty_netns:
        syscalls.leave_network()


def _devices(launch: Launch) -> None:
    if launch.own_devices:
        syscalls.leave_mounts()
    for path, device in launch.own_devices:
        syscalls.own_node(path, device, launch.gid, NODE_SCRATCH)


def _limits(_: Launch) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _identity(launch: Launch) -> None:
    if not launch.privileged:
        return
    restricted = launch.uid != 0 or launch.capabilities != 0
    if restricted:
        syscalls.drop_bounding(launch.capabilities)
    if launch.uid and launch.capabilities:
        syscalls.keep_capabilities_over_setuid()
    os.setgroups(launch.groups)
    os.setresgid(launch.gid, launch.gid, launch.gid)
    os.setresuid(launch.uid, launch.uid, launch.uid)
    if restricted:
        syscalls.set_capabilities(launch.capabilities)
        syscalls.set_ambient(launch.capabilities if launch.uid else 0)


def _privileges(launch: Launch) -> None:
    if launch.no_new_privs:
        syscalls.set_no_new_privileges()


def _landlock(launch: Launch) -> None:
    if launch.landlock_fd >= 0:
        landlock.restrict_self(launch.landlock_fd)


def _directory(launch: Launch) -> None:
    os.umask(launch.umask)
    os.chdir(launch.cwd)


def _descriptors(launch: Launch) -> None:
    syscalls.close_on_exec_from(0)
    for target, source in launch.fds.items():
        os.dup2(source, target, inheritable=True)


_STEPS: tuple[tuple[str, Callable[[Launch], None]], ...] = (
    ("session", _session),
    ("signals", _signals),
    ("cgroup", _cgroup),
    ("oom_score_adj", _oom),
    ("netns", _netns),
    ("devices", _devices),
    ("limits", _limits),
    ("identity", _identity),
    ("no_new_privs", _privileges),
    ("directory", _directory),
    ("descriptors", _descriptors),
    ("landlock", _landlock),  # last: the steps before it open files of /proc
)
