"""Translates a VmmConfig into the command line of QEMU. Pure: no I/O, no clock, no state.

Here are disks, NICs and the root ports that they sit behind; the rest of the machine is in
`spec_machine`. Every text that reaches the command line passes `spec_text` or a pattern here, and
every value inside an option list has its commas doubled, so that no name can become an option.
Fails with InvalidArgument naming the field, or Unsupported for what a machine has no room for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from chv.common.errors import InvalidArgument, Unsupported
from chv.common.layout import check_socket_path
from chv.vmm import spec_text as text
from chv.vmm.driver import DiskConfig, Launch, NicConfig, VmmConfig, nic_fds
from chv.vmm.spec_machine import (
    AGENT_SOCKET,
    MICROVM,
    MONITOR_SOCKET,
    SERIAL_SOCKET,
    machine_arguments,
    machine_of,
)

NIC_FD_FIRST = 10  # leaves 3..9 to whoever starts the process
QUEUES_MAX = 16  # of a NIC
DEVICES_MAX = 20  # of the 32 slots of pcie.0, the chipset and our own devices need the rest
MICROVM_DEVICES_MAX = 6  # of the 8 places of virtio-mmio two are for our own devices
# Each NIC and vhost-user disk has a root port of its own, so that it can be unplugged.
PORTS_SPARE = 8
PORTS_MAX = 24
PORTS_PER_SLOT = 8
PORT_SLOT_FIRST = 0x18
RECONNECT_MS_SINCE = (9, 2)  # before, reconnection is counted in whole seconds
VHOST = "vhost-user-blk"
VHOST_DEVICE = "vhost-user-blk-pci"
VHOST_DEVICE_MMIO = "vhost-user-blk"
DISK_PREFIX = "disk-"
NIC_DEVICE = "virtio-net-pci"
NIC_DEVICE_MMIO = "virtio-net-device"
NIC_PREFIX = "nic-"
PORT_PREFIX = "port-"

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


def qemu_launch(
    config: VmmConfig,
    *,
    binary: str,
    version: tuple[int, int],
    groups: tuple[int, ...] = (),
    ports: int = 0,
) -> Launch:
    """Return what to start. `version` (major, minor) picks between spellings of options.

    `ports`: how many root ports there must be, where a snapshot says so.
    """
    _check(config)
    argv = [binary, *machine_arguments(config)]
    if machine_of(config) == MICROVM:
        started: Sequence[NicConfig] = config.nics
        devices = _mmio_devices(config, version)
    else:
        devices, started = _pci_devices(config, version, ports)
    sandbox = ("-sandbox", _SANDBOX)
    fds = nic_fds(started, NIC_FD_FIRST)
    return Launch(argv=(*argv, *devices, *sandbox), nic_fds=fds, groups=groups)


def is_awaited(config: VmmConfig) -> bool:
    """Tell whether the VM comes from elsewhere, and what is behind ports with it."""
    return config.incoming or bool(config.restore_dir)


def disk_chardev(disk_id: str) -> str:
    """Return the id of the connection to a vhost-user disk, as `query-chardev` shows it."""
    return f"vhost-{disk_id}"


def disk_device(disk_id: str) -> str:
    """Return the id of a disk's device."""
    return f"{DISK_PREFIX}{disk_id}"


def nic_device(nic_id: str) -> str:
    """Return the id of a NIC's device."""
    return f"{NIC_PREFIX}{nic_id}"


def nic_backend(nic_id: str) -> str:
    """Return the id of what holds a NIC's tap."""
    return f"net-{nic_id}"


def nic_fd_names(nic_id: str, queues: int) -> tuple[str, ...]:
    """Return what the descriptors of a tap are called that are handed over by the monitor."""
    return tuple(f"tap-{nic_id}-{queue}" for queue in range(queues))


def nic_connection(nic: NicConfig) -> dict[str, object]:
    """Return the arguments of `netdev_add` for a NIC whose descriptors were handed over."""
    _check_nic(nic)
    names = nic_fd_names(nic.id, nic.queues)
    taps = {"fd": names[0]} if nic.queues == 1 else {"fds": ":".join(names)}
    return {"type": "tap", "id": nic_backend(nic.id), "vhost": False, **taps}


