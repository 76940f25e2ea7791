"""The VMM's configuration from spec, attachments, NICs, image and seed. Pure.

The command line of a direct boot is ours plus the spec's; what is wanted but not there is a
FailedPrecondition: the next pass plans again.
"""

from __future__ import annotations

from dataclasses import dataclass

from chv.agent.ports import VmmSelection
from chv.agent.vm.model import (
    DesiredDisk,
    DesiredVm,
)
from chv.common.errors import FailedPrecondition
from chv.common.layout import Layout
from chv.common.quantity import parse_bytes
from chv.common.wire.nwd import NicInfo
from chv.common.wire.resources import ImageStatus, VirtualMachine, VirtualMachineSpec
from chv.common.wire.stord import AttachmentInfo
from chv.vmm.driver import DiskConfig, NicConfig, VmmConfig

# Output on the serial line, and a panic ends in a reset rather than in silence.
CMDLINE = "console=ttyS0 panic=-1"
SEED_DISK_ID = "seed"
VHOST = "vhost-user-blk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a start has gathered."""

    attachments: dict[str, AttachmentInfo]  # by volume uid
    nics: dict[str, NicInfo]  # by NIC uid
    image: ImageStatus | None
    seed_path: str
    selection: VmmSelection
    worker_id: str


def vmm_config(vm: VirtualMachine, desired: DesiredVm, parts: Parts, layout: Layout) -> VmmConfig:
    """Return what the VMM is to be started with."""
    kernel, initramfs, cmdline = _boot(vm, parts.image)
    return VmmConfig(
        vm_id=vm.metadata.uid,
        name=vm.metadata.name,
        worker_id=parts.worker_id,
        cpus=vm.spec.cpus,
        memory_bytes=parse_bytes(vm.spec.memory, field="spec.memory"),
        accelerator=parts.selection.accelerator,
        binary=parts.selection.binary,
        cpus_max=vm.spec.max_cpus,
        memory_max_bytes=memory_max_bytes(vm.spec),
        kernel=kernel,
        initramfs=initramfs,
        cmdline=cmdline,
        disks=(*_disks(desired, parts, bootable=not kernel), _seed(parts)),
        nics=_nics(desired, parts),
        save_dir=str(layout.vm_save(vm.metadata.uid)),
        runtime_dir=str(layout.vmm(vm.metadata.uid)),
        uuid=vm.metadata.uid,
    )


def memory_max_bytes(spec: VirtualMachineSpec) -> int:
    """Return how far the memory may grow while the VM runs; 0 where it may not."""
    return parse_bytes(spec.max_memory, field="spec.maxMemory") if spec.max_memory else 0


def _boot(vm: VirtualMachine, image: ImageStatus | None) -> tuple[str, str, str]:
    if not vm.spec.boot.image:
        return "", "", ""
    if image is None or image.kernel is None:
        raise FailedPrecondition(
            f"image {vm.spec.boot.image!r} has no kernel",
            field="spec.boot.image",
            hint="boot from a disk instead: leave spec.boot.image empty",
        )
    initramfs = image.initramfs.path if image.initramfs is not None else ""
    return image.kernel.path, initramfs, f"{CMDLINE} {vm.spec.boot.cmdline}".strip()


def _disks(desired: DesiredVm, parts: Parts, *, bootable: bool) -> tuple[DiskConfig, ...]:
    found = []
    for index, disk in enumerate(desired.disks):
        attachment = parts.attachments.get(disk.volume_uid)
        if attachment is None:
            raise FailedPrecondition(f"volume {disk.volume} is not attached any more")
        boot_index = 1 if bootable and index == 0 else 0
        found.append(disk_config(disk, attachment.export_path, boot_index))
    return tuple(found)


def disk_config(disk: DesiredDisk, path: str, boot_index: int) -> DiskConfig:
    """Return a volume's disk as the VMM is to have it."""
    return DiskConfig(
        id=disk.disk_id,
        kind=VHOST,
        path=path,
        read_only=disk.read_only,
        boot_index=boot_index,
        volume_id=disk.volume_uid,
    )


def served_disks(config: VmmConfig) -> tuple[DiskConfig, ...]:
    """Return the disks of a VMM that a storage daemon serves."""
    return tuple(disk for disk in config.disks if disk.kind == VHOST)


def boot_index_of(config: VmmConfig, desired: DesiredVm, disk: DesiredDisk) -> int:
    """Return the boot index of a disk that is plugged later."""
    return 1 if not config.kernel and desired.disks[0] == disk else 0


def _seed(parts: Parts) -> DiskConfig:
    return DiskConfig(id=SEED_DISK_ID, kind="file", path=parts.seed_path, read_only=True)


def _nics(desired: DesiredVm, parts: Parts) -> tuple[NicConfig, ...]:
    found = []
    for nic in desired.nics:
        info = parts.nics.get(nic.nic_id)
        if info is None:
            raise FailedPrecondition(f"the NIC on network {nic.network} is gone")
        found.append(nic_config(info))
    return tuple(found)


def nic_config(info: NicInfo) -> NicConfig:
    """Return a NIC as the VMM is to have it."""
    return NicConfig(id=info.nic_id, mac=info.mac, mtu=info.mtu, queues=info.queues, on_port=True)
