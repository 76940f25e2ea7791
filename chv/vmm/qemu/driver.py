"""The QEMU driver: the VmmDriver port on top of QMP.

Holds one Monitor per VM and no other state: every method asks QEMU first and reads back what it
changed. Knows nothing of processes, except that `probe` tries QEMU out. What a disk takes is in
`hotplug`, what a NIC takes in `hotplug_nics`, what the guest agent says in `guest_agent`.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import msgspec

from chv.common.errors import DeadlineExceeded, OutcomeUnknown
from chv.vmm import spec, threads
from chv.vmm.driver import (
    Counters,
    DiskConfig,
    DriverProbe,
    Feature,
    Launch,
    NicConfig,
    PluggedDisk,
    ProbeGuest,
    Sizes,
    VmmConfig,
    VmmObservation,
    VmmState,
)
from chv.vmm.kvm import KvmAccess, kvm_access
from chv.vmm.limited import Limited
from chv.vmm.qemu import (
    counting,
    guest_agent,
    handover,
    hotplug,
    hotplug_nics,
    layout,
    machine,
    probe,
    saving,
    sizes,
)
from chv.vmm.qemu.qmp import Monitor, MonitorLost

DISKS_S_MAX = 30.0
DISKS_POLL_S = 0.02

_FEATURES = frozenset(Feature)


class QemuDriver(Limited):
    """See `VmmDriver`. `kvm` is `auto` (by try-boot) or `off`."""

    name = "qemu"

    def __init__(self, binary: str = "qemu-system-x86_64", *, kvm: str = "auto") -> None:
        self._binary = shutil.which(binary) or binary
        self._kvm = kvm
        self._version = probe.VERSION_OLDEST  # its spelling of options works up to 10.x
        self._monitors: dict[Path, Monitor] = {}

    async def probe(self, guest: ProbeGuest | None) -> DriverProbe:
        """Try QEMU, and KVM by a try-boot; never raises."""
        result = await probe.probe(self._binary, self._kvm, guest)
        self.recall(result)
        return result

    def recall(self, result: DriverProbe) -> None:
        """Take over what an earlier probe on this host boot found."""
        self._version = probe.parse_version(result.version) or self._version

    def features(self) -> frozenset[Feature]:
        """Return what it can do; each call says itself where a machine or an accelerator cannot."""
        return _FEATURES

    def launch(self, config: VmmConfig) -> Launch:
        """Return what to start; one that starts from a snapshot has the sizes of that."""
        access = kvm_access() if config.accelerator == "kvm" else KvmAccess()
        ports = 0
        if config.restore_dir:
            saved = layout.read(Path(config.restore_dir))
            layout.check_devices(config, saved)
            config, ports = layout.as_saved(config, saved), saved.ports
        launch = spec.qemu_launch(
            config,
            binary=config.binary or self._binary,
            version=self._version,
            groups=access.groups,
            ports=ports,
        )
        return msgspec.structs.replace(launch, private_kvm=access.private)

    async def create(
        self, runtime_dir: Path, config: VmmConfig, nic_fds: Mapping[str, Sequence[int]]
    ) -> None:
        """Fill a QEMU that waits with a snapshot; all others were given their VM by `launch`."""
        monitor = self._monitor(runtime_dir)
        if config.restore_dir and await machine.state(monitor) is VmmState.EMPTY:
            await saving.restore(monitor, config, nic_fds, self._version)

    async def observe(self, runtime_dir: Path) -> VmmObservation:
        """Ask QEMU for the state; what it has told of resets is known since we are connected."""
        monitor = self._monitor(runtime_dir)
        status = await machine.status(monitor)
        state = machine.state_of(status)
        reason = monitor.shutdown_reason if state is VmmState.SHUTDOWN else ""
        return VmmObservation(
            state=state,
            reason=reason or (status if status != state else ""),
            evidence=f"query-status: {status}",
            version=monitor.version(),
            reboots=monitor.resets.reboots,
            resets=monitor.resets.announced,
            reset_at_s=monitor.resets.at_s,
            remembers=False,
        )

    async def boot(self, runtime_dir: Path) -> None:
        """Let the vCPUs of a created VM run."""
        await self._run(runtime_dir, "boot", VmmState.CREATED)

    async def halt(self, runtime_dir: Path) -> None:
        """Stop the vCPUs, which waits for no disk."""
        await self.pause(runtime_dir)

    async def resume(self, runtime_dir: Path) -> None:
        """Let vCPUs run that were paused, or that stand since a reset."""
        await self._run(runtime_dir, "resume", VmmState.PAUSED, VmmState.CREATED)

    async def _run(self, runtime_dir: Path, verb: str, *allowed: VmmState) -> None:
        monitor = self._monitor(runtime_dir)
        state = await machine.state(monitor)
        if state is VmmState.RUNNING:
            return
        machine.require(verb, state, *allowed)
        await monitor.tell("cont")
        if await machine.state(monitor) in allowed:
            raise OutcomeUnknown(f"{verb}: the vCPUs do not run after cont")

    async def pause(self, runtime_dir: Path) -> None:
        """Stop the vCPUs."""
        monitor = self._monitor(runtime_dir)
        state = await machine.state(monitor)
        if state is VmmState.PAUSED:
            return
        machine.require("pause", state, VmmState.RUNNING)
        await monitor.tell("stop")
        machine.require("pause", await machine.state(monitor), VmmState.PAUSED)

    async def reset(self, runtime_dir: Path) -> None:
        """Hard reset; where the vCPUs stand, they keep standing and the VM is created again."""
        monitor = self._monitor(runtime_dir)
        running = await machine.state(monitor) is VmmState.RUNNING
        await monitor.tell_until("system_reset", "RESET")
        if not running:
            machine.require("reset", await machine.state(monitor), VmmState.CREATED)

    async def power_button(self, runtime_dir: Path) -> None:
        """Press the ACPI power button once; no effect on a VM that is off already."""
        monitor = self._monitor(runtime_dir)
        state = await machine.state(monitor)
        if state is VmmState.SHUTDOWN:
            return
        machine.require("power button", state, VmmState.RUNNING)
        await machine.require_button(monitor)
        await monitor.tell("system_powerdown")

    async def quit(self, runtime_dir: Path) -> None:
        """Ask QEMU to end at once; that it hangs up is the expected answer."""
        with contextlib.suppress(MonitorLost):
            await self._monitor(runtime_dir).tell("quit")
        await self.close(runtime_dir)

    async def await_disks(self, runtime_dir: Path, disk_ids: tuple[str, ...]) -> None:
        """Wait until QEMU is connected to the disks and the vhost handshake is over."""
        monitor = self._monitor(runtime_dir)
        with anyio.move_on_after(DISKS_S_MAX):
            while not await hotplug.connected(monitor, disk_ids):  # noqa: ASYNC110
                await anyio.sleep(DISKS_POLL_S)
            return
        raise DeadlineExceeded(f"{disk_ids} not all connected within {DISKS_S_MAX:g} s")

    async def disks(self, runtime_dir: Path) -> tuple[PluggedDisk, ...]:
        """Ask QEMU which vhost-user disks it has."""
        return await hotplug.disks(self._monitor(runtime_dir))

    async def add_disk(self, runtime_dir: Path, disk: DiskConfig) -> None:
        """Plug a disk."""
        monitor = self._monitor(runtime_dir)
        await machine.require_ports(monitor, "take up a disk")
        await hotplug.add(monitor, disk, self._version)

    async def remove_disk(self, runtime_dir: Path, disk_id: str) -> None:
        """Unplug a disk, with the guest's help."""
        monitor = self._monitor(runtime_dir)
        if disk_id in {disk.id for disk in await hotplug.disks(monitor)}:
            await machine.require_ports(monitor, "let go of a disk")
            machine.require("remove disk", await machine.state(monitor), VmmState.RUNNING)
        await hotplug.remove(monitor, disk_id)

    async def nics(self, runtime_dir: Path) -> tuple[str, ...]:
        """Ask QEMU which NICs it has."""
        return await hotplug_nics.nics(self._monitor(runtime_dir))

    async def add_nic(self, runtime_dir: Path, nic: NicConfig, fds: Sequence[int]) -> None:
        """Plug a NIC."""
        monitor = self._monitor(runtime_dir)
        await machine.require_ports(monitor, "take up a NIC")
        await hotplug_nics.add(monitor, nic, fds)

    async def drop_nic(self, runtime_dir: Path, nic_id: str) -> None:
        """Close what QEMU may hold of a tap that belongs to no device."""
        await hotplug_nics.drop(self._monitor(runtime_dir), nic_id)

    async def remove_nic(self, runtime_dir: Path, nic_id: str) -> None:
        """Unplug a NIC, with the guest's help."""
        monitor = self._monitor(runtime_dir)
        if nic_id in await hotplug_nics.nics(monitor):
            await machine.require_ports(monitor, "let go of a NIC")
            machine.require("remove NIC", await machine.state(monitor), VmmState.RUNNING)
        await hotplug_nics.remove(monitor, nic_id)

    async def sizes(self, runtime_dir: Path) -> Sizes:
        """Ask for CPUs and memory."""
        return await sizes.sizes(self._monitor(runtime_dir))

    async def set_cpus(self, runtime_dir: Path, cpus: int) -> None:
        """Change the number of CPUs; fewer only with KVM."""
        await sizes.set_cpus(self._monitor(runtime_dir), cpus)

    async def set_memory(self, runtime_dir: Path, memory_bytes: int) -> None:
        """Give the VM more memory."""
        await sizes.set_memory(self._monitor(runtime_dir), memory_bytes)

    async def snapshot(self, runtime_dir: Path, directory: Path) -> None:
        """Save a paused VM, once in each pause."""
        await saving.snapshot(self._monitor(runtime_dir), directory)

    async def receive(
        self,
        runtime_dir: Path,
        config: VmmConfig,
        nic_fds: Mapping[str, Sequence[int]],
        socket: Path,
    ) -> None:
        """Wait for a VM on a Unix socket that is ours, not QEMU's."""
        await handover.receive(self._monitor(runtime_dir), config, nic_fds, socket, self._version)

    async def send(self, runtime_dir: Path, socket: Path) -> None:
        """Hand the VM over, and end QEMU."""
        await handover.send(self._monitor(runtime_dir), socket)
        await self.close(runtime_dir)

    async def counters(self, runtime_dir: Path) -> Counters:
        """Ask for what QEMU counts: the disks that it serves itself."""
        return await counting.counters(self._monitor(runtime_dir))

    async def core_dump(self, runtime_dir: Path, path: Path) -> None:
        """Write the guest's memory."""
        await saving.core_dump(self._monitor(runtime_dir), path)

    async def nmi(self, runtime_dir: Path) -> None:
        """Inject an NMI."""
        monitor = self._monitor(runtime_dir)
        machine.require("NMI", await machine.state(monitor), VmmState.RUNNING)
        await monitor.tell("inject-nmi")

    async def ping_guest(self, runtime_dir: Path) -> None:
        """Ask the guest agent whether it is there."""
        await guest_agent.ping(spec.agent_socket(runtime_dir))

    async def freeze_guest(self, runtime_dir: Path) -> None:
        """Let the guest agent freeze the file systems."""
        await guest_agent.freeze(spec.agent_socket(runtime_dir))

    async def thaw_guest(self, runtime_dir: Path) -> None:
        """Let the guest agent thaw them."""
        await guest_agent.thaw(spec.agent_socket(runtime_dir))

    async def guest_frozen(self, runtime_dir: Path) -> bool:
        """Ask the guest agent for the state of the file systems."""
        return await guest_agent.frozen(spec.agent_socket(runtime_dir))

    def unfiltered(self, pid: int) -> tuple[str, ...] | None:
        """Look at every thread."""
        return threads.unfiltered_of_all(pid)

    def serial_socket(self, runtime_dir: Path) -> Path:
        """Return the socket of the serial console."""
        return spec.serial_socket(runtime_dir)

    async def close(self, runtime_dir: Path) -> None:
        """Drop the cached connection."""
        monitor = self._monitors.pop(runtime_dir, None)
        if monitor is not None:
            await monitor.close()

    def _monitor(self, runtime_dir: Path) -> Monitor:
        found = self._monitors.get(runtime_dir)
        if found is None:
            found = self._monitors[runtime_dir] = Monitor(spec.monitor_socket(runtime_dir))
        return found
