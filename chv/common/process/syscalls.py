"""The system calls that Python 3.11 has no name for: prctl, setns, capset, close_range, clone3, ...

Everything is looked up at import, so that a freshly forked child only calls. A failure raises
OSError with the errno of the call. Nothing here decides anything.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
_CLONE_NEWNS = 0x00020000
_MS_BIND = 0x1000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_MS_NOEXEC_NOSUID = 0x8 | 0x2
_MNT_DETACH = 2
_CLONE_INTO_CGROUP = 0x200000000

_PR_SET_PDEATHSIG = 1
_PR_SET_KEEPCAPS = 8
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITY_NUMBERS_MAX = 64
_NR_CLONE3 = 435  # one number on every architecture, as the next
_NR_CLOSE_RANGE = 436
_CLOSE_RANGE_CLOEXEC = 4
_FD_MAX = 0x7FFFFFFF

# linux/capability.h, in numeric order.
CAPABILITIES: tuple[str, ...] = (
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_LINUX_IMMUTABLE",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_BROADCAST",
    "CAP_NET_ADMIN",
    "CAP_NET_RAW",
    "CAP_IPC_LOCK",
    "CAP_IPC_OWNER",
    "CAP_SYS_MODULE",
    "CAP_SYS_RAWIO",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_SYS_PACCT",
    "CAP_SYS_ADMIN",
    "CAP_SYS_BOOT",
    "CAP_SYS_NICE",
    "CAP_SYS_RESOURCE",
    "CAP_SYS_TIME",
    "CAP_SYS_TTY_CONFIG",
    "CAP_MKNOD",
    "CAP_LEASE",
    "CAP_AUDIT_WRITE",
    "CAP_AUDIT_CONTROL",
    "CAP_SETFCAP",
    "CAP_MAC_OVERRIDE",
    "CAP_MAC_ADMIN",
    "CAP_SYSLOG",
    "CAP_WAKE_ALARM",
    "CAP_BLOCK_SUSPEND",
    "CAP_AUDIT_READ",
    "CAP_PERFMON",
    "CAP_BPF",
    "CAP_CHECKPOINT_RESTORE",
)

_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl
_prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
_setns = _libc.setns
_setns.argtypes = [ctypes.c_int, ctypes.c_int]
_unshare = _libc.unshare
_unshare.argtypes = [ctypes.c_int]
_mount = _libc.mount
_mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]
_umount2 = _libc.umount2
_umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_capset = _libc.capset
_capset.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
_syscall = _libc.syscall
# Keeps the interpreter's lock: the child has no other thread to take it back from.
_syscall_locked = ctypes.PyDLL(None, use_errno=True).syscall
_CapabilityHeader = ctypes.c_uint32 * 2
_CapabilityData = ctypes.c_uint32 * 6


class _CloneArguments(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size"),
            *("tls", "set_tid", "set_tid_size", "cgroup"),
        )
    ]


def _checked(result: Any) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


def fork_into_cgroup(directory_fd: int) -> int:
    """Fork a child that is born in the cgroup; to join one later can take 10 ms more.

    For a process with one thread and a child that only execs: what `os.fork` does for locks of
    other threads is not done. OSError where the kernel (before 5.7) or a sandbox refuses.
    """
    arguments = _CloneArguments(
        flags=_CLONE_INTO_CGROUP, exit_signal=signal.SIGCHLD, cgroup=directory_fd
    )
    size_bytes = ctypes.c_size_t(ctypes.sizeof(arguments))
    return _checked(_syscall_locked(_NR_CLONE3, ctypes.byref(arguments), size_bytes))


def set_parent_death_signal(number: int) -> None:
    """Ask for signal `number` when the forking thread ends; 0 asks for none."""
    _checked(_prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0))


def set_no_new_privileges() -> None:
    """Make set-user-id programs and file capabilities powerless from here on."""
    _checked(_prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def keep_capabilities_over_setuid() -> None:
    """Keep the permitted set through the next change of uid."""
    _checked(_prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0))


def join_netns(fd: int) -> None:
    """Enter the network namespace that `fd` refers to."""
    _checked(_setns(fd, CLONE_NEWNET))


def leave_network() -> None:
    """Enter a new network namespace: no interface but a loopback that is down."""
    _checked(_unshare(CLONE_NEWNET))


def leave_mounts() -> None:
    """Enter a mount namespace of one's own, from which nothing reaches the others."""
    _checked(_unshare(_CLONE_NEWNS))
    _checked(_mount(b"none", b"/", None, _MS_REC_PRIVATE, None))


def own_node(path: str, device: int, gid: int, scratch: str) -> None:
    """Put a character device node of one's own, 0660 root:`gid`, over `path`.

    For a mount namespace of one's own. The node lives in a file system that is mounted on the
    directory `scratch` for a moment: /run and its like do not let devices be opened.
    """
    _checked(_mount(b"chv", os.fsencode(scratch), b"tmpfs", _MS_NOEXEC_NOSUID, b"mode=0700"))
    node = f"{scratch}/node"
    os.mknod(node, 0o020660, device)
    os.chown(node, 0, gid)
    Path(node).chmod(0o660)  # whatever the umask is
    _checked(_mount(os.fsencode(node), os.fsencode(path), None, _MS_BIND, None))
    _checked(_umount2(os.fsencode(scratch), _MNT_DETACH))


def drop_bounding(keep: int) -> None:
    """Take every capability outside the bit mask `keep` out of the bounding set."""
    for number in range(_CAPABILITY_NUMBERS_MAX):
        present = _prctl(_PR_CAPBSET_READ, number, 0, 0, 0)
        if present < 0:
            return  # the kernel knows no further capability
        if present and not keep >> number & 1:
            _checked(_prctl(_PR_CAPBSET_DROP, number, 0, 0, 0))


def set_capabilities(mask: int) -> None:
    """Set effective, permitted and inheritable to `mask`."""
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = _CapabilityHeader(_CAPABILITY_VERSION_3, 0)
    data = _CapabilityData(low, low, low, high, high, high)
    _checked(_capset(ctypes.byref(header), ctypes.byref(data)))


def set_ambient(mask: int) -> None:
    """Set the ambient set to `mask`, which must be permitted and inheritable already."""
    cleared = _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    if cleared < 0 and ctypes.get_errno() == errno.EINVAL and not mask:
        return  # no ambient set before Linux 4.3, so nothing to clear
    _checked(cleared)
    for number in range(_CAPABILITY_NUMBERS_MAX):
        if mask >> number & 1:
            _checked(_prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, number, 0, 0))


def close_on_exec_from(first: int) -> None:
    """Mark every descriptor from `first` on close-on-exec, whoever opened it."""
    if _syscall(_NR_CLOSE_RANGE, first, _FD_MAX, _CLOSE_RANGE_CLOEXEC) == 0:
        return
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208  no objects in a forked child
        if int(entry) >= first:
            _set_close_on_exec(int(entry))


def _set_close_on_exec(fd: int) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EBADF:  # the directory's own descriptor is closed by now
            raise


def lift(fd: int, floor: int) -> int:
    """Return a close-on-exec duplicate of `fd` numbered `floor` or higher."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor)


def capability_mask(names: tuple[str, ...]) -> int:
    """Return the bit mask of capability names; KeyError has the unknown name."""
    mask = 0
    for name in names:
        if name not in CAPABILITIES:
            raise KeyError(name)
        mask |= 1 << CAPABILITIES.index(name)
    return mask
