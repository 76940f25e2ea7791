"""Finds out whether Cloud Hypervisor runs guests here, by booting the probe.

A /dev/kvm that exists proves nothing, and one that runs a small guest may still lack what stock
kernels need: so there are two verdicts, whether it can be used at all (then a VM may ask for it)
and whether it runs all instructions of stock kernels (then `auto` may take it). The try-boot runs
without privileges, is our child, and is dead before `probe` returns or with us. Versions with known
holes are refused. Nothing here raises: what was seen becomes the reason.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import msgspec

from chv.common.errors import ChvError
from chv.common.files import sha256_file
from chv.common.process import run
from chv.common.process.spec import Program
from chv.vmm.driver import DriverProbe, ProbeGuest
from chv.vmm.kvm import KVM_DEVICE, KvmAccess, kvm_access
from chv.vmm.trial import NOBODY, Payload, Start, try_kvm

DRIVER = "cloud-hypervisor"
BINARY = "cloud-hypervisor"
BINARIES_VARIABLE = "CHV_CLOUD_HYPERVISOR"
# Before it: CVE-2026-27211 (a disk's backing file leads anywhere), CVE-2026-45782 (use after
# free in virtio-block); and no `--no-shutdown`, which keeps the VMM when its guest is off.
VERSION_OLDEST = (52, 0)
VERSION_S_MAX = 10.0
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.\d+)*")


def candidates(
    configured: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return where the binary may be: the environment's, the configured, else PATH's; never none.

    The environment's may be several, with colons between them.
    """
    given = (environment or {}).get(BINARIES_VARIABLE, "")
    asked = [path for path in given.split(os.pathsep) if path] or list(configured) or [BINARY]
    return tuple(dict.fromkeys(shutil.which(path) or path for path in asked))


def parse_version(text: str) -> tuple[int, int] | None:
    """Return (major, minor) of the first version number in `text`."""
    match = _VERSION.search(text)
    return (int(match[1]), int(match[2])) if match else None


async def probe(
    binaries: Sequence[str], kvm: str, guest: ProbeGuest | None, pinned: Sequence[str] = ()
) -> DriverProbe:
    """Return what the first binary that fits can do here, else why none does.

    `pinned`: the digests that a binary may have; none: any.
    """
    refused: list[DriverProbe] = []
    for binary in binaries:
        found = await _identify(binary, pinned)
        if found.usable:
            return await _probe_kvm(found, kvm, guest)
        refused.append(found)
    if len(refused) == 1:
        return refused[0]
    return _refused("; ".join(each.reason for each in refused))


async def _identify(binary: str, pinned: Sequence[str]) -> DriverProbe:
    """Return version and digest; a file with a digest that is not wanted is not even run."""
    if "/" not in binary:  # `candidates` has made a path of what PATH knows
        return _refused(f"{binary} is not in PATH")
    try:
        sha256 = await anyio.to_thread.run_sync(sha256_file, Path(binary))
        if pinned and sha256 not in pinned:
            reason = f"{binary} has the sha256 {sha256}, which vmm.cloud_hypervisor_sha256 lacks"
            return _refused(reason, binary=binary, sha256=sha256)
        completed = await run([binary, "--version"], timeout_s=VERSION_S_MAX)
    except (ChvError, OSError) as error:
        return _refused(_text(error))
    match = _VERSION.search(completed.stdout.decode(errors="replace"))
    version = match[0] if match else ""
    oldest = ".".join(map(str, VERSION_OLDEST))
    if (parse_version(version) or (0, 0)) < VERSION_OLDEST:
        seen = f"{binary} is version {version or 'unknown'}"
        reason = f"{seen}, {oldest} is the oldest without known holes"
        return _refused(reason, version=version, binary=binary, sha256=sha256)
    return DriverProbe(
        driver=DRIVER, usable=True, auto=False, version=version, binary=binary, sha256=sha256
    )


def _refused(reason: str, **known: str) -> DriverProbe:
    return msgspec.structs.replace(
        DriverProbe(driver=DRIVER, usable=False, auto=False, reason=reason), **known
    )


def _text(error: Exception) -> str:
    return error.message if isinstance(error, ChvError) else str(error)


async def _probe_kvm(found: DriverProbe, kvm: str, guest: ProbeGuest | None) -> DriverProbe:
    access = kvm_access()
    refusal = "KVM is switched off by the configuration" if kvm == "off" else access.refusal
    if refusal:
        return _verdict(found, refusal, usable=False)
    if guest is None:
        reason = f"{KVM_DEVICE} exists; KVM was not tried"
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
    verdict = await try_kvm(
        _program(found.binary, access), guest.kernel, guest.instructions, guest.missing
    )
    told = _verdict(found, verdict.words(), usable=verdict.booted, auto=verdict.stock)
    return msgspec.structs.replace(told, missing=verdict.missing)


def _program(binary: str, access: KvmAccess) -> Start:
    options = ("--serial", "tty", "--console", "off", "--memory", "size=64M", "--cpus", "boot=1")

    def start(payload: Payload) -> Program:
        boot = ("--kernel", payload.kernel, "--cmdline", payload.cmdline)
        return Program(
            argv=(binary, *options, *boot),
            uid=NOBODY,
            gid=NOBODY,
            groups=access.groups,
            own_devices=access.own_devices,
            fds=payload.fds,
        )

    return start
