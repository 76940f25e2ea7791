"""Finds out whether Cloud Hypervisor runs guests here, by booting one.

A /dev/kvm that exists proves nothing, and one that runs a small guest may still lack what stock
kernels need: so there are two verdicts, whether it can be used at all (then a VM may ask for it)
and whether a stock kernel comes up (then `auto` may take it). The try-boot runs without
privileges, is our child, and is dead before `probe` returns or with us. Versions with known holes
are refused. Nothing here raises: what was seen becomes the reason.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

from chv.common.errors import ChvError
from chv.common.files import sha256_file
from chv.common.process import run
from chv.common.process.child import Child, start_child
from chv.common.process.pidfd import KILL_WAIT_S_MAX
from chv.common.process.spec import Program
from chv.vmm.driver import DriverProbe, ProbeGuest

DRIVER = "cloud-hypervisor"
BINARY = "cloud-hypervisor"
BINARIES_VARIABLE = "CHV_CLOUD_HYPERVISOR"
KVM_DEVICE = Path("/dev/kvm")
# Before it: CVE-2026-27211 (a disk's backing file leads anywhere), CVE-2026-45782 (use after
# free in virtio-block); and no `--no-shutdown`, which keeps the VMM when its guest is off.
VERSION_OLDEST = (52, 0)
VERSION_S_MAX = 10.0
TRY_S_MAX = 10.0
NOBODY = 65534
OUTPUT_BYTES_MAX = 1 << 20
FIRST_LINE = b"Linux version"
USER_SPACE = b"as init process"
_CHUNK_BYTES = 65536
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.\d+)*")
_QUIET = re.compile(r"(?:^|\s)(?:quiet|loglevel=\S*)(?=\s|$)")


@dataclass(frozen=True, slots=True)
class KvmAccess:
    """How a VMM without privileges gets at the KVM device."""

    groups: tuple[int, ...] = ()
    private: bool = False  # root's alone: it gets a node of its own
    refusal: str = ""  # there is no such device


def candidates(
    configured: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return where the binary may be: the environment's, the configured, else PATH's; never none.

    The environment's may be several, with colons between them.
    """
    given = (environment or {}).get(BINARIES_VARIABLE, "")
    asked = [path for path in given.split(os.pathsep) if path] or list(configured) or [BINARY]
    return tuple(dict.fromkeys(shutil.which(path) or path for path in asked))


def kvm_access(device: Path = KVM_DEVICE) -> KvmAccess:
    """Look at the device's owner and mode."""
    try:
        status = device.stat()
    except OSError as error:
        return KvmAccess(refusal=f"no {device}: {error.strerror}")
    if not stat.S_ISCHR(status.st_mode):
        return KvmAccess(refusal=f"{device} is not a device")
    if status.st_mode & 0o006 == 0o006:
        return KvmAccess()
    if status.st_gid != 0 and status.st_mode & 0o060 == 0o060:
        return KvmAccess(groups=(status.st_gid,))
    return KvmAccess(private=True)


def parse_version(text: str) -> tuple[int, int] | None:
    """Return (major, minor) of the first version number in `text`."""
    match = _VERSION.search(text)
    return (int(match[1]), int(match[2])) if match else None


async def probe(binaries: Sequence[str], kvm: str, guest: ProbeGuest | None) -> DriverProbe:
    """Return what the first binary that fits can do here, else why none does."""
    refused: list[str] = []
    for binary in binaries:
        found = await _identify(binary)
        if not found.usable:
            refused.append(found.reason)
            continue
        return await _probe_kvm(found, kvm, guest)
    return DriverProbe(driver=DRIVER, usable=False, auto=False, reason="; ".join(refused))


async def _identify(binary: str) -> DriverProbe:
    try:
        completed = await run([binary, "--version"], timeout_s=VERSION_S_MAX)
        sha256 = await anyio.to_thread.run_sync(sha256_file, Path(binary))
    except (ChvError, OSError) as error:
        return DriverProbe(driver=DRIVER, usable=False, auto=False, reason=_text(error))
    match = _VERSION.search(completed.stdout.decode(errors="replace"))
    version = match[0] if match else ""
    oldest = ".".join(map(str, VERSION_OLDEST))
    usable = (parse_version(version) or (0, 0)) >= VERSION_OLDEST
    reason = (
        f"{binary} is version {version or 'unknown'}, {oldest} is the oldest without known holes"
    )
    return DriverProbe(
        driver=DRIVER,
        usable=usable,
        auto=False,
        version=version,
        reason="" if usable else reason,
        binary=binary,
        sha256=sha256,
    )


def _text(error: Exception) -> str:
    return error.message if isinstance(error, ChvError) else str(error)


async def _probe_kvm(found: DriverProbe, kvm: str, guest: ProbeGuest | None) -> DriverProbe:
    access = kvm_access()
    refusal = "KVM is switched off by the configuration" if kvm == "off" else access.refusal
    if refusal:
        return _verdict(found, refusal, usable=False)
    if guest is None:
        reason = f"{KVM_DEVICE} exists; KVM was not tried for want of a guest image"
        return _verdict(found, reason, usable=True)
    try:
        return await _try_boot(found, access, guest)
    except (ChvError, OSError) as error:
        return _verdict(found, f"try-boot: {_text(error)}", usable=False)


def _verdict(found: DriverProbe, reason: str, *, usable: bool, auto: bool = False) -> DriverProbe:
    return DriverProbe(
        driver=DRIVER,
        usable=usable,
        auto=auto,
        accelerator="kvm" if usable else "",
        version=found.version,
        reason=reason,
        binary=found.binary,
        sha256=found.sha256,
    )


async def _try_boot(found: DriverProbe, access: KvmAccess, guest: ProbeGuest) -> DriverProbe:
    marker = USER_SPACE if guest.initramfs else FIRST_LINE
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        os.set_blocking(reader, False)
        try:
            child = await start_child(_program(found.binary, access, guest, writer))
        finally:
            os.close(writer)
        output = await _watch(child, reader, marker)
    finally:
        os.close(reader)
    if marker in output:
        text = f"a stock kernel reached {marker.decode()!r} on KVM"
        return _verdict(found, text, usable=True, auto=True)
    # 1: it did not even start. Otherwise KVM ran something, if not a stock kernel.
    how = "was cut off" if child.returncode == -signal.SIGKILL else f"ended ({child.returncode})"
    text = f"a stock kernel {how} before {marker.decode()!r}; {_last_line(output)}"
    return _verdict(found, text, usable=child.returncode in (0, -signal.SIGKILL))


def _program(binary: str, access: KvmAccess, guest: ProbeGuest, output: int) -> Program:
    cmdline = _QUIET.sub(" ", guest.cmdline)
    initramfs = ("--initramfs", guest.initramfs) if guest.initramfs else ()
    options = ("--serial", "tty", "--console", "off", "--memory", "size=256M", "--cpus", "boot=1")
    return Program(
        argv=(
            binary,
            *options,
            *("--kernel", guest.kernel),
            *("--cmdline", f"{cmdline} earlyprintk=ttyS0 console=ttyS0 panic=-1"),
            *initramfs,
        ),
        uid=NOBODY,
        gid=NOBODY,
        groups=access.groups,
        own_devices=(str(KVM_DEVICE),) if access.private else (),
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
