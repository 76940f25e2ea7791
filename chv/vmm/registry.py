"""Makes the drivers of this version from a node's settings.

All of them, always: a VM keeps the driver that was stored with it, also when the node's setting
changes later. Which one a new VM gets is `select`'s business.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

from chv.vmm.cloud_hypervisor.driver import CloudHypervisorDriver
from chv.vmm.cloud_hypervisor.probe import candidates
from chv.vmm.driver import VmmDriver
from chv.vmm.fake_driver import FakeDriver
from chv.vmm.qemu.driver import QemuDriver

QEMU_BINARY = "qemu-system-x86_64"


def known_binaries(
    *,
    qemu_binary: str = "",
    cloud_hypervisor_binary: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> dict[str, tuple[str, ...]]:
    """Return every binary that a VM may have been started with, by driver."""
    return {
        CloudHypervisorDriver.name: candidates(cloud_hypervisor_binary, environment),
        QemuDriver.name: tuple(filter(None, (shutil.which(qemu_binary or QEMU_BINARY),))),
    }


def make_drivers(
    *,
    qemu_binary: str = "",
    cloud_hypervisor_binary: Sequence[str] = (),
    cloud_hypervisor_sha256: Sequence[str] = (),
    kvm: str = "auto",
    environment: Mapping[str, str] | None = None,
) -> dict[str, VmmDriver]:
    """Return every driver by its name.

    `environment` may hold the fake's behaviour, and binaries that come before the configured.
    """
    binaries = candidates(cloud_hypervisor_binary, environment)
    drivers: tuple[VmmDriver, ...] = (
        CloudHypervisorDriver(binaries, kvm=kvm, sha256=cloud_hypervisor_sha256),
        QemuDriver(qemu_binary or QEMU_BINARY, kvm=kvm),
        FakeDriver.from_environment(environment or {}),
    )
    return {driver.name: driver for driver in drivers}
