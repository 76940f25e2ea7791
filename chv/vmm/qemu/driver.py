"""The QEMU driver: the VmmDriver port on top of QMP.

Holds one Monitor per VM and no other state: every method asks QEMU first and reads back what it
changed. Knows nothing of processes, except that `probe` tries QEMU out.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import anyio

from chv.common.errors import DeadlineExceeded, FailedPrecondition, NotFound, OutcomeUnknown
from chv.vmm import spec
from chv.vmm.driver import DriverProbe, Launch, ProbeGuest, VmmConfig, VmmObservation, VmmState
from chv.vmm.qemu import probe
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


class QemuDriver:
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
        """Wait until QEMU is connected to the disks and the vhost handshake is over.

        QEMU makes the handshake in the loop that answers QMP: an answer that shows the connection
        up comes after it, and a handshake that failed shows as disconnected.
        """
        monitor = self._monitor(runtime_dir)
        wanted = {spec.disk_chardev(disk_id) for disk_id in disk_ids}
        missing = wanted
        with anyio.move_on_after(DISKS_S_MAX):
            while missing := wanted - await _connected_chardevs(monitor, wanted):  # noqa: ASYNC110
                await anyio.sleep(DISKS_POLL_S)
            return
        raise DeadlineExceeded(f"{sorted(missing)} not connected within {DISKS_S_MAX:g} s")

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


async def _connected_chardevs(monitor: Monitor, wanted: set[str]) -> set[str]:
    answer: list[dict[str, Any]] = await monitor.ask("query-chardev")
    known = {str(entry["label"]): str(entry["filename"]) for entry in answer}
    if unknown := wanted - known.keys():
        raise NotFound(f"QEMU has no {sorted(unknown)}", field="disk_ids")
    return {label for label in wanted if not known[label].startswith("disconnected:")}
