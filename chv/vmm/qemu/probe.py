"""Finds out whether QEMU runs guests here, and whether KVM does: by booting one on it.

A /dev/kvm that exists proves nothing: the try-boot must reach user space (without an initramfs:
the kernel's first line) in `TRY_S_MAX`. It runs as `nobody`, is our child, and is dead before
`probe` returns or with us. Nothing here raises: what was seen becomes the reason.
"""

from __future__ import annotations

import os
import re
import signal
import stat
from pathlib import Path

import anyio

from chv.common.errors import ChvError, FailedPrecondition
from chv.common.process import run
from chv.common.process.child import Child, start_child
from chv.common.process.pidfd import KILL_WAIT_S_MAX
from chv.common.process.spec import Program
from chv.vmm.driver import DriverProbe, ProbeGuest

DRIVER = "qemu"
KVM_DEVICE = Path("/dev/kvm")
VERSION_OLDEST = (6, 2)
VERSION_S_MAX = 10.0
TRY_S_MAX = 10.0
NOBODY = 65534
OUTPUT_BYTES_MAX = 1 << 20
FIRST_LINE = b"Linux version"
USER_SPACE = b"as init process"
_CHUNK_BYTES = 65536
_TRY_OPTIONS = (
    *("-nodefaults", "-no-user-config", "-no-reboot"),
    *("-display", "none"),
    *("-machine", "q35"),
    *("-accel", "kvm"),
    *("-cpu", "host"),
    *("-m", "256M"),
    *("-serial", "stdio"),
)
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.\d+)*")
_QUIET = re.compile(r"(?:^|\s)(?:quiet|loglevel=\S*)(?=\s|$)")


async def probe(binary: str, kvm: str, guest: ProbeGuest | None) -> DriverProbe:
    """Return what QEMU and KVM can do here."""
    try:
        version = await _version(binary)
    except ChvError as error:
        return DriverProbe(driver=DRIVER, usable=False, reason=error.message)
    if (parse_version(version) or (0, 0)) < VERSION_OLDEST:
        oldest = ".".join(map(str, VERSION_OLDEST))
        reason = f"{binary} is version {version or 'unknown'}, {oldest} is the oldest that works"
        return DriverProbe(driver=DRIVER, usable=False, version=version, reason=reason)
    works, reason = await try_kvm(binary, kvm, guest)
    return DriverProbe(
        driver=DRIVER,
        usable=True,
        accelerator="kvm" if works else "tcg",
        version=version,
        reason=reason,
    )


def parse_version(text: str) -> tuple[int, int] | None:
    """Return (major, minor) of the first version number in `text`."""
    match = _VERSION.search(text)
    return (int(match[1]), int(match[2])) if match else None


async def _version(binary: str) -> str:
    completed = await run([binary, "--version"], timeout_s=VERSION_S_MAX)
    match = _VERSION.search(completed.stdout.decode(errors="replace"))
    return match[0] if match else ""


def kvm_groups() -> tuple[int, ...]:
    """Return the groups that a process needs to open the KVM device; group 0 is never given."""
    try:
        group = KVM_DEVICE.stat().st_gid
    except OSError as error:
        raise FailedPrecondition(f"no {KVM_DEVICE}: {error.strerror}") from error
    return (group,) if group else ()


async def try_kvm(binary: str, kvm: str, guest: ProbeGuest | None) -> tuple[bool, str]:
    """Tell whether KVM works, and what says so."""
    if kvm == "off":
        return False, "KVM is switched off by the configuration"
    if refusal := _device_refusal():
        return False, refusal
    if guest is None:
        return False, f"{KVM_DEVICE} exists; KVM was not tried for want of a guest image"
    try:
        return await _try_boot(binary, guest)
    except ChvError as error:
        return False, f"try-boot on KVM: {error.message}"


def _device_refusal() -> str:
    """Return why an unprivileged VMM could never open the KVM device; empty if it could."""
    try:
        status = KVM_DEVICE.stat()
    except OSError as error:
        return f"no {KVM_DEVICE}: {error.strerror}"
    if not stat.S_ISCHR(status.st_mode):
        return f"{KVM_DEVICE} is not a device"
    by_group = status.st_gid != 0 and status.st_mode & 0o060 == 0o060
    if by_group or status.st_mode & 0o006 == 0o006:
        return ""
    mode = stat.S_IMODE(status.st_mode)
    return (
        f"{KVM_DEVICE} has mode {mode:04o} and group {status.st_gid}: "
        "a VMM without privileges cannot open it"
    )


async def _try_boot(binary: str, guest: ProbeGuest) -> tuple[bool, str]:
    marker = USER_SPACE if guest.initramfs else FIRST_LINE
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        os.set_blocking(reader, False)
        try:
            child = await start_child(_program(binary, guest, writer))
        finally:
            os.close(writer)
        output = await _watch(child, reader, marker)
    finally:
        os.close(reader)
    if marker in output:
        return True, f"try-boot on KVM reached {marker.decode()!r}"
    how = "was cut off" if child.returncode == -signal.SIGKILL else f"ended ({child.returncode})"
    return False, f"try-boot on KVM {how} before {marker.decode()!r}; {_last_line(output)}"


def _program(binary: str, guest: ProbeGuest, output: int) -> Program:
    cmdline = _QUIET.sub(" ", guest.cmdline)
    append = f"{cmdline} earlyprintk=ttyS0 console=ttyS0 panic=-1"
    initrd = ("-initrd", guest.initramfs) if guest.initramfs else ()
    return Program(
        argv=(binary, *_TRY_OPTIONS, "-kernel", guest.kernel, "-append", append, *initrd),
        uid=NOBODY,
        gid=NOBODY,
        groups=kvm_groups(),
        fds={1: output, 2: output},
    )


async def _watch(child: Child, reader: int, marker: bytes) -> bytes:
    """Read until the marker, the end of the output or the deadline; then the child is dead."""
    output = bytearray()
    try:
        with anyio.move_on_after(TRY_S_MAX):
            while marker not in output and len(output) < OUTPUT_BYTES_MAX:
                await anyio.wait_readable(reader)
                part = os.read(reader, _CHUNK_BYTES)
                if not part:
                    await child.exited()
                    break
                output += part
    finally:
        with anyio.move_on_after(KILL_WAIT_S_MAX, shield=True):
            child.kill_group()
            await child.wait()
    return bytes(output)


def _last_line(output: bytes) -> str:
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    if not lines:
        return "nothing was printed"
    printable = "".join(char for char in lines[-1].strip() if char.isprintable())
    return f"last line: {printable[-200:]!r}"
