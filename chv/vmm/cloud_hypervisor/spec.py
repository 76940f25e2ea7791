"""Translates a VmmConfig into what Cloud Hypervisor takes. Pure: no I/O, no clock, no state.

Sizes are bytes, ids are ours, what has a default that is wrong for us is always named: a disk's
type (never guessed from its content), shared memory (vhost-user maps it), a console that would
take over our terminal. The VMM passes over keys that it does not know, so what was sent is
compared with what it reports (`check_reported`). Fails with InvalidArgument naming the field, or
Unsupported for what this VMM has no room for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chv.common.errors import Internal, InvalidArgument, Unsupported
from chv.common.layout import check_socket_path
from chv.vmm.driver import DiskConfig, Launch, NicConfig, VmmConfig

Version = tuple[int, int]
Body = dict[str, Any]

API_SOCKET = "api.sock"
EVENTS_FILE = "events.log"
SERIAL_SOCKET = "serial.sock"
OWN_DIRECTORY = "."
API_FD, EVENTS_FD = 10, 11  # leaves 3..9 to whoever starts the process
DISK_PREFIX, NIC_PREFIX = "disk-", "nic-"
VHOST = "vhost-user-blk"
QUEUES_MAX = 16
CPUS_MAX = 255
DEVICES_MAX = 28  # of the 31 slots of the only PCI segment
CMDLINE_BYTES_MAX = 2047  # COMMAND_LINE_SIZE of x86 Linux, less its terminator
MIB = 1 << 20
MEMORY_STEP_BYTES = 128 * MIB  # of memory that is added while the VM runs
UUID_KEY_SINCE = (53, 0)

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_WORKER_ID = re.compile(r"chv(:[A-Za-z0-9_-]+){4}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def launch(
    config: VmmConfig, binary: str, *, groups: tuple[int, ...] = (), private_kvm: bool = False
) -> Launch:
    """Return what to start: a VMM without a VM, which speaks on what it inherits."""
    _match(_WORKER_ID, config.worker_id, "worker_id")
    vm_config(config, version=UUID_KEY_SINCE, landlock=False)  # refuses before anything is made
    base = Path(config.runtime_dir)
    argv = (
        binary,
        "--api-socket",
        f"fd={API_FD}",
        # A descriptor wins over a path: that is where the worker id stands and means nothing.
        "--event-monitor",
        f"fd={EVENTS_FD},path={config.worker_id}",
        "--no-shutdown",
        "--seccomp",
        "true",
    )
    return Launch(
        argv=argv,
        cwd=config.runtime_dir,
        listeners={API_FD: str(check_socket_path(api_socket(base)))},
        appended={EVENTS_FD: str(events_file(base))},
        groups=groups,
        private_kvm=private_kvm,
    )


def major(version: str) -> int:
    """Return the first number of a version; 0 where it is none."""
    head = version.lstrip("v").partition(".")[0]
    return int(head) if head.isdigit() else 0


def api_socket(runtime_dir: Path) -> Path:
    """Return where the API is: beside the VM's own directory, out of its uid's reach."""
    return runtime_dir.parent / API_SOCKET


def events_file(runtime_dir: Path) -> Path:
    """Return the file of events, at the same place."""
    return runtime_dir.parent / EVENTS_FILE


def disk_device(disk_id: str) -> str:
    """Return the id of a disk's device."""
    return f"{DISK_PREFIX}{disk_id}"


def nic_device(nic_id: str) -> str:
    """Return the id of a NIC's device."""
    return f"{NIC_PREFIX}{nic_id}"


def vm_config(config: VmmConfig, *, version: Version, landlock: bool) -> Body:
    """Return the body of `vm.create`; NICs are added afterwards, with their descriptors."""
    _check(config)
    body: Body = {
        "payload": _payload(config),
        "cpus": {
            "boot_vcpus": config.cpus,
            "max_vcpus": max(config.cpus, config.cpus_max),
            "nested": False,
        },
        "memory": _memory(config),
        "disks": [disk_config(disk, f"disks[{n}]") for n, disk in enumerate(config.disks)],
        "rng": {"src": "/dev/urandom"},
        "serial": _serial(config),
        "console": {"mode": "Off"},
        "pvpanic": True,
        "platform": {"system_uuid" if version >= UUID_KEY_SINCE else "uuid": config.uuid},
    }
    return body | (_landlock(config) if landlock else {})


def disk_config(disk: DiskConfig, field: str = "disk") -> Body:
    """Return a disk as `vm.create` and `vm.add-disk` take it."""
    _match(_ID, disk.id, f"{field}.id")
    path = _path(disk.path, f"{field}.path")
    if disk.kind == VHOST:
        check_socket_path(Path(path))
        return {
            "id": disk_device(disk.id),
            "vhost_user": True,
            "vhost_socket": path,
            "num_queues": 1,
            "queue_size": 128,
        }
    if disk.kind != "file":
        raise InvalidArgument(f"{disk.kind!r} is not {VHOST} or file", field=f"{field}.kind")
    if not disk.read_only:
        raise InvalidArgument(
            "a file disk is read-only",
            field=f"{field}.read_only",
            hint="storage that is written goes through a volume",
        )
    return {"id": disk_device(disk.id), "path": path, "readonly": True, "image_type": "Raw"}


def nic_config(nic: NicConfig, fds: Sequence[int]) -> Body:
    """Return a NIC as `vm.add-net` takes it; descriptors go beside it, one a queue.

    No MTU: the VMM would set it on the tap, which is not in its network namespace.
    """
    _match(_ID, nic.id, "nics.id")
    _match(_MAC, nic.mac, "nics.mac")
    if not 1 <= nic.queues <= QUEUES_MAX:
        raise InvalidArgument(f"{nic.queues} queues are not 1 to {QUEUES_MAX}", field="nics.queues")
    if len(fds) != nic.queues:
        raise InvalidArgument(f"{len(fds)} descriptors for {nic.queues} queues", field="fds")
    return {"id": nic_device(nic.id), "mac": nic.mac, "num_queues": 2 * nic.queues}


