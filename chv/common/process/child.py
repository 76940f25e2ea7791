"""Processes that are our children and die with us: our daemons, and helper commands.

A Child is watched by pidfd: no thread, no SIGCHLD handler. Whoever starts one must `wait` for it,
or a zombie stays until we exit. It has a session of its own, so a terminal's Ctrl-C reaches us
alone, and `kill_group` reaches what it started in turn.
"""

from __future__ import annotations

import os
import signal

import anyio

from chv.common.errors import DeadlineExceeded, ResourceExhausted
from chv.common.process import pidfd
from chv.common.process.launch import kill_and_reap, prepared, start_attached
from chv.common.process.pidfd import KILL_WAIT_S_MAX
from chv.common.process.spec import Program, program_name


class Child:
    """A running or ended child."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    async def exited(self) -> None:
        """Return when the child has ended, reaped or not."""
        if self.returncode is not None:
            return
        own = os.dup(self._pidfd)  # one descriptor per waiter: the event loop allows one each
        try:
            await anyio.wait_readable(own)
        finally:
            os.close(own)

    async def wait(self) -> int:
        """Return the exit code (negative: the signal) and reap the child."""
        await self.exited()
        return self.reap()

    def reap(self) -> int:
        """Collect a child that has ended; waits for one that has not."""
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
            os.close(self._pidfd)
        return self.returncode

    def send(self, number: int) -> bool:
        """Send a signal; False when the child has ended."""
        return self.returncode is None and pidfd.send_to(self._pidfd, number)

    def kill_group(self) -> None:
        """SIGKILL the child and all that stayed in its process group.

        Safe until the child is reaped: only then can its number belong to another group.
        """
        if self.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)

    async def terminate(self, *, grace_s: float) -> str:
        """SIGTERM, after `grace_s` SIGKILL; reap; return the rung: gone, term or kill."""
        if self.returncode is not None:
            return "gone"
        rungs = (("term", signal.SIGTERM, grace_s), ("kill", signal.SIGKILL, KILL_WAIT_S_MAX))
        for rung, number, limit_s in rungs:
            if limit_s > 0 and await self._ends(number, limit_s):
                self.reap()
                return rung
        raise DeadlineExceeded(f"{self.name} (pid {self.pid}) does not die by SIGKILL")

    async def _ends(self, number: int, limit_s: float) -> bool:
        self.send(number)
        with anyio.move_on_after(limit_s) as scope:
            await self.exited()
        return not scope.cancelled_caught


async def start_child(program: Program) -> Child:
    """Start any program as a child; typed errors as in `launch`."""
    with prepared(program, dies_with_parent=True) as launch:
        started = await start_attached(program, launch)
    try:
        return Child(program_name(program), started.pid)
    except OSError as error:
        kill_and_reap(started.pid)
        raise ResourceExhausted(f"no pidfd for {program_name(program)}: {error}") from error


async def spawn_child(
    argv: tuple[str, ...],
    *,
    log_path: str = "",
    environment: dict[str, str] | None = None,
    fds: dict[int, int] | None = None,
) -> Child:
    """Start one of our daemons: it is killed when we end, however we end.

    Runs as we do, with our capabilities; its output is appended to `log_path`.
    """
    program = Program(
        argv=tuple(argv),
        log_path=log_path,
        environment=environment or {},
        fds=fds or {},
        uid=os.geteuid(),
        gid=os.getegid(),
        no_new_privs=False,
    )
    return await start_child(program)
