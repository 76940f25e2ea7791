"""Rules of a resource that span fields or need more than a pattern. Pure.

What depends on other objects is checked by the agent at admission. Fails with InvalidArgument
naming field, value and fix.
"""

from __future__ import annotations

from chv.common.errors import InvalidArgument
from chv.common.names import check_hostname, shown
from chv.common.quantity import parse_bytes, parse_duration_s
from chv.common.wire.network_rules import (
    check_exposure,
    check_group,
    check_interfaces,
    check_network,
    refuse_twice,
)
from chv.common.wire.resources import (
    Exposure,
    Image,
    ImageSpec,
    Network,
    Resource,
    RunStrategy,
    SecurityGroup,
    VirtualMachine,
    VirtualMachineSnapshot,
    VirtualMachineSnapshotSpec,
    VirtualMachineSpec,
    Volume,
    VolumeSnapshot,
)
from chv.common.wire.volume_rules import check_snapshot, check_volume

MEMORY_BYTES_MIN = 16 << 20
MEMORY_BYTES_MAX = 1 << 40
MEMORY_STEP_BYTES = 128 << 20  # in which a Linux guest on x86 takes up memory
SHUTDOWN_S_MAX = 3600.0
START_DELAY_S_MAX = 3600.0


def check(resource: Resource) -> None:
    """Check one resource by itself."""
    match resource:
        case VirtualMachine(spec=vm):
            _check_vm(vm)
        case Volume(spec=volume):
            check_volume(volume)
        case VolumeSnapshot(spec=snapshot):
            check_snapshot(snapshot)
        case VirtualMachineSnapshot(spec=whole):
            _check_vm_snapshot(whole)
        case Network(spec=network):
            check_network(network)
        case SecurityGroup(spec=group):
            check_group(group)
        case Exposure(spec=exposure):
            check_exposure(exposure)
        case Image(spec=image):
            _check_image(image)


def _check_vm_snapshot(spec: VirtualMachineSnapshotSpec) -> None:
    if not spec.memory:
        raise InvalidArgument(
            "false",
            field="spec.memory",
            hint="a snapshot of the disks alone is a VolumeSnapshot with spec.virtualMachine",
        )


# --- VirtualMachine


def _check_vm(spec: VirtualMachineSpec) -> None:
    memory = parse_bytes(spec.memory, field="spec.memory")
    if not MEMORY_BYTES_MIN <= memory <= MEMORY_BYTES_MAX:
        raise InvalidArgument(
            f"{shown(spec.memory)} is out of range", field="spec.memory", hint="16Mi to 1Ti"
        )
    if memory % (1 << 20):
        raise InvalidArgument(
            f"{shown(spec.memory)} is not a whole number of MiB",
            field="spec.memory",
            hint=f"write {max(16, memory >> 20)}Mi",
        )
    _check_maxima(spec, memory)
    seconds = parse_duration_s(spec.shutdown_timeout, field="spec.shutdownTimeout")
    if not 1 <= seconds <= SHUTDOWN_S_MAX:
        raise InvalidArgument(
            f"{shown(spec.shutdown_timeout)} is out of range",
            field="spec.shutdownTimeout",
            hint="1s to 1h",
        )
    if parse_duration_s(spec.start_delay, field="spec.startDelay") > START_DELAY_S_MAX:
        raise InvalidArgument(
            f"{shown(spec.start_delay)} is out of range", field="spec.startDelay", hint="0s to 1h"
        )
    if spec.ephemeral and spec.run_strategy is RunStrategy.ALWAYS:
        raise InvalidArgument(
            "Always, yet an ephemeral VM never runs again",
            field="spec.runStrategy",
            hint="leave it out, or leave ephemeral out",
        )
    if not spec.boot.image and not spec.disks:
        raise InvalidArgument(
            "there is nothing to boot from",
            field="spec.boot.image",
            hint="name an image with a kernel, or give a disk",
        )
    if spec.boot.cmdline and not spec.boot.image:
        raise InvalidArgument(
            "a command line needs a kernel", field="spec.boot.cmdline", hint="set spec.boot.image"
        )
    _check_disks(spec)
    check_interfaces(spec.interfaces)
    _check_cloud_init(spec)
    refuse_twice("spec.guestPorts", map(str, spec.guest_ports))


def _check_maxima(spec: VirtualMachineSpec, memory_bytes: int) -> None:
    if spec.max_cpus and spec.max_cpus < spec.cpus:
        raise InvalidArgument(
            f"{spec.max_cpus} is less than spec.cpus, {spec.cpus}",
            field="spec.maxCpus",
            hint=f"{spec.cpus} or more, or leave it out",
        )
    if not spec.max_memory:
        return
    most_bytes = parse_bytes(spec.max_memory, field="spec.maxMemory")
    more_bytes = most_bytes - memory_bytes
    if more_bytes < 0 or most_bytes > MEMORY_BYTES_MAX or more_bytes % MEMORY_STEP_BYTES:
        raise InvalidArgument(
            f"{shown(spec.max_memory)} is not spec.memory, {shown(spec.memory)}, and whole steps "
            "of 128Mi more, at most 1Ti",
            field="spec.maxMemory",
            hint=f"for instance {(memory_bytes >> 20) + 1024}Mi",
        )


def _check_disks(spec: VirtualMachineSpec) -> None:
    refuse_twice("spec.disks", (disk.name for disk in spec.disks), part="name")
    refuse_twice("spec.disks", (disk.volume for disk in spec.disks), part="volume")


def _check_cloud_init(spec: VirtualMachineSpec) -> None:
    hostname = spec.cloud_init.hostname
    if hostname:
        check_hostname(hostname, field="spec.cloudInit.hostname")
        if "." in hostname:
            raise InvalidArgument(
                f"{shown(hostname)} has a domain",
                field="spec.cloudInit.hostname",
                hint=f"write {hostname.partition('.')[0]}; the domain is the network's",
            )
    for index, key in enumerate(spec.cloud_init.ssh_authorized_keys):
        fields = key.split()
        plain = key.isprintable() and len(fields) >= 2
        if not plain or not fields[0].startswith(("ssh-", "ecdsa-", "sk-")):
            raise InvalidArgument(
                f"{shown(key)} is not a public key",
                field=f"spec.cloudInit.sshAuthorizedKeys[{index}]",
                hint="one line of an authorized_keys file without options: ssh-ed25519 AAAA… name",
            )


# --- Image


def _check_image(spec: ImageSpec) -> None:
    files = [spec.kernel, spec.initramfs, spec.disk]
    given = any(each is not None for each in files)
    if spec.builtin and given:
        raise InvalidArgument(
            "a builtin image has its own files", field="spec.builtin", hint="leave one of them out"
        )
    if not spec.builtin and not given:
        raise InvalidArgument(
            "the image has neither files nor a builtin name",
            field="spec",
            hint="builtin: tiny or probe, or kernel, initramfs, disk with path or url and sha256",
        )
    for name in ("kernel", "initramfs", "disk"):
        file = getattr(spec, name)
        if file is not None and file.path and file.url:
            raise InvalidArgument(
                "the file has a path and a url", field=f"spec.{name}.url", hint="leave one out"
            )
    if spec.initramfs is not None and spec.kernel is None:
        raise InvalidArgument("an initramfs needs a kernel", field="spec.kernel")