def nic_arguments(nic: NicConfig, port_id: str) -> dict[str, object]:
    """Return the arguments of `device_add` for a NIC that is plugged later."""
    _check_nic(nic)
    queues = {"mq": True, "vectors": _vectors(nic)} if nic.queues > 1 else {}
    return {
        "driver": NIC_DEVICE,
        "id": nic_device(nic.id),
        "netdev": nic_backend(nic.id),
        "mac": nic.mac,
        "host_mtu": nic.mtu,
        "romfile": "",
        "bus": port_id,
        **queues,
    }


def port(number: int) -> str:
    """Return the id of a root port, which is also the name of the bus behind it."""
    return f"{PORT_PREFIX}{number}"


def disk_connection(disk: DiskConfig, version: tuple[int, int]) -> dict[str, object]:
    """Return the arguments of `chardev-add` for a disk that is plugged later."""
    text.match(_ID, disk.id, "disk.id")
    if disk.kind != VHOST:
        raise InvalidArgument(f"{disk.kind!r} cannot be plugged later", field="disk.kind")
    path = str(check_socket_path(Path(text.absolute(disk.path, "disk.path"))))
    again, every = _reconnect(version)
    data = {"addr": {"type": "unix", "data": {"path": path}}, "server": False, again: every}
    return {"id": disk_chardev(disk.id), "backend": {"type": "socket", "data": data}}


def disk_arguments(disk: DiskConfig, port_id: str) -> dict[str, object]:
    """Return the arguments of `device_add` for a disk that is plugged later."""
    boot = {"bootindex": disk.boot_index} if disk.boot_index > 0 else {}
    return {
        "driver": VHOST_DEVICE,
        "id": disk_device(disk.id),
        "chardev": disk_chardev(disk.id),
        "num-queues": 1,
        "bus": port_id,
        **boot,
    }


def monitor_socket(runtime_dir: Path) -> Path:
    """Return where QEMU serves QMP."""
    return runtime_dir / MONITOR_SOCKET


def serial_socket(runtime_dir: Path) -> Path:
    """Return where QEMU serves the serial console."""
    return runtime_dir / SERIAL_SOCKET


def agent_socket(runtime_dir: Path) -> Path:
    """Return where QEMU serves the line to the guest agent."""
    return runtime_dir / AGENT_SOCKET


def _check(config: VmmConfig) -> None:
    text.distinct([disk.id for disk in config.disks], "disks")
    text.distinct([nic.id for nic in config.nics], "nics")
    served = _vhost_count(config.disks)
    on_port = sum(nic.on_port for nic in config.nics)
    if machine_of(config) == MICROVM:
        if len(config.disks) + len(config.nics) > MICROVM_DEVICES_MAX:
            raise Unsupported(f"more than {MICROVM_DEVICES_MAX} disks and NICs", field="disks")
        return
    if served + on_port > PORTS_MAX:
        raise Unsupported(f"more than {PORTS_MAX} NICs and disks of volumes", field="disks")
    if len(config.disks) - served + len(config.nics) - on_port > DEVICES_MAX:
        raise Unsupported(f"more than {DEVICES_MAX} file disks and NICs", field="disks")


def _vhost_count(disks: Sequence[DiskConfig]) -> int:
    return sum(disk.kind == VHOST for disk in disks)


def _pci_devices(
    config: VmmConfig, version: tuple[int, int], ports: int
) -> tuple[list[str], Sequence[NicConfig]]:
    """Root ports and what is there from the start, and which NICs that are."""
    on_port = [nic.id for nic in config.nics if nic.on_port]
    argv = _ports(ports or len(on_port) + _vhost_count(config.disks) + PORTS_SPARE)
    nics: Sequence[NicConfig] = config.nics
    disks: Sequence[DiskConfig] = config.disks
    if is_awaited(config):  # these are plugged where they were, before the VM comes
        nics = tuple(nic for nic in nics if not nic.on_port)
        disks = tuple(disk for disk in disks if disk.kind != VHOST)
    # NICs first: where a guest finds them does not depend on how many disks there are.
    places = {nic_id: f",bus={port(number)}" for number, nic_id in enumerate(on_port)}
    taken = len(on_port)
    for index, disk in enumerate(disks):
        argv += _disk(disk, version, f"disks[{index}]", port(taken))
        taken += disk.kind == VHOST
    fds = nic_fds(nics, NIC_FD_FIRST)
    for nic in nics:
        # No option ROM: network boot is not offered, and Debian 13 may not have the file.
        many = f",mq=on,vectors={_vectors(nic)}" if nic.queues > 1 else ""
        place = f",romfile={many}{places.get(nic.id, '')}"
        argv += _nic(nic, fds[nic.id], NIC_DEVICE, place)
    return argv, nics


