"""What the API's bodies look like: types, defaults, and since which version a key is known.

A key that is not listed is passed over without a word, as by the real program; what is left out
or null takes its default. Up to v52 an option that was not set is reported as null, later not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Union

from tests.doubles.cloud_hypervisor.refusal import Malformed

Kind = Union[str, "Shape", list[Any], tuple[str, ...]]


class _Required:
    """There is no default."""


REQUIRED = _Required()


@dataclass(frozen=True)
class Key:
    kind: Kind  # "u32" | "bool" | "str" | "any" | choices | a shape | [kind]
    default: Any = None  # None: may be left out
    since: int = 0
    alias: str = ""


@dataclass(frozen=True)
class Shape:
    name: str
    keys: dict[str, Key]
    strict: bool = False


def required(kind: Kind) -> Key:
    return Key(kind, REQUIRED)


BUCKET = Shape(
    "TokenBucketConfig",
    {"size": required("u64"), "one_time_burst": Key("u64"), "refill_time": required("u64")},
    strict=True,
)
LIMITER = Shape("RateLimiterConfig", {"bandwidth": Key(BUCKET), "ops": Key(BUCKET)}, strict=True)
PCI = {
    "id": Key("str"),
    "iommu": Key("any"),
    "pci_segment": Key("u16", 0),
    "pci_device_id": Key("u8", since=52),
}
CPUS = Shape(
    "CpusConfig",
    {
        "boot_vcpus": required("u32"),
        "max_vcpus": required("u32"),
        "topology": Key("any"),
        "kvm_hyperv": Key("bool", False),
        "max_phys_bits": Key("u8", 46),
        "affinity": Key("any"),
        "features": Key("any", {"amx": False}),
        "nested": Key("bool", True),
        "core_scheduling": Key(("Vm", "Vcpu", "Off"), "Vm", since=52),
        "profile": Key("str", "Host", since=53),
    },
)
MEMORY = Shape(
    "MemoryConfig",
    {
        "size": required("u64"),
        "mergeable": Key("bool", False),
        "hotplug_method": Key(("Acpi", "VirtioMem"), "Acpi"),
        "hotplug_size": Key("u64"),
        "hotplugged_size": Key("u64"),
        "shared": Key("bool", False),
        "hugepages": Key("bool", False),
        "hugepage_size": Key("u64"),
        "prefault": Key("bool", False),
        "reserve": Key("bool", False, since=53),
        "zones": Key(["any"]),
        "thp": Key("bool", True),
    },
)
PAYLOAD = Shape(
    "PayloadConfig", {name: Key("str") for name in ("firmware", "kernel", "cmdline", "initramfs")}
)
DISK = Shape(
    "DiskConfig",
    {
        **PCI,
        "path": Key("str"),
        "readonly": Key("bool", False),
        "direct": Key("bool", False),
        "num_queues": Key("usize", 1),
        "queue_size": Key("u16", 128),
        "vhost_user": Key("bool", False),
        "vhost_socket": Key("str"),
        "rate_limit_group": Key("str"),
        "rate_limiter_config": Key(LIMITER),
        "disable_io_uring": Key("bool", False),
        "disable_aio": Key("bool", False),
        "serial": Key("str"),
        "queue_affinity": Key("any"),
        "backing_files": Key("bool", False),
        "sparse": Key("bool", True),
        "image_type": Key(("FixedVhd", "Qcow2", "Raw", "Vhdx", "Unknown"), "Unknown"),
        "lock_granularity": Key(("ByteRange", "Full"), "ByteRange", since=52),
    },
)
NET = Shape(
    "NetConfig",
    {
        **PCI,
        "tap": Key("str"),
        "ip": Key("str"),
        "mask": Key("str"),
        "mac": Key("str"),
        "host_mac": Key("str"),
        "mtu": Key("u16"),
        "num_queues": Key("usize", 2),
        "queue_size": Key("u16", 256),
        "vhost_user": Key("bool", False),
        "vhost_socket": Key("str"),
        "vhost_mode": Key(("Client", "Server"), "Client"),
        "fds": Key("any"),
        "rate_limiter_config": Key(LIMITER),
        "offload_tso": Key("bool", True),
        "offload_ufo": Key("bool", True),
        "offload_csum": Key("bool", True),
    },
)
RNG = Shape("RngConfig", {**PCI, "src": required("str")})
BALLOON = Shape(
    "BalloonConfig",
    {
        **PCI,
        "size": required("u64"),
        "deflate_on_oom": Key("bool", False),
        "free_page_reporting": Key("bool", False),
    },
)
SERIAL_MODES = ("Off", "Pty", "Tty", "File", "Socket", "Null")
SERIAL = Shape(
    "SerialConfig",
    {"file": Key("str"), "mode": required(SERIAL_MODES), "socket": Key("str")},
)
CONSOLE = Shape("ConsoleConfig", {"file": Key("str"), "mode": required(SERIAL_MODES), **PCI})
DEBUG_CONSOLE = Shape(
    "DebugConsoleConfig",
    {"file": Key("str"), "mode": required(SERIAL_MODES), "iobase": Key("u16", 233)},
)
VSOCK = Shape("VsockConfig", {**PCI, "cid": required("u32"), "socket": required("str")})
PLATFORM = Shape(
    "PlatformConfig",
    {
        "num_pci_segments": Key("u16", 1),
        "iommu_segments": Key("any"),
        "iommu_address_width_bits": Key("u8", 64),
        "system_serial_number": Key("str", alias="serial_number"),
        "system_uuid": Key("str", alias="uuid"),
        "oem_strings": Key(["str"]),
        "iommufd": Key("bool", False, since=52),
        "vfio_p2p_dma": Key("bool", True),
    },
)
RULE = Shape("LandlockConfig", {"path": required("str"), "access": required("str")})
VM = Shape(
    "VmConfig",
    {
        "cpus": Key(CPUS, {"boot_vcpus": 1, "max_vcpus": 1}),
        "memory": Key(MEMORY, {"size": 512 << 20}),
        "payload": Key(PAYLOAD),
        "rate_limit_groups": Key(["any"]),
        "disks": Key([DISK]),
        "net": Key([NET]),
        "rng": Key(RNG, {"src": "/dev/urandom"}),
        "balloon": Key(BALLOON),
        "serial": Key(SERIAL, {"mode": "Null"}),
        "console": Key(CONSOLE, {"mode": "Tty"}),
        "debug_console": Key(DEBUG_CONSOLE, {"mode": "Off"}),
        "vsock": Key(VSOCK),
        "pvpanic": Key("bool", False),
        "iommu": Key("bool", False),
        "numa": Key(["any"]),
        "watchdog": Key("bool", False),
        "platform": Key(PLATFORM),
        "landlock_enable": Key("bool", False),
        "landlock_rules": Key([RULE]),
    },
)
RESTORE = Shape(
    "RestoreConfig",
    {
        "source_url": required("str"),
        "prefault": Key("bool", False),
        "memory_restore_mode": Key(("Copy", "OnDemand"), "Copy", since=52),
        "resume": Key("bool", False, since=52),
        "net_fds": Key([Shape("Net", {"id": required("str"), "num_fds": required("usize")})]),
    },
)
RESIZE = Shape(
    "VmResizeData",
    {"desired_vcpus": Key("u32"), "desired_ram": Key("u64"), "desired_balloon": Key("u64")},
)
RESIZE_DISK = Shape("VmResizeDiskData", {"id": required("str"), "desired_size": required("u64")})
RESIZE_ZONE = Shape("VmResizeZoneData", {"id": required("str"), "desired_ram": required("u64")})
REMOVE = Shape("VmRemoveDeviceData", {"id": required("str")})
SNAPSHOT = Shape("VmSnapshotConfig", {"destination_url": required("str")})
SEND = Shape(
    "VmSendMigrationData", {"destination_url": required("str"), "local": Key("bool", False)}
)
RECEIVE = Shape("VmReceiveMigrationData", {"receiver_url": required("str")})


class Decoder:
    """Reads bodies as one version does."""

    def __init__(self, major: int) -> None:
        self.major = major

    def decode(self, shape: Shape, body: bytes) -> dict[str, Any]:
        """Return what the program understood, in the order in which it reports it."""
        where = f" at line 1 column {len(body)}"
        try:
            value = json.loads(body)
        except ValueError as error:
            raise Malformed(_syntax(error) + where) from None
        try:
            found: dict[str, Any] = self._value(shape, value)
        except Malformed as error:
            raise Malformed(f"{error}{where}") from None
        return found

    def _value(self, kind: Kind, value: Any) -> Any:
        if isinstance(kind, Shape):
            return self._fields(kind, value)
        if isinstance(kind, list):
            if not isinstance(value, list):
                raise Malformed(f"invalid type: {_shown(value)}, expected a sequence")
            return [self._value(kind[0], each) for each in value]
        if isinstance(kind, tuple):
            if value not in kind:
                names = ", ".join(f"`{name}`" for name in kind)
                raise Malformed(f"unknown variant `{value}`, expected one of {names}")
            return value
        return _scalar(kind, value)

    def _fields(self, shape: Shape, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Malformed(f"invalid type: {_shown(value)}, expected struct {shape.name}")
        keys = {name: key for name, key in shape.keys.items() if key.since <= self.major}
        if shape.strict and (unknown := [name for name in value if name not in keys]):
            names = " or ".join(f"`{name}`" for name in keys)
            raise Malformed(f"unknown field `{unknown[0]}`, expected {names}")
        found = {}
        for name, key in keys.items():
            if self.major < 53 and key.alias:
                name, key = key.alias, replace(key, alias="")
            given = value.get(name, value.get(key.alias) if key.alias else None)
            if given is None and key.default is REQUIRED:
                raise Malformed(f"missing field `{name}`")
            given = key.default if given is None else given
            if given is not None:
                found[name] = self._value(key.kind, given)
            elif self.major < 53:
                found[name] = None
        return found


def _scalar(kind: str, value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if kind == "any":
        return value
    if kind == "str" and not isinstance(value, str):
        raise Malformed(f"invalid type: {_shown(value)}, expected a string")
    if kind == "bool" and not isinstance(value, bool):
        raise Malformed(f"invalid type: {_shown(value)}, expected a boolean")
    if kind[0] == "u" and not (whole and value >= 0):
        raise Malformed(f"invalid type: {_shown(value)}, expected {kind}")
    return value


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, str):
        return f'string "{value}"'
    if isinstance(value, int):
        return f"integer `{value}`"
    if isinstance(value, list):
        return "sequence"
    return "map" if isinstance(value, dict) else "null"


def _syntax(error: ValueError) -> str:
    text = str(error)
    if "property name" in text:
        return "key must be a string"
    return "EOF while parsing a value" if "Expecting" in text else "expected value"
