"""Short helper commands: run, collect bounded output, leave nothing behind.

The command gets a scrubbed environment and a process group of its own, which is killed when it
ends, when time runs out, when the caller is cancelled, and (the command itself) when we die.
Errors name the program, never its arguments or its input, for those may be private. Data goes in
by `stdin` or `fds`, not by argv.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO

import anyio
import msgspec

from chv.common.errors import DeadlineExceeded, Internal, ResourceExhausted
from chv.common.process.child import Child, start_child
from chv.common.process.landlock import PathAccess
from chv.common.process.spec import Program, program_name

OUTPUT_BYTES_MAX = 4 * 1024 * 1024
STDERR_SHOWN_CHARS_MAX = 400
REAP_WAIT_S_MAX = 30.0
DRAIN_S_MAX = 1.0
_CHUNK_BYTES = 65536


class Completed(msgspec.Struct, frozen=True):
    """A command that has ended."""

    returncode: int
    stdout: bytes
    stderr: bytes


class CommandFailed(Internal):
    """A helper command ended with an error; `returncode` is negative for a signal."""

    def __init__(self, program: str, completed: Completed) -> None:
        lines = completed.stderr.decode(errors="replace").strip().splitlines()
        said = lines[-1][:STDERR_SHOWN_CHARS_MAX] if lines else "no message"
        super().__init__(f"{program} failed with code {completed.returncode}: {said}")
        self.returncode = completed.returncode
        self.stdout = completed.stdout
        self.stderr = completed.stderr


async def run(  # noqa: PLR0913  one call per helper command: its context is its signature
    argv: tuple[str, ...] | list[str],
    *,
    timeout_s: float,
    stdin: bytes | None = None,
    check: bool = True,
    netns: str = "",
    uid: int | None = None,
    gid: int | None = None,
    environment: dict[str, str] | None = None,
    fds: dict[int, int] | None = None,
    cwd: str = "/",
    on_stdout: Callable[[bytes], None] | None = None,
    empty_netns: bool = False,
    landlock: tuple[PathAccess, ...] = (),
) -> Completed:
    """Run a command to its end; CommandFailed unless it returns 0 or `check` is False.

    `on_stdout` is told every piece of its standard output as it comes.
    """
    program = Program(
        argv=tuple(argv),
        uid=os.geteuid() if uid is None else uid,
        gid=os.getegid() if gid is None else gid,
        environment=environment or {},
        netns=netns,
        fds=fds or {},
        cwd=cwd,
        umask=0o022,
        no_new_privs=uid not in (None, 0) or bool(landlock),
        empty_netns=empty_netns,
        landlock=landlock,
    )
    completed = await _run(program, stdin, timeout_s, on_stdout)
    if check and completed.returncode != 0:
        raise CommandFailed(program_name(program), completed)
    return completed


@dataclass(slots=True)
class _Pipes:
    """Our ends of the command's standard streams; no stdin without input."""

    stdin: FileIO | None
    stdout: int
    stderr: int
    on_stdout: Callable[[bytes], None] | None = None


async def _run(
    program: Program,
    stdin: bytes | None,
    timeout_s: float,
    on_stdout: Callable[[bytes], None] | None,
) -> Completed:
    name = program_name(program)
    with ExitStack() as ours:
        child, pipes = await _start(program, ours, with_input=stdin is not None)
        pipes.on_stdout = on_stdout
        try:
            with anyio.fail_after(timeout_s):
                return await _converse(child, pipes, stdin or b"")
        except TimeoutError as error:
            raise DeadlineExceeded(f"{name} did not end within {timeout_s:g} s; killed") from error
        finally:
            with anyio.move_on_after(REAP_WAIT_S_MAX, shield=True):
                await _finish(child)


async def _start(program: Program, ours: ExitStack, *, with_input: bool) -> tuple[Child, _Pipes]:
    with ExitStack() as theirs:
        out_reader, out_writer = _pipe(ours, theirs)
        err_reader, err_writer = _pipe(ours, theirs)
        fds = {1: out_writer, 2: err_writer}
        pipes = _Pipes(None, out_reader, err_reader)
        if with_input:
            fds[0], in_writer = _pipe(theirs, theirs)
            pipes.stdin = ours.enter_context(FileIO(os.dup(in_writer), "w"))
            os.set_blocking(in_writer, False)
        os.set_blocking(out_reader, False)
        os.set_blocking(err_reader, False)
        child = await start_child(msgspec.structs.replace(program, fds=program.fds | fds))
    return child, pipes


def _pipe(reader_owner: ExitStack, writer_owner: ExitStack) -> tuple[int, int]:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    reader_owner.callback(os.close, reader)
    writer_owner.callback(os.close, writer)
    return reader, writer


async def _converse(child: Child, pipes: _Pipes, data: bytes) -> Completed:
    outputs = {pipes.stdout: bytearray(), pipes.stderr: bytearray()}
    # Errors of the streams are raised below, outside, so that no group is wrapped around them.
    overflow = anyio.Event()
    async with anyio.create_task_group() as streams:
        for fd, buffer in outputs.items():
            told = pipes.on_stdout if fd == pipes.stdout else None
            streams.start_soon(_drain, fd, buffer, _Overflow(overflow, child), told)
        if pipes.stdin is not None:
            streams.start_soon(_feed, pipes.stdin, data)
        await child.exited()
        child.kill_group()
        # Only a stray in another session can hold the pipes open now.
        streams.cancel_scope.deadline = anyio.current_time() + DRAIN_S_MAX
    if overflow.is_set():
        raise ResourceExhausted(f"{child.name} wrote more than {OUTPUT_BYTES_MAX} bytes; killed")
    return Completed(child.reap(), bytes(outputs[pipes.stdout]), bytes(outputs[pipes.stderr]))


@dataclass(slots=True)
class _Overflow:
    event: anyio.Event
    child: Child

    def happened(self) -> None:
        self.event.set()
        self.child.kill_group()


async def _drain(
    fd: int, buffer: bytearray, overflow: _Overflow, told: Callable[[bytes], None] | None
) -> None:
    while True:
        await anyio.wait_readable(fd)
        part = os.read(fd, _CHUNK_BYTES)
        if not part:
            return
        buffer += part
        if told is not None:
            told(part)
        if len(buffer) > OUTPUT_BYTES_MAX:
            overflow.happened()
            return


async def _feed(writer: FileIO, data: bytes) -> None:
    """Write all input and close. A command that does not read it all tells by its exit code."""
    view = memoryview(data)
    with writer, contextlib.suppress(BrokenPipeError):
        while view:
            await anyio.wait_writable(writer)
            view = view[os.write(writer.fileno(), view[:_CHUNK_BYTES]) :]


async def _finish(child: Child) -> None:
    """Kill what is left and reap; on the way out of every path."""
    child.kill_group()
    await child.wait()
