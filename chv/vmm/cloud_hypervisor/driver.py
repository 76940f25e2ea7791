"""The Cloud Hypervisor driver: the VmmDriver port on top of its HTTP API.

Holds one `Machine` per VM and, beside a connection, no state: every method asks the VMM first and
reads back what it changed. What disks and NICs take is in `devices`, what a size takes in
`sizes`, snapshots and moves in `moving`. Knows nothing of processes, except that `probe` tries
the VMM out. The guest agent needs a line into the guest that this VMM does not have: Unsupported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import anyio.lowlevel

from chv.common.errors import (
    ChvError,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OutcomeUnknown,
    Unavailable,
)
from chv.common.process import landlock_abi
from chv.vmm import threads
from chv.vmm.cloud_hypervisor import backends, counting, devices, moving, probe, sizes, spec, taps
from chv.vmm.cloud_hypervisor.machine import ENDED, Machine, require
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
from chv.vmm.kvm import kvm_access
from chv.vmm.limited import Limited

DISKS_S_MAX = 30.0
DISKS_POLL_S = 0.02
LANDLOCK_ABI_MIN = 3  # what Cloud Hypervisor insists on

_STANDING = (VmmState.PAUSED, VmmState.PANICKED)
_FEATURES = frozenset(
    {
        Feature.RESIZE_CPUS,
        Feature.RESIZE_MEMORY,
        Feature.SNAPSHOT,
        Feature.MIGRATION,
        Feature.COUNTERS,
    }
)


class CloudHypervisorDriver(Limited):
    """See `VmmDriver`. `binaries`: where to look, the first that works is for new VMs.

    `sha256`: where given, a binary with another digest is not used for new VMs.
    """

    name = "cloud-hypervisor"

    def __init__(
        self, binaries: Sequence[str] = (), *, kvm: str = "auto", sha256: Sequence[str] = ()
    ) -> None:
        self._binaries = probe.candidates(binaries)
        self._sha256 = tuple(sha256)
        self._kvm = kvm
        self._binary = self._binaries[0]
        self._machines: dict[Path, Machine] = {}

    async def probe(self, guest: ProbeGuest | None) -> DriverProbe:
        """Try each binary, and KVM by a try-boot; never raises."""
        result = await probe.probe(self._binaries, self._kvm, guest, self._sha256)
        self.recall(result)
        return result

    def recall(self, result: DriverProbe) -> None:
        """Take over which binary is for new VMs."""
        self._binary = result.binary or self._binary

    def features(self) -> frozenset[Feature]:
        """Return what it can do; each call says itself where a host or a build cannot."""
        return _FEATURES

    def launch(self, config: VmmConfig) -> Launch:
        """Return what to start."""
        access = kvm_access()
        return spec.launch(
            config,
            config.binary or self._binary,
            groups=access.groups,
            private_kvm=access.private,
        )

    def kept_files(self, runtime_dir: Path) -> tuple[Path, ...]:
        """Return the API socket and the events."""
        return (spec.api_socket(runtime_dir), spec.events_file(runtime_dir))

    async def create(
        self, runtime_dir: Path, config: VmmConfig, nic_fds: Mapping[str, Sequence[int]]
    ) -> None:
        """Make the VM, and its NICs with their descriptors; whole or not at all."""
        machine = self._machine(runtime_dir)
        seen = await machine.look()
        if seen.history.made and seen.info is not None:
            return
        if seen.state in (VmmState.RUNNING, VmmState.PAUSED):
            machine.journal.mark("made", spec.limits(config))  # only the mark was missing
            return
        if lacking := {nic.id for nic in config.nics} - nic_fds.keys():
            raise InvalidArgument(f"no descriptors for {sorted(lacking)}", field="nics")
        for nic in config.nics:
            taps.require_up(nic, nic_fds[nic.id])
        await machine.clear(seen)
        failure: ChvError | None = None
        try:
            await self._make(machine, config, nic_fds)
        except ChvError as error:
            if isinstance(error, OutcomeUnknown | Unavailable | DeadlineExceeded):
                raise
            failure = error
        if failure is not None:
            noted = (await machine.look()).info is not None or config.restore_dir
            if not noted or not config.nics:
                await machine.delete()  # a configuration stays behind a failed vm.create
                raise failure
            await machine.end()
            raise FailedPrecondition(failure.message, field=failure.field, hint=ENDED)
        machine.journal.mark("made", spec.limits(config))

    async def _make(
        self, machine: Machine, config: VmmConfig, nic_fds: Mapping[str, Sequence[int]]
    ) -> None:
        version = probe.parse_version(await machine.told_version()) or spec.UUID_KEY_SINCE
        landlock = landlock_abi() >= LANDLOCK_ABI_MIN
        if config.restore_dir:
            await moving.restore(machine, config, nic_fds, version=version, landlock=landlock)
            return
        body = spec.vm_config(config, version=version, landlock=landlock)
        await machine.api.change("vm.create", body)
        for nic in config.nics:
            fds = nic_fds[nic.id]
            await machine.api.change("vm.add-net", spec.nic_config(nic, fds), fds)
        nets = [spec.nic_config(nic, nic_fds[nic.id]) for nic in config.nics]
        spec.check_reported(body | {"net": nets}, (await machine.api.info()).config)

    async def observe(self, runtime_dir: Path) -> VmmObservation:
        """Ask the VMM for the state, and the events for the reason."""
        machine = self._machine(runtime_dir)
        version = await machine.told_version()
        seen = await machine.look()
        reasons = {
            VmmState.SHUTDOWN: "guest-shutdown",
            VmmState.PANICKED: "guest-panicked",
        }
        told = seen.info.state.lower() if seen.info else "no VM"
        return VmmObservation(
            state=seen.state,
            reason=reasons.get(seen.state, ""),
            evidence=f"vm.info: {told}",
            version=version,
            reboots=seen.history.reboots,
            resets=seen.history.reboots,
        )

    async def boot(self, runtime_dir: Path) -> None:
        """Build the VM and let its vCPUs run."""
        machine = self._machine(runtime_dir)
        seen = await machine.look()
        if seen.state is VmmState.RUNNING:
            return
        require("boot", seen.state, VmmState.CREATED)
        await machine.boot(seen)
        await self._read_back("boot", machine, VmmState.RUNNING)

    async def resume(self, runtime_dir: Path) -> None:
        """Let vCPUs run that were paused, or that stand since a reset."""
        machine = self._machine(runtime_dir)
        seen = await machine.look()
        if seen.state is VmmState.RUNNING:
            return
        require("resume", seen.state, VmmState.PAUSED, VmmState.CREATED)
        if seen.state is VmmState.PAUSED:
            await machine.api.change("vm.resume")
        else:
            await machine.boot(seen)
        await self._read_back("resume", machine, VmmState.RUNNING)

    async def _read_back(self, verb: str, machine: Machine, expected: VmmState) -> None:
        """A guest may have ended since, or panicked: that is for whoever looks next."""
        seen = await machine.look()
        ended = (VmmState.SHUTDOWN, VmmState.PANICKED) if expected is VmmState.RUNNING else ()
        if seen.state not in (expected, *ended):
            raise OutcomeUnknown(f"{verb}: the VM is {seen.state} after it, not {expected}")

    async def pause(self, runtime_dir: Path) -> None:
        """Stop the vCPUs."""
        machine = self._machine(runtime_dir)
        state = (await machine.look()).state
        if state is VmmState.PAUSED:
            return
        require("pause", state, VmmState.RUNNING)
        await machine.api.change("vm.pause")
        await self._read_back("pause", machine, VmmState.PAUSED)

    async def halt(self, runtime_dir: Path) -> None:
        """Cut the VM off, which waits for no disk: CREATED after it."""
        machine = self._machine(runtime_dir)
        seen = await machine.look()
        if seen.state in (VmmState.RUNNING, *_STANDING):
            await machine.stop()
            return
        require("halt", seen.state, VmmState.CREATED, VmmState.SHUTDOWN)

    async def reset(self, runtime_dir: Path) -> None:
        """Hard reset; where the vCPUs stand, they keep standing and the VM is created again."""
        machine = self._machine(runtime_dir)
        seen = await machine.look()
        if seen.state is VmmState.RUNNING:
            await machine.reboot(seen)
            await self._read_back("reset", machine, VmmState.RUNNING)
        elif seen.state in _STANDING:
            await machine.stop()
        elif seen.state is VmmState.SHUTDOWN:
            machine.journal.mark("reset")
        else:
            require("reset", seen.state, VmmState.CREATED)

    async def power_button(self, runtime_dir: Path) -> None:
        """Press the ACPI power button once; no effect on a VM that is off already."""
        machine = self._machine(runtime_dir)
        state = (await machine.look()).state
        if state is VmmState.SHUTDOWN:
            return
        require("power button", state, VmmState.RUNNING)
        await machine.api.change("vm.power-button")

    async def nmi(self, runtime_dir: Path) -> None:
        """Inject an NMI."""
        machine = self._machine(runtime_dir)
        require("NMI", (await machine.look()).state, VmmState.RUNNING, VmmState.PANICKED)
        await machine.api.change("vm.nmi")

    async def quit(self, runtime_dir: Path) -> None:
        """Ask the VMM to end at once; it may hang up instead of answering."""
        machine = self._machine(runtime_dir)
        await machine.end()
        await self.close(runtime_dir)

    async def await_disks(self, runtime_dir: Path, disk_ids: tuple[str, ...]) -> None:
        """Wait until the back ends listen: the VMM connects within 0.1 s, or when it boots."""
        machine = self._machine(runtime_dir)
        sockets = backends.vhost_sockets((await machine.look()).present)
        wanted = {spec.disk_device(disk_id) for disk_id in disk_ids}
        if unknown := wanted - sockets.keys():
            raise NotFound(f"Cloud Hypervisor has no {sorted(unknown)}", field="disk_ids")
        paths = [sockets[device] for device in wanted]
        with anyio.move_on_after(DISKS_S_MAX):
            while not all(map(backends.listens, paths)):  # noqa: ASYNC110
                await anyio.sleep(DISKS_POLL_S)
            return
        raise DeadlineExceeded(f"{disk_ids} not all served within {DISKS_S_MAX:g} s")

    async def disks(self, runtime_dir: Path) -> tuple[PluggedDisk, ...]:
        """Ask which vhost-user disks there are."""
        return await devices.disks(self._machine(runtime_dir))

    async def add_disk(self, runtime_dir: Path, disk: DiskConfig) -> None:
        """Plug a disk."""
        await devices.add_disk(self._machine(runtime_dir), disk)

    async def remove_disk(self, runtime_dir: Path, disk_id: str) -> None:
        """Unplug a disk, with the guest's help."""
        await devices.remove_disk(self._machine(runtime_dir), disk_id)

    async def nics(self, runtime_dir: Path) -> tuple[str, ...]:
        """Ask which NICs there are."""
        return await devices.nics(self._machine(runtime_dir))

    async def add_nic(self, runtime_dir: Path, nic: NicConfig, fds: Sequence[int]) -> None:
        """Plug a NIC."""
        await devices.add_nic(self._machine(runtime_dir), nic, fds)

    async def drop_nic(self, runtime_dir: Path, nic_id: str) -> None:
        """Refuse where the VMM holds the tap, which is until it ends."""
        await devices.drop_nic(self._machine(runtime_dir), nic_id)

    async def remove_nic(self, runtime_dir: Path, nic_id: str) -> None:
        """Unplug a NIC, with the guest's help."""
        await devices.remove_nic(self._machine(runtime_dir), nic_id)

    async def sizes(self, runtime_dir: Path) -> Sizes:
        """Ask for CPUs and memory."""
        return await sizes.sizes(self._machine(runtime_dir))

    async def set_cpus(self, runtime_dir: Path, cpus: int) -> None:
        """Change the number of CPUs."""
        await sizes.set_cpus(self._machine(runtime_dir), cpus)

    async def set_memory(self, runtime_dir: Path, memory_bytes: int) -> None:
        """Give the VM more memory."""
        await sizes.set_memory(self._machine(runtime_dir), memory_bytes)

    async def snapshot(self, runtime_dir: Path, directory: Path) -> None:
        """Save a paused VM."""
        await moving.snapshot(self._machine(runtime_dir), directory)

    async def receive(
        self,
        runtime_dir: Path,
        config: VmmConfig,
        nic_fds: Mapping[str, Sequence[int]],
        socket: Path,
    ) -> None:
        """Wait for a VM on a Unix socket."""
        del nic_fds
        await moving.receive(self._machine(runtime_dir), config, socket)

    async def send(self, runtime_dir: Path, socket: Path) -> None:
        """Hand the VM over."""
        await moving.send(self._machine(runtime_dir), socket)

    async def counters(self, runtime_dir: Path) -> Counters:
        """Ask for what is counted."""
        return await counting.counters(self._machine(runtime_dir))

    async def core_dump(self, runtime_dir: Path, path: Path) -> None:
        """Write the guest's memory; only builds for debugging have the call."""
        await counting.core_dump(self._machine(runtime_dir), path)

    async def ping_guest(self, runtime_dir: Path) -> None:
        """Refuse."""
        self._refuse("reach a guest agent", runtime_dir)

    async def freeze_guest(self, runtime_dir: Path) -> None:
        """Refuse."""
        self._refuse("freeze file systems: it has no guest agent", runtime_dir)

    async def thaw_guest(self, runtime_dir: Path) -> None:
        """Refuse."""
        self._refuse("thaw file systems: it has no guest agent", runtime_dir)

    async def guest_frozen(self, runtime_dir: Path) -> bool:
        """Nothing that could freeze them reaches a guest here."""
        del runtime_dir
        await anyio.lowlevel.checkpoint()
        return False

    def unfiltered(self, pid: int) -> tuple[str, ...] | None:
        """Look at those threads that touch the guest or a client."""
        return threads.unfiltered_by_name(pid)

    def serial_socket(self, runtime_dir: Path) -> Path:
        """Return the socket of the serial console; one viewer at a time."""
        return runtime_dir / spec.SERIAL_SOCKET

    async def close(self, runtime_dir: Path) -> None:
        """Drop the cached connection."""
        machine = self._machines.pop(runtime_dir, None)
        await anyio.lowlevel.checkpoint()
        if machine is not None:
            machine.api.close()

    def _machine(self, runtime_dir: Path) -> Machine:
        found = self._machines.get(runtime_dir)
        if found is None:
            found = self._machines[runtime_dir] = Machine(runtime_dir)
        return found