def _mmio_devices(config: VmmConfig, version: tuple[int, int]) -> list[str]:
    argv = []
    for index, disk in enumerate(config.disks):
        argv += _disk(disk, version, f"disks[{index}]", "")
    fds = nic_fds(config.nics, NIC_FD_FIRST)
    for nic in config.nics:
        argv += _nic(nic, fds[nic.id], NIC_DEVICE_MMIO, ",mq=on" if nic.queues > 1 else "")
    return argv


def _ports(wanted: int) -> list[str]:
    """Root ports, eight to a slot. They have no I/O ports to give: those of x86 would run out."""
    argv = []
    for number in range(min(PORTS_MAX, wanted)):
        slot, function = divmod(number, PORTS_PER_SLOT)
        multi = ",multifunction=on" if function == 0 else ""
        argv += [
            "-device",
            f"pcie-root-port,id={port(number)},bus=pcie.0,chassis={number + 1},"
            f"addr={PORT_SLOT_FIRST + slot:#x}.{function}{multi},io-reserve=0",
        ]
    return argv


def _reconnect(version: tuple[int, int]) -> tuple[str, int]:
    return ("reconnect-ms", 100) if version >= RECONNECT_MS_SINCE else ("reconnect", 1)


def _disk(disk: DiskConfig, version: tuple[int, int], field: str, port_id: str) -> list[str]:
    """A disk behind a port if it is served; without one where there is no PCI."""
    text.match(_ID, disk.id, f"{field}.id")
    path = text.absolute(disk.path, f"{field}.path")
    boot = f",bootindex={disk.boot_index}" if disk.boot_index > 0 else ""
    if disk.kind == VHOST:
        place = f",bus={port_id}{boot}" if port_id else boot
        device = VHOST_DEVICE if port_id else VHOST_DEVICE_MMIO
        return _vhost_disk(disk.id, path, version, device, place)
    if disk.kind != "file":
        raise InvalidArgument(f"{disk.kind!r} is not vhost-user-blk or file", field=f"{field}.kind")
    if not disk.read_only:
        raise InvalidArgument(
            "a file disk is read-only",
            field=f"{field}.read_only",
            hint="storage that is written goes through a volume",
        )
    node = {
        "driver": "raw",
        "node-name": f"file-{disk.id}"[:31],  # the longest node name
        "read-only": True,
        "file": {"driver": "file", "filename": path},
    }
    device = "virtio-blk-pci" if port_id else "virtio-blk-device"
    return [
        "-blockdev",
        msgspec.json.encode(node).decode(),
        "-device",
        f"{device},id={disk_device(disk.id)},drive={node['node-name']}{boot}",
    ]


def _vhost_disk(
    disk_id: str, path: str, version: tuple[int, int], device: str, place: str
) -> list[str]:
    chardev = disk_chardev(disk_id)
    again, every = _reconnect(version)
    where = text.option(str(check_socket_path(Path(path))))
    return [
        "-chardev",
        f"socket,id={chardev},path={where},{again}={every}",
        "-device",
        f"{device},id={disk_device(disk_id)},chardev={chardev},num-queues=1{place}",
    ]


def _check_nic(nic: NicConfig) -> None:
    text.match(_ID, nic.id, "nics.id")
    text.match(_MAC, nic.mac, "nics.mac")
    if not 1 <= nic.queues <= QUEUES_MAX:
        raise InvalidArgument(f"{nic.queues} queues are not 1 to {QUEUES_MAX}", field="nics.queues")


def _vectors(nic: NicConfig) -> int:
    """An interrupt for each direction of a queue, one for control, one for changes."""
    return 2 * nic.queues + 2


def _nic(nic: NicConfig, fds: Sequence[int], device: str, place: str) -> list[str]:
    _check_nic(nic)
    taps = f"fd={fds[0]}"
    if nic.queues > 1:
        taps = f"fds={':'.join(str(fd) for fd in fds)}"
    return [
        "-netdev",
        f"tap,id={nic_backend(nic.id)},{taps},vhost=off",
        "-device",
        f"{device},id={nic_device(nic.id)},netdev={nic_backend(nic.id)},mac={nic.mac}"
        f",host_mtu={int(nic.mtu)}{place}",
    ]
