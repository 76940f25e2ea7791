"""Waiting for and signalling processes by pidfd: no threads, no recycled pids, no children needed.

The pidfd is opened first and the start time compared afterwards, so what it refers to is the
recorded process or nothing. Fails with Unsupported before Linux 5.3 and with DeadlineExceeded
for a process that does not even die by SIGKILL (stuck in the kernel).
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from chv.common.errors import DeadlineExceeded, Unsupported
from chv.common.process import procfs
from chv.common.process.records import WorkerRecord, is_same_process

KILL_WAIT_S_MAX = 30.0


def open_pid(pid: int) -> int | None:
    """Return a pidfd, or None when no process (or only a thread) has that pid."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
            return None
        if error.errno == errno.ENOSYS:
            raise Unsupported("this kernel has no pidfd", hint="Linux 5.10 or newer") from error
        raise


@contextmanager
def opened(record: WorkerRecord) -> Iterator[int | None]:
    """Yield a pidfd of the recorded process, None when it is gone."""
    fd = open_pid(record.pid)
    try:
        yield fd if fd is not None and is_same_process(record) else None
    finally:
        if fd is not None:
            os.close(fd)


async def wait_gone(record: WorkerRecord) -> None:
    """Return when the recorded process has ended; at once when it is gone already."""
    with opened(record) as fd:
        if fd is not None:
            await anyio.wait_readable(fd)


def send(record: WorkerRecord, number: int) -> bool:
    """Send a signal to the recorded process and to no other; False when it is gone."""
    with opened(record) as fd:
        return fd is not None and send_to(fd, number)


def send_to(fd: int, number: int) -> bool:
    """Send a signal through a pidfd; False when the process is gone."""
    try:
        signal.pidfd_send_signal(fd, signal.Signals(number))
    except ProcessLookupError:
        return False
    return True


async def terminate(record: WorkerRecord, *, grace_s: float) -> str:
    """SIGTERM, after `grace_s` SIGKILL; return the rung that ended it: gone, term or kill.

    With `grace_s` 0 there is no SIGTERM. What the process left behind (children, cgroup) is the
    provider's business.
    """
    with opened(record) as fd:
        stat = procfs.stat(record.pid)
        if fd is None or stat is None or stat.dead:
            return "gone"
        if grace_s > 0 and await _end(fd, signal.SIGTERM, grace_s):
            return "term"
        if await _end(fd, signal.SIGKILL, KILL_WAIT_S_MAX):
            return "kill"
    raise DeadlineExceeded(
        f"process {record.pid} did not end by SIGKILL in {KILL_WAIT_S_MAX:.0f} s",
        resource=record.worker_id,
        hint="it is stuck in the kernel, often on storage; see /proc/PID/stack",
    )


async def _end(fd: int, number: int, limit_s: float) -> bool:
    send_to(fd, number)
    with anyio.move_on_after(limit_s) as scope:
        await anyio.wait_readable(fd)
    return not scope.cancelled_caught
