"""A VM object: the devices of a configuration, in slots, with what they stand on.

Building takes the device lists out of the configuration and puts them back when all went well:
what fails half-way leaves a configuration without them, as the real program does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tests.doubles.cloud_hypervisor.backends import FileDisk, VhostDisk
from tests.doubles.cloud_hypervisor.guest import Guest
from tests.doubles.cloud_hypervisor.loop import Loop
from tests.doubles.cloud_hypervisor.refusal import Refusal, device_error
from tests.doubles.cloud_hypervisor.switches import Switches

Config = dict[str, Any]
NEVER = (1 << 64) - 1  # minima and maxima of a disk without I/O
NEVER_MEAN = NEVER // 10000
LISTS = {"disk": "disks", "net": "net"}
INTERNAL = ("__serial", "__ioapic", "__rng")


@dataclass
class Device:
    id: str
    kind: str  # disk | net | rng | vsock
    config: Config
    bdf: str
    backend: FileDisk | VhostDisk | None = None
    leaving: bool = False
    dead: bool = False  # its worker has ended: whoever pauses waits for ever

    @property
    def fds(self) -> list[int]:
        return list(self.config.get("fds") or ()) if self.kind == "net" else []

    def counters(self) -> dict[str, int] | None:
        if self.kind == "net":
            return dict.fromkeys(("rx_bytes", "tx_bytes", "rx_frames", "tx_frames"), 0)
        if not isinstance(self.backend, FileDisk):
            return None
        found: dict[str, int] = {}
        for way in ("read", "write"):
            found |= {f"{way}_bytes": 0, f"{way}_ops": 0}
            found |= {f"{way}_latency_{kind}": NEVER for kind in ("min", "max")}
            found[f"{way}_latency_avg"] = NEVER_MEAN
        return found


class Vm:
    """`guest` is there once it has booted."""

    def __init__(self, config: Config, loop: Loop, switches: Switches) -> None:
        self.config, self._loop, self._switches = config, loop, switches
        self.devices: dict[str, Device] = {}
        self.guest: Guest | None = None
        self.booted = self.paused = self.cpus_leaving = False
        self._names = 0
        try:
            self._build()
        except Refusal:
            self.close()
            raise

    def _build(self) -> None:
        if not self.config["memory"]["size"] and not self.config["memory"].get("zones"):
            raise Refusal("Memory manager error", "No memory zones found")
        for kind, name in LISTS.items():
            taken = self.config.pop(name, None)
            if taken is None:
                continue
            for config in taken:
                self._make(kind, config)
            self.config[name] = taken
        self._put("rng", {"id": "__rng"}, None)
        if self.config.get("vsock"):
            self._put("vsock", self.config["vsock"], None)

    def _make(self, kind: str, config: Config) -> Device:
        return self._put(kind, config, self._backend(config) if kind == "disk" else None)

    def _backend(self, config: Config) -> FileDisk | VhostDisk:
        config.setdefault("id", None)
        config["id"] = config["id"] or self._name("disk")
        if config["vhost_user"]:
            return VhostDisk(self._loop, config["vhost_socket"], self._switches.connect_s)
        backend = FileDisk(config)
        if config["image_type"] == "Unknown":
            config["image_type"] = "Raw"
        return backend

    def _put(self, kind: str, config: Config, backend: FileDisk | VhostDisk | None) -> Device:
        config["id"] = config.get("id") or self._name(kind)
        used = {device.bdf for device in self.devices.values()}
        free = (f"0000:00:{slot:02x}.0" for slot in range(1, 32))
        bdf = next((each for each in free if each not in used), None)
        if bdf is None:
            if backend is not None:
                backend.close()
            raise device_error("Failed to find an available PCI device ID")
        device = Device(config["id"], kind, config, bdf, backend)
        self.devices[device.id] = device
        return device

    def _name(self, kind: str) -> str:
        self._names += 1
        return f"_{kind}{self._names - 1}"

    def lock(self) -> None:
        """Lock the images: the last step of a boot."""
        for device in self.devices.values():
            if isinstance(device.backend, FileDisk):
                device.backend.lock(
                    "Error locking disk images: Another instance likely holds a lock"
                )

    def plug(self, kind: str, config: Config) -> Device:
        """Add a device to a VM that runs, and to its configuration."""
        if config.get("id") in self.devices:  # still there, though not in the configuration
            raise device_error(f"Invalid identifier as it is not unique: {config['id']}")
        device = self._make(kind, config)
        if isinstance(device.backend, FileDisk):
            try:
                device.backend.lock("Error from device manager")
            except Refusal:
                device.backend.close()
                del self.devices[device.id]
                raise
        if kind in LISTS:
            self.config[LISTS[kind]] = [*(self.config.get(LISTS[kind]) or ()), config]
        else:
            self.config[kind] = config
        if self.guest is not None and not self.paused:
            self.guest.found(device.id)
        return device

    def unplug(self, name: str) -> None:
        """Take a device out of the configuration, and ask the guest for it."""
        if name in INTERNAL:
            raise device_error("Could not find the node in the device tree")
        device = self.devices.get(name)
        if device is None or device.leaving:
            raise device_error(
                f"Failed to find device corresponding to the given identifier: {name}"
            )
        device.leaving = True
        forget(self.config, name)
        assert self.guest is not None
        self.guest.asked_to_release(name)

    def ejected(self, name: str) -> Device:
        """Let go of what the guest has let go of."""
        device = self.devices.pop(name)
        if device.backend is not None:
            device.backend.close()
        for fd in device.fds:
            os.close(fd)
        return device

    def disk(self, name: str) -> FileDisk:
        device = self.devices.get(name)
        if device is None or not isinstance(device.backend, FileDisk):
            raise device_error(
                f"Failed to find device corresponding to the given identifier: {name}"
            )
        return device.backend

    def counters(self) -> dict[str, dict[str, int]]:
        each = {name: device.counters() for name, device in self.devices.items()}
        return {name: counters for name, counters in each.items() if counters is not None}

    def tree(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            name: {"id": name, "resources": [], "children": []} for name in INTERNAL[:2]
        }
        for name, device in self.devices.items():
            parent = f"_virtio-pci-{name}"
            bar = {"index": 0, "base": 1 << 40, "size": 524288, "type_": "Mmio64"}
            bar["prefetchable"] = False
            found[parent] = {
                "id": parent,
                "resources": [{"PciBar": bar}],
                "children": [name],
                "pci_bdf": device.bdf,
            }
            found[name] = {"id": name, "resources": [], "parent": parent, "children": []}
        return found

    def close(self) -> None:
        """Close what devices stand on. Descriptors of NICs stay: the configuration has them."""
        for device in self.devices.values():
            if device.backend is not None:
                device.backend.close()
            if device.leaving:
                for fd in device.fds:
                    os.close(fd)
        self.devices = {}


def forget(config: Config, name: str) -> bool:
    """Take a device out of a configuration; tell whether it was there."""
    for kind in LISTS.values():
        kept = [device for device in config.get(kind) or () if device.get("id") != name]
        if len(kept) != len(config.get(kind) or ()):
            config[kind] = kept
            return True
    if (config.get("vsock") or {}).get("id") == name:
        del config["vsock"]
        return True
    return False
