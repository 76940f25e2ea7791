"""The machine on QEMU's command line: identity, chipset, CPUs, memory, payload, own devices. Pure.

Two machines: q35, which takes up disks, NICs, CPUs and memory while it runs, and microvm, which
has no PCI and nothing that is plugged later. Fails with InvalidArgument naming the field, or
Unsupported for what the machine cannot do.
"""

from __future__ import annotations

import re
from pathlib import Path

from chv.common.errors import InvalidArgument, Unsupported
from chv.common.layout import check_socket_path
from chv.vmm import spec_text as text
from chv.vmm.driver import VmmConfig

MONITOR_SOCKET = "qmp.sock"
SERIAL_SOCKET = "serial.sock"
AGENT_SOCKET = "agent.sock"
AGENT_PORT = "org.qemu.guest_agent.0"  # the name by which the agent in the guest finds it
Q35 = "q35"
MICROVM = "microvm"
TCG_CACHE_MIB = 64  # the default grows to 1 GiB for each VM
CPUS_MAX = 255  # more need an interrupt remapping unit in the guest
CMDLINE_BYTES_MAX = 2047  # COMMAND_LINE_SIZE of x86 Linux, less its terminator
MIB = 1 << 20
MEMORY_SLOTS = 16  # how often memory may grow: each time takes one
MEMORY_STEP_BYTES = 128 * MIB  # what Linux takes into use at once
DIMM_PREFIX = "dimm-"
CPU_PREFIX = "cpu-"

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_WORKER_ID = re.compile(r"chv(:[A-Za-z0-9_-]+){4}")

_FIXED = (
    *("-nodefaults", "-no-user-config", "-no-shutdown"),
    *("-display", "none"),
    *("-action", "panic=pause"),
    *("-msg", "timestamp=on"),
    *("-rtc", "base=utc"),
)
_BY_MACHINE = {
    # The chipset's sleep states would leave a VM in a state that nothing here wakes it from.
    Q35: ("-global", "ICH9-LPC.disable_s3=1", "-global", "ICH9-LPC.disable_s4=1"),
    MICROVM: ("-global", "virtio-mmio.force-legacy=false"),
}
# With ACPI, Linux looks for no PIT: without a clock of KVM either it hangs early.
_OPTIONS = {
    (Q35, "kvm"): "vmport=off",
    (Q35, "tcg"): "vmport=off",
    (MICROVM, "kvm"): "acpi=on,rtc=on",
    (MICROVM, "tcg"): "acpi=off,rtc=on",
}


def machine_of(config: VmmConfig) -> str:
    """Return which machine a VM has."""
    return config.machine or Q35


def machine_arguments(config: VmmConfig) -> list[str]:
    """Return everything but disks and NICs, and what holds them."""
    _check(config)
    return [
        *_identity(config),
        *_FIXED,
        *_start(config),
        *_BY_MACHINE[machine_of(config)],
        *_machine(config),
        *_payload(config),
        *_own_devices(config),
    ]


def dimm_memory(slot: int, size_bytes: int) -> dict[str, object]:
    """Return the arguments of `object-add` for memory that is plugged later."""
    return {
        "qom-type": "memory-backend-memfd",
        "id": dimm_backend(slot),
        "size": size_bytes,
        "share": True,  # vhost-user back ends map it as well
    }


def dimm_arguments(slot: int) -> dict[str, object]:
    """Return the arguments of `device_add` for memory that is plugged later."""
    device = f"{DIMM_PREFIX}{slot}"
    return {"driver": "pc-dimm", "id": device, "memdev": dimm_backend(slot), "slot": slot}


def dimm_backend(slot: int) -> str:
    """Return the id of the memory behind a slot."""
    return f"memory-{slot}"


def _check(config: VmmConfig) -> None:
    text.match(_WORKER_ID, config.worker_id, "worker_id")
    text.match(_UUID, config.uuid, "uuid")
    text.plain(config.name, "name")
    if machine_of(config) not in _BY_MACHINE:
        raise InvalidArgument(f"{config.machine!r} is not q35 or microvm", field="machine")
    if not 1 <= config.cpus <= max(config.cpus, config.cpus_max) <= CPUS_MAX:
        raise InvalidArgument(
            f"{max(config.cpus, config.cpus_max)} is not in 1..{CPUS_MAX}", field="cpus"
        )
    if config.memory_bytes <= 0:
        raise InvalidArgument(f"{config.memory_bytes} is not a size", field="memory_bytes")
    if config.accelerator not in ("kvm", "tcg"):
        raise InvalidArgument(f"{config.accelerator!r} is not kvm or tcg", field="accelerator")
    if machine_of(config) == MICROVM:
        _check_microvm(config)


