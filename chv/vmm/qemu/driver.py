"""The QEMU driver: the VmmDriver port on top of QMP.

Holds one Monitor per VM and no other state: every method asks QEMU first and reads back what it
changed. Knows nothing of processes, except that `probe` tries QEMU out. What a disk takes is in
`hotplug`, what a NIC takes in `hotplug_nics`, what the guest agent says in `guest_agent`.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import anyio

from chv.common.errors import DeadlineExceeded, FailedPrecondition, OutcomeUnknown
from chv.vmm import spec
from chv.vmm.driver import (
    DiskConfig,
    DriverProbe,
    Feature,
    Launch,
    NicConfig,
    PluggedDisk,
    ProbeGuest,
    VmmConfig,
    VmmObservation,
    VmmState,
)
from chv.vmm.limited import Limited
from chv.vmm.qemu import guest_agent, hotplug, hotplug_nics, probe
from chv.vmm.qemu.qmp import Monitor, MonitorLost

DISKS_S_MAX = 30.0
DISKS_POLL_S = 0.02

_STATES = {
    "prelaunch": VmmState.CREATED,
    "running": VmmState.RUNNING,
    "paused": VmmState.PAUSED,
    "io-error": VmmState.PAUSED,
    "shutdown": VmmState.SHUTDOWN,
    "guest-panicked": VmmState.PANICKED,
}


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
        """Return what it can do."""
        return frozenset({Feature.GUEST_AGENT})

    def launch(self, config: VmmConfig) -> Launch:
        """Return what to start."""
        groups = probe.kvm_groups() if config.accelerator == "kvm" else ()
        return spec.qemu_launch(config, binary=self._binary, version=self._version, groups=groups)

    async def observe(self, runtime_dir: Path) -> VmmObservation:
        """Ask QEMU for the state."""
        monitor = self._monitor(runtime_dir)
        status = await _status(monitor)
        state = _STATES.get(status, VmmState.UNKNOWN)
        reason = monitor.shutdown_reason if state is VmmState.SHUTDOWN else ""
        return VmmObservation(
            state=state,
            reason=reason or (status if status != state else ""),
            evidence=f"query-status: {status}",
            version=monitor.version(),
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
        state = await _state(monitor)
        if state is VmmState.RUNNING:
            return
        _require(verb, state, *allowed)
        await monitor.tell("cont")
        if await _state(monitor) in allowed:
            raise OutcomeUnknown(f"{verb}: the vCPUs do not run after cont")

    async def pause(self, runtime_dir: Path) -> None:
        """Stop the vCPUs."""
        monitor = self._monitor(runtime_dir)
        state = await _state(monitor)
        if state is VmmState.PAUSED:
            return
        _require("pause", state, VmmState.RUNNING)
        await monitor.tell("stop")
        _require("pause", await _state(monitor), VmmState.PAUSED)

    async def reset(self, runtime_dir: Path) -> None:
        """Hard reset; where the vCPUs stand, they keep standing and the VM is created again."""
        monitor = self._monitor(runtime_dir)
        running = await _state(monitor) is VmmState.RUNNING
        await monitor.tell_until("system_reset", "RESET")
        if not running:
            _require("reset", await _state(monitor), VmmState.CREATED)

    async def power_button(self, runtime_dir: Path) -> None:
        """Press the ACPI power button once; no effect on a VM that is off already."""
        monitor = self._monitor(runtime_dir)
        state = await _state(monitor)
        if state is VmmState.SHUTDOWN:
            return
        _require("power button", state, VmmState.RUNNING)
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
        await hotplug.add(self._monitor(runtime_dir), disk, self._version)

    async def remove_disk(self, runtime_dir: Path, disk_id: str) -> None:
        """Unplug a disk, with the guest's help."""
        monitor = self._monitor(runtime_dir)
        if disk_id in {disk.id for disk in await hotplug.disks(monitor)}:
            _require("remove disk", await _state(monitor), VmmState.RUNNING)
        await hotplug.remove(monitor, disk_id)

    async def nics(self, runtime_dir: Path) -> tuple[str, ...]:
        """Ask QEMU which NICs it has."""
        return await hotplug_nics.nics(self._monitor(runtime_dir))

    async def add_nic(self, runtime_dir: Path, nic: NicConfig, fds: Sequence[int]) -> None:
        """Plug a NIC."""
        await hotplug_nics.add(self._monitor(runtime_dir), nic, fds)

    async def drop_nic(self, runtime_dir: Path, nic_id: str) -> None:
        """Close what QEMU may hold of a tap that belongs to no device."""
        await hotplug_nics.drop(self._monitor(runtime_dir), nic_id)

    async def remove_nic(self, runtime_dir: Path, nic_id: str) -> None:
        """Unplug a NIC, with the guest's help."""
        monitor = self._monitor(runtime_dir)
        if nic_id in await hotplug_nics.nics(monitor):
            _require("remove NIC", await _state(monitor), VmmState.RUNNING)
        await hotplug_nics.remove(monitor, nic_id)

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

    def serial_socket(self, runtime_dir: Path) -> Path:
        """Return the socket of the serial console."""
        return runtime_dir / spec.SERIAL_SOCKET

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


async def _status(monitor: Monitor) -> str:
    answer = await monitor.ask("query-status")
    return str(answer["status"])


async def _state(monitor: Monitor) -> VmmState:
    return _STATES.get(await _status(monitor), VmmState.UNKNOWN)


def _require(verb: str, state: VmmState, *allowed: VmmState) -> None:
    if state not in allowed:
        raise FailedPrecondition(f"{verb}: the VM is {state}, not {' or '.join(allowed)}")
