"""What `vm.boot` and the add-* calls check of a configuration; `vm.create` checks nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.doubles.cloud_hypervisor.refusal import Refusal, invalid

Config = dict[str, Any]


def check(config: Config) -> None:
    """Raise on the first thing that is wrong."""
    payload = config.get("payload") or {}
    if not (payload.get("kernel") or payload.get("firmware")):
        raise Refusal(
            "Failed to validate config",
            "Payload configuration is not bootable",
            "No bootitem provided: neither firmware nor kernel",
        )
    cpus = config["cpus"]
    if cpus["max_vcpus"] < cpus["boot_vcpus"]:
        most, boot = cpus["max_vcpus"], cpus["boot_vcpus"]
        raise invalid(f"Max CPUs ({most}) lower than boot CPUs ({boot})")
    _check_ids(config)
    for disk in config.get("disks") or ():
        _check_disk(disk, config)
    for nic in config.get("net") or ():
        _check_nic(nic)


def _check_ids(config: Config) -> None:
    devices = [*(config.get("disks") or ()), *(config.get("net") or ())]
    devices += [device for name in ("vsock", "balloon") if (device := config.get(name))]
    ids = [device["id"] for device in devices if device.get("id")]
    for name, count in Counter(ids).items():
        if name.startswith("__"):
            raise invalid(f"Identifier {name} is not invalid")
        if count > 1:
            raise invalid(f"Identifier {name} is not unique")


def _check_disk(disk: Config, config: Config) -> None:
    boot = config["cpus"]["boot_vcpus"]
    if disk.get("vhost_socket") and disk.get("path"):
        raise invalid("Disk path and vhost socket both provided")
    if disk["vhost_user"] and not disk.get("vhost_socket"):
        raise invalid("No socket provided when using vhost-user")
    if disk["vhost_user"] and not (config["memory"]["shared"] or config["memory"]["hugepages"]):
        raise invalid("Using vhost-user requires using shared memory or huge pages")
    if disk["num_queues"] > boot:
        raise invalid(f"Queue count ({disk['num_queues']}) must not exceed boot vCPUs ({boot})")
    size = disk["queue_size"]
    if size & (size - 1) or size > 32768:
        raise invalid(f"Queue size must be a power of 2 no greater than 32768: {size}")
    if size <= 2:
        raise invalid(f"Block queue size must be greater than 2: {size}")


def _check_nic(nic: Config) -> None:
    queues, fds = nic["num_queues"], nic.get("fds")
    if queues < 2:
        raise invalid(f"Number of queues ({queues}) to virtio_net should be higher than 2")
    if fds and 2 * len(fds) != queues:
        raise invalid(
            f"Number of queues ({queues}) to virtio_net does not match the number of FDs"
            f" ({2 * len(fds)})"
        )
    if nic.get("mtu") and nic["mtu"] < 1280:
        raise invalid(
            f"Provided MTU {nic['mtu']} is lower than 1280 (expected by VIRTIO specification)"
        )
