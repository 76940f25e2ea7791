"""Finds out whether QEMU runs guests here, and what KVM is good for: by booting the probe on it.

QEMU runs guests without KVM as well, slower: KVM is taken where it runs all that stock kernels
need. The try-boot runs as `nobody`, is our child, and is dead before `probe` returns or with us.
Nothing here raises: what was seen becomes the reason.
"""

from __future__ import annotations

import re

from chv.common.errors import ChvError
from chv.common.process import run
from chv.common.process.spec import Program
from chv.vmm.driver import DriverProbe, ProbeGuest
from chv.vmm.kvm import KVM_DEVICE, KvmAccess, kvm_access
from chv.vmm.trial import NOBODY, Payload, Start, Verdict
from chv.vmm.trial import try_kvm as try_boot

DRIVER = "qemu"
VERSION_OLDEST = (6, 2)
VERSION_S_MAX = 10.0
_TRY_OPTIONS = (
    *("-nodefaults", "-no-user-config", "-no-reboot"),
    *("-display", "none"),
    *("-machine", "q35"),
    *("-m", "64M"),
    *("-serial", "stdio"),
)
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.\d+)*")


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
    verdict, reason = await try_kvm(binary, kvm, guest)
    return DriverProbe(
        driver=DRIVER,
        usable=True,
        accelerator="kvm" if verdict and verdict.stock else "tcg",
        version=version,
        reason=reason,
        missing=verdict.missing if verdict else (),
    )


def parse_version(text: str) -> tuple[int, int] | None:
    """Return (major, minor) of the first version number in `text`."""
    match = _VERSION.search(text)
    return (int(match[1]), int(match[2])) if match else None


async def _version(binary: str) -> str:
    completed = await run([binary, "--version"], timeout_s=VERSION_S_MAX)
    match = _VERSION.search(completed.stdout.decode(errors="replace"))
    return match[0] if match else ""


async def try_kvm(binary: str, kvm: str, guest: ProbeGuest | None) -> tuple[Verdict | None, str]:
    """Return what KVM is good for, None where it was not tried; and that in words."""
    access = kvm_access()
    if kvm == "off":
        return None, "KVM is switched off by the configuration"
    if access.refusal:
        return None, access.refusal
    if guest is None:
        return None, f"{KVM_DEVICE} exists; KVM was not tried"
    try:
        verdict = await try_boot(
            _program(binary, access), guest.kernel, guest.instructions, guest.missing
        )
    except ChvError as error:
        return None, f"try-boot on KVM: {error.message}"
    return verdict, verdict.words()


async def try_emulation(binary: str, guest: ProbeGuest) -> Verdict:
    """Return whether QEMU runs a guest without KVM; ChvError where it does not start."""
    return await try_boot(_program(binary, None), guest.kernel, guest.instructions)


def _program(binary: str, access: KvmAccess | None) -> Start:
    """Return how to start QEMU; without access to KVM it emulates."""
    accelerator = ("-accel", "kvm", "-cpu", "host") if access else ("-accel", "tcg", "-cpu", "max")

    def start(payload: Payload) -> Program:
        boot = ("-kernel", payload.kernel, "-append", payload.cmdline)
        return Program(
            argv=(binary, *_TRY_OPTIONS, *accelerator, *boot),
            uid=NOBODY,
            gid=NOBODY,
            groups=access.groups if access else (),
            own_devices=access.own_devices if access else (),
            fds=payload.fds,
        )

    return start