def limits(config: VmmConfig) -> dict[str, int]:
    """Return how far the VM may grow."""
    memory_bytes = _whole_mib(config.memory_bytes)
    return {
        "cpus_max": max(config.cpus, config.cpus_max),
        "memory_max_bytes": max(memory_bytes, _whole_mib(config.memory_max_bytes)),
    }


def restored(saved: Body, config: VmmConfig, *, version: Version, landlock: bool) -> Body:
    """Return a snapshot's configuration with this VM's paths and identity.

    Devices must be the same, by id: what the guest knows of them is in the snapshot.
    """
    fresh = vm_config(config, version=version, landlock=landlock)
    nics = {nic_device(nic.id) for nic in config.nics}
    for kind, wanted in (("disks", {disk["id"] for disk in fresh["disks"]}), ("net", nics)):
        found = {str(entry.get("id")) for entry in saved.get(kind) or []}
        if found != wanted:
            raise InvalidArgument(
                f"the snapshot has {sorted(found)}, the VM {sorted(wanted)}",
                field=f"restore_dir.{kind}",
                hint="give the VM the disks and NICs that it had when it was saved",
            )
    by_id = {disk["id"]: disk for disk in fresh["disks"]}
    disks = [disk | by_id[disk["id"]] for disk in saved.get("disks") or []]
    kept = {name: fresh[name] for name in ("serial", "payload", "platform")}
    rules = {"landlock_enable": landlock, "landlock_rules": fresh.get("landlock_rules")}
    return {**saved, **kept, **rules, **({"disks": disks} if disks else {})}


def check_reported(sent: Mapping[str, Any], reported: object, where: str = "") -> None:
    """Refuse a VM that is not what was asked for: the VMM ignores a key that it does not know."""
    if not isinstance(reported, Mapping):
        raise _ignored(where, sent, reported)
    for key, value in sent.items():
        field = f"{where}.{key}" if where else key
        found = reported.get(key)
        if isinstance(value, Mapping):
            check_reported(value, found, field)
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            entries = found if isinstance(found, list) else []
            for number, entry in enumerate(value):
                other = entries[number] if number < len(entries) else None
                check_reported(entry, other, f"{field}[{number}]")
        elif found != value and (value or found):
            raise _ignored(field, value, found)


def _ignored(field: str, sent: object, found: object) -> Internal:
    return Internal(f"sent {field} = {sent!r}, Cloud Hypervisor has {found!r}", field=field)


def _check(config: VmmConfig) -> None:
    _match(_UUID, config.uuid, "uuid")
    if not 1 <= config.cpus <= CPUS_MAX or config.cpus_max > CPUS_MAX:
        raise InvalidArgument(f"{config.cpus} is not in 1..{CPUS_MAX}", field="cpus")
    if config.memory_bytes <= 0:
        raise InvalidArgument(f"{config.memory_bytes} is not a size", field="memory_bytes")
    if len(config.disks) + len(config.nics) > DEVICES_MAX:
        raise Unsupported(f"more than {DEVICES_MAX} disks and NICs", field="disks")
    _distinct([disk.id for disk in config.disks], "disks")
    _distinct([nic.id for nic in config.nics], "nics")
    for nic in config.nics:
        nic_config(nic, range(nic.queues))


def _payload(config: VmmConfig) -> Body:
    if not config.kernel:
        raise Unsupported(
            "Cloud Hypervisor has no firmware here to boot a disk with",
            field="spec.boot",
            hint="boot a kernel, or choose vmm: qemu",
        )
    if len(config.cmdline.encode()) > CMDLINE_BYTES_MAX:
        raise InvalidArgument(f"longer than {CMDLINE_BYTES_MAX} bytes", field="cmdline")
    payload = {"kernel": _path(config.kernel, "kernel")}
    if config.cmdline:
        payload["cmdline"] = _plain(config.cmdline, "cmdline")
    if config.initramfs:
        payload["initramfs"] = _path(config.initramfs, "initramfs")
    return payload


def _memory(config: VmmConfig) -> Body:
    size = _whole_mib(config.memory_bytes)
    room = limits(config)["memory_max_bytes"] - size
    if room % MEMORY_STEP_BYTES:
        raise InvalidArgument(
            f"memory may grow by {room} bytes, which is not a multiple of 128 MiB",
            field="memory_max_bytes",
            hint=f"{size + room - room % MEMORY_STEP_BYTES} bytes, or 128 MiB more",
        )
    memory = {"size": size, "shared": True}
    return memory | ({"hotplug_method": "Acpi", "hotplug_size": room} if room else {})


def _serial(config: VmmConfig) -> Body:
    """Named relative to the VMM's working directory, its own: a VM that moves takes the name along.

    With an absolute path, the VMM that it leaves would unlink the socket of the one that has it.
    """
    check_socket_path(Path(_path(config.runtime_dir, "runtime_dir")) / SERIAL_SOCKET)
    return {"mode": "Socket", "socket": SERIAL_SOCKET}


def _landlock(config: VmmConfig) -> Body:
    """Paths in the configuration are allowed by themselves, sockets of others are not files."""
    paths = [OWN_DIRECTORY, *filter(None, (config.save_dir,))]
    rules = [{"path": path, "access": "rw"} for path in paths]
    return {"landlock_enable": True, "landlock_rules": rules}


def _whole_mib(size_bytes: int) -> int:
    return -(-size_bytes // MIB) * MIB


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
