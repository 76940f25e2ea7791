"""`chv doctor` and `chv verify` without an agent: what VMMs and KVM are good for here.

Boots the probe guest on each VMM that is installed, without privileges; that takes a second or two
where KVM lacks instructions, less elsewhere. Changes nothing. Settings come from the node's
configuration where there is one.
"""

from __future__ import annotations

import os
from pathlib import Path

from chv.common import config as configuration
from chv.common.config import VmmConfig
from chv.probe import image
from chv.probe.command import INSTRUCTIONS
from chv.vmm.driver import DriverProbe, ProbeGuest, VmmDriver
from chv.vmm.kvm import kvm_access
from chv.vmm.registry import make_drivers
from chv.vmm.select import FAKE

CONFIGS = (Path("/etc/chv/chv.toml"), Path(".chv/node.toml"))
CLOUD_HYPERVISOR = "cloud-hypervisor"
QEMU = "qemu"


def settings() -> VmmConfig:
    """Return the settings of the node here; the defaults where there is none."""
    found = next((path for path in CONFIGS if path.is_file()), None)
    return configuration.load(found).vmm if found else VmmConfig()


def kvm_refusal(of: VmmConfig) -> str:
    """Return why KVM cannot even be tried; empty where it can."""
    if of.kvm == "off":
        return "KVM is switched off by the configuration"
    return kvm_access().refusal


def drivers(of: VmmConfig) -> dict[str, VmmDriver]:
    """Return the real drivers."""
    made = make_drivers(
        qemu_binary=of.qemu_binary,
        cloud_hypervisor_binary=of.cloud_hypervisor_binary,
        cloud_hypervisor_sha256=of.cloud_hypervisor_sha256,
        kvm=of.kvm,
        environment=os.environ,
    )
    return {name: driver for name, driver in made.items() if name != FAKE}


def guest(missing: tuple[str, ...] = ()) -> ProbeGuest:
    """Return the probe guest."""
    return ProbeGuest(kernel=str(image.ELF_PATH), instructions=INSTRUCTIONS, missing=missing)


async def tried(of: VmmConfig) -> dict[str, DriverProbe]:
    """Return what each VMM showed; what one finds out about KVM spares the next the search."""
    found: dict[str, DriverProbe] = {}
    for name, driver in drivers(of).items():
        missing = tuple(dict.fromkeys(each for probe in found.values() for each in probe.missing))
        found[name] = await driver.probe(guest(missing))
    return found
