"""Translates a VmmConfig into the command line of QEMU (q35). Pure: no I/O, no clock, no state.

Every text that reaches the command line passes `_plain` or a pattern here, and every value inside
an option list has its commas doubled (QEMU's own escape), so that no name can become an option.
Fails with InvalidArgument naming the field, or Unsupported for what q35 has no room for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from chv.common.errors import InvalidArgument, Unsupported
from chv.common.layout import check_socket_path
from chv.vmm.driver import DiskConfig, Launch, NicConfig, VmmConfig, nic_fds

MONITOR_SOCKET = "qmp.sock"
SERIAL_SOCKET = "serial.sock"
AGENT_SOCKET = "agent.sock"
AGENT_PORT = "org.qemu.guest_agent.0"  # the name by which the agent in the guest finds it
NIC_FD_FIRST = 10  # leaves 3..9 to whoever starts the process
TCG_CACHE_MIB = 64  # the default grows to 1 GiB for each VM
QUEUES_MAX = 16  # of a NIC
CPUS_MAX = 255  # more need an interrupt remapping unit in the guest
DEVICES_MAX = 20  # of the 32 slots of pcie.0, the chipset and our own devices need the rest
# Each NIC and vhost-user disk has a root port of its own, so that it can be unplugged.
PORTS_SPARE = 8
PORTS_MAX = 24
PORTS_PER_SLOT = 8
PORT_SLOT_FIRST = 0x18
CMDLINE_BYTES_MAX = 2047  # COMMAND_LINE_SIZE of x86 Linux, less its terminator
MIB = 1 << 20
RECONNECT_MS_SINCE = (9, 2)  # before, reconnection is counted in whole seconds
VHOST = "vhost-user-blk"
VHOST_DEVICE = "vhost-user-blk-pci"
DISK_PREFIX = "disk-"
NIC_DEVICE = "virtio-net-pci"
NIC_PREFIX = "nic-"
PORT_PREFIX = "port-"

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_WORKER_ID = re.compile(r"chv(:[A-Za-z0-9_-]+){4}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

# The chipset's sleep states would leave a VM in a state that nothing here wakes it from.
_FIXED = (
    *("-nodefaults", "-no-user-config", "-no-shutdown", "-S"),
    *("-display", "none"),
    *("-action", "panic=pause"),
    *("-msg", "timestamp=on"),
    *("-rtc", "base=utc"),
    *("-global", "ICH9-LPC.disable_s3=1"),
    *("-global", "ICH9-LPC.disable_s4=1"),
)
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


def qemu_launch(
    config: VmmConfig, *, binary: str, version: tuple[int, int], groups: tuple[int, ...] = ()
) -> Launch:
    """Return what to start. `version` (major, minor) picks between spellings of options."""
    _check(config)
    argv = [
        binary,
        *_identity(config),
        *_FIXED,
        *_machine(config),
        *_payload(config),
        *_own_devices(config.runtime_dir),
    ]
    on_port = [nic.id for nic in config.nics if nic.on_port]
    argv += _ports(len(on_port) + _vhost_count(config.disks))
    # NICs first: where a guest finds them does not depend on how many disks there are.
    places = {nic_id: f",bus={port(number)}" for number, nic_id in enumerate(on_port)}
    taken = len(on_port)
    for index, disk in enumerate(config.disks):
        argv += _disk(disk, version, f"disks[{index}]", port(taken))
        taken += disk.kind == VHOST
    fds = nic_fds(config.nics, NIC_FD_FIRST)
    for nic in config.nics:
        argv += _nic(nic, fds[nic.id], places.get(nic.id, ""))
    argv += ["-sandbox", _SANDBOX]
    return Launch(argv=tuple(argv), nic_fds=fds, groups=groups)


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
    _match(_ID, disk.id, "disk.id")
    if disk.kind != VHOST:
        raise InvalidArgument(f"{disk.kind!r} cannot be plugged later", field="disk.kind")
    path = str(check_socket_path(Path(_path(disk.path, "disk.path"))))
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


def agent_socket(runtime_dir: Path) -> Path:
    """Return where QEMU serves the line to the guest agent."""
    return runtime_dir / AGENT_SOCKET


def _check(config: VmmConfig) -> None:
    _match(_WORKER_ID, config.worker_id, "worker_id")
    _match(_UUID, config.uuid, "uuid")
    _plain(config.name, "name")
    if not 1 <= config.cpus <= CPUS_MAX:
        raise InvalidArgument(f"{config.cpus} is not in 1..{CPUS_MAX}", field="cpus")
    if config.memory_bytes <= 0:
        raise InvalidArgument(f"{config.memory_bytes} is not a size", field="memory_bytes")
    if config.accelerator not in ("kvm", "tcg"):
        raise InvalidArgument(f"{config.accelerator!r} is not kvm or tcg", field="accelerator")
    served = _vhost_count(config.disks)
    on_port = sum(nic.on_port for nic in config.nics)
    if served + on_port > PORTS_MAX:
        raise Unsupported(f"more than {PORTS_MAX} NICs and disks of volumes", field="disks")
    if len(config.disks) - served + len(config.nics) - on_port > DEVICES_MAX:
        raise Unsupported(f"more than {DEVICES_MAX} file disks and NICs", field="disks")
    _distinct([disk.id for disk in config.disks], "disks")
    _distinct([nic.id for nic in config.nics], "nics")


def _identity(config: VmmConfig) -> list[str]:
    # The worker id is what tells our process from any other; the guest does not see it.
    return [
        "-name",
        f"guest={config.worker_id},process=chv-{_option(config.name[:11])},debug-threads=on",
        "-uuid",
        config.uuid,
    ]


def _machine(config: VmmConfig) -> list[str]:
    mebibytes = -(-config.memory_bytes // MIB)  # rounded up: QEMU wants whole pages
    if config.accelerator == "kvm":
        accelerator, cpu = "kvm", "host"
    else:
        # Five-level page tables only slow the emulated walk down.
        accelerator, cpu = f"tcg,tb-size={TCG_CACHE_MIB}", "max,la57=off"
    return [
        "-machine",
        "q35,memory-backend=mem,vmport=off,dump-guest-core=off",
        "-accel",
        accelerator,
        "-cpu",
        cpu,
        "-smp",
        f"cpus={config.cpus},sockets=1,cores={config.cpus},threads=1",
        "-m",
        f"size={mebibytes}M",
        # vhost-user back ends map the guest's memory, hence shared.
        "-object",
        f"memory-backend-memfd,id=mem,size={mebibytes}M,share=on",
    ]


def _payload(config: VmmConfig) -> list[str]:
    if not config.kernel:
        if config.initramfs or config.cmdline:
            raise InvalidArgument("initramfs and cmdline need a kernel", field="kernel")
        return ["-boot", "strict=on"]
    argv = ["-kernel", _path(config.kernel, "kernel")]
    if config.initramfs:
        argv += ["-initrd", _path(config.initramfs, "initramfs")]
    if len(config.cmdline.encode()) > CMDLINE_BYTES_MAX:
        raise InvalidArgument(f"longer than {CMDLINE_BYTES_MAX} bytes", field="cmdline")
    return [*argv, "-append", _plain(config.cmdline, "cmdline")]


def _own_devices(runtime_dir: str) -> list[str]:
    base = Path(_path(runtime_dir, "runtime_dir"))
    return [
        *_server("monitor", monitor_socket(base)),
        "-mon",
        "chardev=monitor,mode=control",
        *_server("serial0", base / SERIAL_SOCKET),
        "-serial",
        "chardev:serial0",
        "-object",
        "rng-builtin,id=rng",
        "-device",
        "virtio-rng-pci,rng=rng",
        *_server("agent", agent_socket(base)),
        "-device",
        "virtio-serial-pci,id=lines,max_ports=2",
        "-device",
        f"virtserialport,bus=lines.0,chardev=agent,name={AGENT_PORT}",
        "-device",
        "pvpanic",
    ]


def _server(identifier: str, path: Path) -> list[str]:
    where = _option(str(check_socket_path(path)))
    return ["-chardev", f"socket,id={identifier},path={where},server=on,wait=off"]


def _vhost_count(disks: Sequence[DiskConfig]) -> int:
    return sum(disk.kind == VHOST for disk in disks)


def _ports(taken: int) -> list[str]:
    """Root ports, eight to a slot. They have no I/O ports to give: those of x86 would run out."""
    argv = []
    for number in range(min(PORTS_MAX, taken + PORTS_SPARE)):
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
    _match(_ID, disk.id, f"{field}.id")
    path = _path(disk.path, f"{field}.path")
    boot = f",bootindex={disk.boot_index}" if disk.boot_index > 0 else ""
    if disk.kind == VHOST:
        return _vhost_disk(disk.id, path, version, f",bus={port_id}{boot}")
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
    return [
        "-blockdev",
        msgspec.json.encode(node).decode(),
        "-device",
        f"virtio-blk-pci,id=disk-{disk.id},drive={node['node-name']}{boot}",
    ]


def _vhost_disk(disk_id: str, path: str, version: tuple[int, int], place: str) -> list[str]:
    chardev = disk_chardev(disk_id)
    again, every = _reconnect(version)
    where = _option(str(check_socket_path(Path(path))))
    return [
        "-chardev",
        f"socket,id={chardev},path={where},{again}={every}",
        "-device",
        f"{VHOST_DEVICE},id={disk_device(disk_id)},chardev={chardev},num-queues=1{place}",
    ]


def _check_nic(nic: NicConfig) -> None:
    _match(_ID, nic.id, "nics.id")
    _match(_MAC, nic.mac, "nics.mac")
    if not 1 <= nic.queues <= QUEUES_MAX:
        raise InvalidArgument(f"{nic.queues} queues are not 1 to {QUEUES_MAX}", field="nics.queues")


def _vectors(nic: NicConfig) -> int:
    """An interrupt for each direction of a queue, one for control, one for changes."""
    return 2 * nic.queues + 2


def _nic(nic: NicConfig, fds: Sequence[int], place: str) -> list[str]:
    _check_nic(nic)
    taps, device = f"fd={fds[0]}", ""
    if nic.queues > 1:
        taps = f"fds={':'.join(str(fd) for fd in fds)}"
        device = f",mq=on,vectors={_vectors(nic)}"
    # No option ROM: network boot is not offered, and Debian 13 may not have the file.
    return [
        "-netdev",
        f"tap,id={nic_backend(nic.id)},{taps},vhost=off",
        "-device",
        f"{NIC_DEVICE},id={nic_device(nic.id)},netdev={nic_backend(nic.id)},mac={nic.mac}"
        f",host_mtu={int(nic.mtu)},romfile={device}{place}",
    ]


def _option(value: str) -> str:
    return value.replace(",", ",,")


def _plain(value: str, field: str) -> str:
    if _CONTROL.search(value):
        raise InvalidArgument(f"{value!r} has a control character", field=field)
    return value


def _path(value: str, field: str) -> str:
    if not value.startswith("/"):
        raise InvalidArgument(f"{value!r} is not an absolute path", field=field)
    return _plain(value, field)


def _match(pattern: re.Pattern[str], value: str, field: str) -> None:
    if not pattern.fullmatch(value):
        raise InvalidArgument(f"{value!r} does not match {pattern.pattern}", field=field)


def _distinct(ids: Sequence[str], field: str) -> None:
    for identifier in ids:
        if ids.count(identifier) > 1:
            raise InvalidArgument(f"id {identifier!r} is used twice", field=field)
