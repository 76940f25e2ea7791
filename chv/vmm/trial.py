"""A try-boot: what KVM is good for, told by the probe guest within about a second.

The probe executes one by one the instructions that stock kernels need. A KVM that cannot emulate
one may end the VMM, reset the guest, stop it or leave it silent: then that one is the culprit, and
the next boot goes round it. The VMM is our child and runs without privileges; it is dead before
this returns, or with us. Knows the probe by its lines alone. ChvError where the VMM does not start.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import msgspec

from chv.common.process.child import Child, start_child
from chv.common.process.pidfd import KILL_WAIT_S_MAX
from chv.common.process.spec import Program

NOBODY = 65534
TRIAL_S_MAX = 10.0  # for all boots together
AT_ONCE_MAX = 2
EACH_MAX = 6  # few, as a guest whose code is emulated takes long to read them
SILENCE_S_MAX = 2.0
OUTPUT_BYTES_MAX = 1 << 20
NAMED_MAX = 6
KERNEL_FD = 3
# Those that others rest on are executed in each boot.
PREPARING = ("mov-cr", "fninit")
_CHUNK_BYTES = 65536
_LINE = re.compile(rb"@[0-9]+ ([a-z-]+)((?: [a-z0-9_]+=[^ \r\n]*)*)\r?\n")
_INSTRUCTION = re.compile(rb" insn=([a-z0-9-]+)")
_BAD = re.compile(rb" result=(fault|wrong)")
# QEMU keeps a guest that KVM could not emulate, and says this.
_STOPPED = b"KVM internal error"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`booted`: the probe's first line came. `missing`: instructions that do not work.

    `complete`: every instruction was tried. `last`: what was printed last, where nothing booted.
    """

    booted: bool
    missing: tuple[str, ...] = ()
    complete: bool = False
    last: str = ""
    returncode: int | None = None

    @property
    def stock(self) -> bool:
        """Whether stock kernels have what they need."""
        return self.complete and not self.missing

    def words(self) -> str:
        """Return what this means, for people."""
        if not self.booted:
            how = "was cut off" if self.returncode == -signal.SIGKILL else f"({self.returncode})"
            return f"KVM does not run a guest: the VMM ended {how}; {self.last}"
        if self.stock:
            return "KVM runs all instructions that stock kernels need"
        named = ", ".join(self.missing[:NAMED_MAX])
        more = len(self.missing) - NAMED_MAX
        named += f" and {more} more" if more > 0 else ""
        rest = "" if self.complete else ", not all were tried"
        count = len(self.missing)
        return (
            f"KVM is usable for the probe only: {count} instructions that stock kernels need "
            f"do not work ({named}{rest})"
        )


class Payload(msgspec.Struct, frozen=True):
    """What a VMM is to boot, and the descriptors that its Program gets: `fds` of it."""

    kernel: str
    cmdline: str
    fds: dict[int, int]


Start = Callable[[Payload], Program]


async def try_kvm(
    start: Start, kernel: str, instructions: Sequence[str], known: Sequence[str] = ()
) -> Verdict:
    """Boot the probe until all instructions are tried; `known`: some that do not work."""
    elf = os.memfd_create("probe")
    try:
        # A copy that the VMM may read wherever the package lies, and with which mode.
        await anyio.to_thread.run_sync(lambda: os.write(elf, Path(kernel).read_bytes()))
        untried = [name for name in instructions if name not in known]
        first = await _boot(start, elf, untried if known else ["all"])
        search = _Search(start, elf, instructions, {*known, *first.bad})
        if first.booted and not first.complete:
            await search.go_on(first)
    finally:
        os.close(elf)
    return Verdict(
        booted=first.booted,
        missing=tuple(name for name in instructions if name in search.missing),
        complete=first.complete or search.complete,
        last=_last_line(first.data),
        returncode=first.returncode,
    )


