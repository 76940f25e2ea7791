"""`vm.resize` of a VM that runs: what is refused, what takes effect, what only looks like it."""

from __future__ import annotations

from typing import Any

from tests.doubles.cloud_hypervisor.refusal import Refusal, device_error
from tests.doubles.cloud_hypervisor.vm import Vm

STEP_BYTES = 128 << 20
BLOCK_BYTES = 2 << 20


def resize_cold(config: dict[str, Any], asked: dict[str, Any]) -> None:
    """Edit the configuration, whatever is asked for."""
    if asked.get("desired_vcpus") is not None:
        config["cpus"]["boot_vcpus"] = asked["desired_vcpus"]
    if asked.get("desired_ram") is not None:
        config["memory"]["size"] = asked["desired_ram"]
    if asked.get("desired_balloon") is not None and config.get("balloon"):
        config["balloon"]["size"] = asked["desired_balloon"]


def resize(vm: Vm, asked: dict[str, Any]) -> None:
    """Do one after the other: an error leaves the earlier ones done."""
    if (cpus := asked.get("desired_vcpus")) is not None:
        _cpus(vm, cpus)
    if (ram := asked.get("desired_ram")) is not None:
        memory = vm.config["memory"]
        (_virtio if memory["hotplug_method"] == "VirtioMem" else _acpi)(memory, ram)
    if (balloon := asked.get("desired_balloon")) is not None:
        if not vm.config.get("balloon"):
            raise device_error("Missing virtio-balloon, can't proceed as expected")
        vm.config["balloon"]["size"] = balloon


def _cpus(vm: Vm, wanted: int) -> None:
    config = vm.config["cpus"]
    if vm.cpus_leaving:
        raise Refusal(status=429)
    if wanted == 0:
        raise Refusal("Error from CPU manager", "Requested zero vCPUs")
    if wanted > config["max_vcpus"]:
        raise Refusal("Error from CPU manager", "Requested vCPUs exceed maximum")
    if wanted < config["boot_vcpus"]:
        vm.cpus_leaving = True
        assert vm.guest is not None
        vm.guest.asked_to_release("")
    config["boot_vcpus"] = wanted


def _acpi(memory: dict[str, Any], wanted: int) -> None:
    more = wanted - memory["size"]
    if more > 0:
        if more % STEP_BYTES:
            raise _memory("The requested hotplug memory addition is not a valid size")
        if more > (memory.get("hotplug_size") or 0):
            raise _memory("Not enough space in the hotplug RAM region")
    memory["size"] = wanted  # less of it is only true after a reboot


def _virtio(memory: dict[str, Any], wanted: int) -> None:
    boot = memory["size"]
    region = memory.get("hotplug_size") or 0
    more = wanted - boot
    if more < 0:
        raise _memory(f"Invalid resize request: desired_size = {wanted} below boot size = {boot}")
    if more > region:
        raise _plug(f"new size {more:#x} is bigger than region_size {region:#x}")
    if more % BLOCK_BYTES:
        raise _plug(f"new size {more:#x} is not aligned on block_size {BLOCK_BYTES:#x}")
    memory["hotplugged_size"] = more


def _memory(*messages: str) -> Refusal:
    return Refusal("Memory manager error", *messages)


def _plug(what: str) -> Refusal:
    return _memory(
        "Failed to virtio-mem resize",
        "Resize invalid argument",
        f"Failed to update virtio configuration: ResizeError({what})",
    )
