"""What was plugged into a VM, and where: without it nothing takes its memory and devices up again.

QEMU's own stream says what is in each device but makes none: the receiving side must have the same
devices in the same places first. A layout is written beside a snapshot, and sent ahead of a move.
Fails with InvalidArgument or FailedPrecondition naming what differs, DataLoss for a record that
cannot be read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from chv.common.errors import DataLoss, FailedPrecondition, InvalidArgument
from chv.vmm import spec, spec_machine
from chv.vmm.driver import VmmConfig
from chv.vmm.qemu import hotplug, hotplug_nics, machine, sizes
from chv.vmm.qemu.qmp import Monitor
from chv.vmm.qemu.sizes import Dimm

LAYOUT_FILE = "layout.json"
LAYOUT_BYTES_MAX = 64 * 1024
FORMAT = 1


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A machine's variable parts. `disks` and `nics`: id to the port that it sits behind."""

    format: int = FORMAT
    machine: str  # QEMU's type, with its version where it has one
    accelerator: str
    cpus: int
    cpus_max: int
    memory_bytes: int  # from the start on, without what was plugged
    memory_max_bytes: int
    dimms: tuple[Dimm, ...] = ()
    ports: int = 0
    disks: dict[str, str] = {}
    nics: dict[str, str] = {}

    def total_bytes(self) -> int:
        """Return how much memory the VM has."""
        return self.memory_bytes + sum(dimm.size_bytes for dimm in self.dimms)


async def observe(monitor: Monitor) -> Layout:
    """Ask QEMU what it has."""
    known = await hotplug.devices(monitor)
    places = await hotplug.places(monitor, known)
    present = await sizes.sizes(monitor)
    dimms = await sizes.dimms(monitor)
    kvm = (await monitor.ask("query-kvm"))["enabled"]
    return Layout(
        machine=await machine.machine_type(monitor),
        accelerator="kvm" if kvm else "tcg",
        cpus=present.cpus,
        cpus_max=present.cpus_max,
        memory_bytes=present.memory_bytes - sum(dimm.size_bytes for dimm in dimms),
        memory_max_bytes=present.memory_max_bytes,
        dimms=dimms,
        ports=sum(kind == "pcie-root-port" for kind in known.values()),
        disks=_behind_ports(places, spec.DISK_PREFIX),
        nics=_behind_ports(places, spec.NIC_PREFIX),
    )


def _behind_ports(places: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {
        name.removeprefix(prefix): bus
        for name, bus in places.items()
        if name.startswith(prefix) and bus.startswith(spec.PORT_PREFIX)
    }


def decode(data: bytes, where: str) -> Layout:
    """Read a layout back."""
    try:
        layout = msgspec.json.decode(data, type=Layout)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DataLoss(f"{where} cannot be read: {error}") from error
    if layout.format != FORMAT:
        raise InvalidArgument(f"{where} has format {layout.format}, not {FORMAT}")
    return layout


def read(directory: Path) -> Layout:
    """Read the layout of a snapshot."""
    path = directory / LAYOUT_FILE
    with opened(path) as fd:
        return decode(os.read(fd, LAYOUT_BYTES_MAX), str(path))


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a file of a snapshot: a plain one, which the VM's uid may have replaced."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        text = f"no snapshot in {path.parent}: {path.name}: {error.strerror}"
        raise InvalidArgument(text, field="restore_dir") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InvalidArgument(f"{path} is not a plain file", field="restore_dir")
        yield fd
    finally:
        os.close(fd)


def as_saved(config: VmmConfig, layout: Layout) -> VmmConfig:
    """Return a configuration with the sizes that a snapshot's VM had at its start."""
    saved = layout.total_bytes()
    if config.memory_bytes not in (saved, layout.memory_bytes):
        raise InvalidArgument(
            f"the snapshot has {saved} bytes of memory, not {config.memory_bytes}",
            field="memory_bytes",
        )
    if config.accelerator != layout.accelerator:
        raise InvalidArgument(
            f"the snapshot was made with {layout.accelerator}, not {config.accelerator}",
            field="accelerator",
        )
    return msgspec.structs.replace(
        config,
        cpus=layout.cpus,
        cpus_max=layout.cpus_max,
        memory_bytes=layout.memory_bytes,
        memory_max_bytes=layout.memory_max_bytes,
    )


def check_devices(config: VmmConfig, layout: Layout) -> None:
    """Refuse a configuration with other devices."""
    if spec_machine.machine_of(config) == spec_machine.MICROVM:
        return  # all is on its command line
    served = [disk.id for disk in config.disks if disk.kind == spec.VHOST]
    _same("disks", served, layout.disks)
    _same("nics", [nic.id for nic in config.nics if nic.on_port], layout.nics)


def _same(field: str, given: Iterable[str], saved: Iterable[str]) -> None:
    if set(given) != set(saved):
        raise InvalidArgument(
            f"{field} {sorted(given)} are not {sorted(saved)}, which the VM had", field=field
        )


async def rebuild(
    monitor: Monitor,
    config: VmmConfig,
    layout: Layout,
    nic_fds: Mapping[str, Sequence[int]],
    version: tuple[int, int],
) -> None:
    """Plug what the VM had into a QEMU that waits for it. What is there already stays."""
    check_devices(config, layout)
    if layout.dimms:
        for dimm in layout.dimms:
            await sizes.plug_dimm(monitor, dimm.slot, dimm.size_bytes, dimm.address)
    if not await machine.is_microvm(monitor):
        await sizes.add_cpus(monitor, layout.cpus)
    for disk in config.disks:
        if disk.id in layout.disks:
            await hotplug.add(monitor, disk, version, layout.disks[disk.id])
    for nic in config.nics:
        if nic.id in layout.nics:
            fds = _fds_of(nic.id, nic_fds)
            await hotplug_nics.add(monitor, nic, fds, layout.nics[nic.id])
    await _require_same(monitor, layout)


def _fds_of(nic_id: str, nic_fds: Mapping[str, Sequence[int]]) -> Sequence[int]:
    if nic_id not in nic_fds:
        raise InvalidArgument(f"no descriptors for {nic_id}", field="nics")
    return nic_fds[nic_id]


async def _require_same(monitor: Monitor, layout: Layout) -> None:
    """QEMU would end itself in the middle of a stream that does not fit."""
    mine = await observe(monitor)
    for field in layout.__struct_fields__:
        ours, theirs = getattr(mine, field), getattr(layout, field)
        if ours != theirs:
            raise FailedPrecondition(
                f"{field} differ: {ours} here, {theirs} where the VM comes from", field=field
            )