class _Search:
    """Goes round what is fatal: a few instructions a boot, a few boots at once."""

    def __init__(
        self, start: Start, elf: int, instructions: Sequence[str], missing: set[str]
    ) -> None:
        self.missing, self.complete = missing, False
        self._start, self._elf, self._instructions = start, elf, instructions
        self._lists: list[list[str]] = []

    async def go_on(self, first: _Output) -> None:
        """Try what the first boot did not come to."""
        rest = self._left(self._instructions, first)
        self._lists = [rest[at : at + EACH_MAX] for at in range(0, len(rest), EACH_MAX)]
        with anyio.move_on_after(TRIAL_S_MAX):
            async with anyio.create_task_group() as tasks:
                for _ in range(AT_ONCE_MAX):
                    tasks.start_soon(self._work)
            self.complete = not self._lists

    async def _work(self) -> None:
        while self._lists:
            names = self._lists.pop()
            seen = await _boot(self._start, self._elf, [*PREPARING, *names])
            self.missing.update(seen.bad)
            left = self._left(names, seen)
            if left and len(left) == len(names):
                self._lists.append(left)
                return  # it ended before any was tried: there is no way round that
            if left:
                self._lists.append(left)

    def _left(self, names: Sequence[str], seen: _Output) -> list[str]:
        """Return what was not tried; the one that was tried last without an answer is missing."""
        if seen.complete:
            return []
        done = {*seen.fine, *seen.bad}
        if seen.culprit and seen.culprit not in done:
            self.missing.add(seen.culprit)
        return [name for name in names if name not in done and name not in self.missing]


class _Output:
    """What one boot printed, read as far as it matters."""

    def __init__(self, data: bytes, returncode: int | None = None) -> None:
        self.data, self.returncode = data, returncode
        lines = [(match[1], match[2]) for match in _LINE.finditer(data)]
        tried = [_INSTRUCTION.search(rest) for event, rest in lines if event == b"cpu-try"]
        self.booted = any(event == b"boot" for event, _ in lines)
        self.resets = sum(event == b"boot" for event, _ in lines) > 1
        self.complete = any(event == b"cpu-done" for event, _ in lines)
        self.faulted = any(event in (b"fault", b"fatal") for event, _ in lines)
        self.culprit = tried[-1][1].decode() if tried and tried[-1] else ""
        judged = [
            (name[1].decode(), bool(_BAD.search(rest)))
            for event, rest in lines
            if event == b"cpu" and (name := _INSTRUCTION.search(rest))
        ]
        self.bad = [name for name, is_bad in judged if is_bad]
        self.fine = {name for name, is_bad in judged if not is_bad}

    @property
    def is_over(self) -> bool:
        """Nothing of interest will come."""
        stopped = _STOPPED in self.data
        return self.complete or self.faulted or self.resets or stopped


async def _boot(start: Start, elf: int, names: Sequence[str]) -> _Output:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        os.set_blocking(reader, False)
        try:
            cmdline = f"cpu={','.join(names)} beat=0 disk=none net=off"
            fds = {1: writer, 2: writer, KERNEL_FD: elf}
            payload = Payload(f"/proc/self/fd/{KERNEL_FD}", cmdline, fds)
            child = await start_child(start(payload))
        finally:
            os.close(writer)
        data = await _watch(child, reader)
    finally:
        os.close(reader)
    return _Output(data, child.returncode)


async def _watch(child: Child, reader: int) -> bytes:
    """Read until there is no more to learn; then the child is dead."""
    output = bytearray()
    try:
        while len(output) < OUTPUT_BYTES_MAX and not _Output(bytes(output)).is_over:
            part = await _read(reader)
            if not part:
                break
            output += part
    finally:
        with anyio.move_on_after(KILL_WAIT_S_MAX, shield=True):
            child.kill_group()
            await child.wait()
    return bytes(output)


async def _read(reader: int) -> bytes:
    """Return what came; nothing at the end, and after a silence that is too long."""
    with anyio.move_on_after(SILENCE_S_MAX):
        await anyio.wait_readable(reader)
        return os.read(reader, _CHUNK_BYTES)
    return b""


def _last_line(output: bytes) -> str:
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    if not lines:
        return "nothing was printed"
    printable = "".join(char for char in lines[-1].strip() if char.isprintable())
    return f"last line: {printable[-200:]!r}"