def _check_microvm(config: VmmConfig) -> None:
    if not config.kernel:
        raise Unsupported("microvm boots a kernel, no firmware", field="kernel")
    if config.cpus > 1 and config.accelerator == "tcg":
        raise Unsupported("without KVM the guest of a microvm finds one CPU only", field="cpus")
    if config.cpus_max > config.cpus:
        raise Unsupported("microvm takes up no CPUs while it runs", field="cpus_max")
    if config.memory_max_bytes > config.memory_bytes:
        raise Unsupported("microvm takes up no memory while it runs", field="memory_max_bytes")


def _identity(config: VmmConfig) -> list[str]:
    # The worker id is what tells our process from any other; the guest does not see it.
    name = text.option(config.name[:11])
    return [
        "-name",
        f"guest={config.worker_id},process=chv-{name},debug-threads=on",
        "-uuid",
        config.uuid,
    ]


def _start(config: VmmConfig) -> tuple[str, ...]:
    """What comes from another VMM runs at once where it ran there; all else waits for `boot`."""
    if config.incoming:
        return ("-incoming", "defer")
    return ("-S", "-incoming", "defer") if config.restore_dir else ("-S",)


def _machine(config: VmmConfig) -> list[str]:
    mebibytes = -(-config.memory_bytes // MIB)  # rounded up: QEMU wants whole pages
    if config.accelerator == "kvm":
        accelerator, cpu = "kvm", "host"
    else:
        # Five-level page tables only slow the emulated walk down.
        accelerator, cpu = f"tcg,tb-size={TCG_CACHE_MIB}", "max,la57=off"
    kind = machine_of(config)
    options = _OPTIONS[kind, config.accelerator]
    return [
        "-machine",
        f"{kind},memory-backend=mem,{options},dump-guest-core=off",
        "-accel",
        accelerator,
        "-cpu",
        cpu,
        "-smp",
        _cpus(config),
        "-m",
        f"size={mebibytes}M{_room(config, mebibytes)}",
        # vhost-user back ends map the guest's memory, hence shared.
        "-object",
        f"memory-backend-memfd,id=mem,size={mebibytes}M,share=on",
    ]


def _cpus(config: VmmConfig) -> str:
    most = max(config.cpus, config.cpus_max)
    room = f",maxcpus={most}" if most > config.cpus else ""
    return f"cpus={config.cpus}{room},sockets=1,cores={most},threads=1"


def _room(config: VmmConfig, mebibytes: int) -> str:
    most = config.memory_max_bytes // MIB
    return f",slots={MEMORY_SLOTS},maxmem={most}M" if most > mebibytes else ""


def _payload(config: VmmConfig) -> list[str]:
    if not config.kernel:
        if config.initramfs or config.cmdline:
            raise InvalidArgument("initramfs and cmdline need a kernel", field="kernel")
        return ["-boot", "strict=on"]
    argv = ["-kernel", text.absolute(config.kernel, "kernel")]
    if config.initramfs:
        argv += ["-initrd", text.absolute(config.initramfs, "initramfs")]
    if len(config.cmdline.encode()) > CMDLINE_BYTES_MAX:
        raise InvalidArgument(f"longer than {CMDLINE_BYTES_MAX} bytes", field="cmdline")
    return [*argv, "-append", text.plain(config.cmdline, "cmdline")]


def _own_devices(config: VmmConfig) -> list[str]:
    base = Path(text.absolute(config.runtime_dir, "runtime_dir"))
    bus = "device" if machine_of(config) == MICROVM else "pci"
    return [
        *_server("monitor", base / MONITOR_SOCKET),
        "-mon",
        "chardev=monitor,mode=control",
        *_server("serial0", base / SERIAL_SOCKET),
        "-serial",
        "chardev:serial0",
        "-object",
        "rng-builtin,id=rng",
        "-device",
        f"virtio-rng-{bus},rng=rng",
        *_server("agent", base / AGENT_SOCKET),
        "-device",
        f"virtio-serial-{bus},id=lines,max_ports=2",
        "-device",
        f"virtserialport,bus=lines.0,chardev=agent,name={AGENT_PORT}",
        "-device",
        "pvpanic",
    ]


def _server(identifier: str, path: Path) -> list[str]:
    where = text.option(str(check_socket_path(path)))
    return ["-chardev", f"socket,id={identifier},path={where},server=on,wait=off"]
