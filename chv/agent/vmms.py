"""VMM processes and monitors: the engine's `VmmPort` on drivers, the process provider and nwd.

Directories and their modes are made here and named by Layout. A process is only ever touched
through its record, so a recycled pid is never signalled; which process belongs to which VM is the
engine's knowledge, kept in its store.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain
from pathlib import Path

import anyio

from chv.agent.console.keeper import ConsoleKeeper
from chv.agent.links import DaemonLink
from chv.agent.ports import WORKER_KIND, SpawnRequest, VmHandle, VmmSelection
from chv.agent.probes import Probes
from chv.agent.resources.vmm_limits import vmm_limits
from chv.common.errors import Conflict, InvalidArgument
from chv.common.failpoint import failpoint
from chv.common.files import ensure_dir, sha256_file
from chv.common.layout import Layout
from chv.common.process import AdoptVerdict, Provider, SpawnSpec, WorkerRecord, scan, verify
from chv.common.process import wait_gone as wait_process_gone
from chv.common.wire.nwd import OPEN_NIC, OpenVmNic
from chv.common.wire.resources import VmmChoice
from chv.vmm.driver import (
    DiskConfig,
    Feature,
    Launch,
    NicConfig,
    PluggedDisk,
    VmmConfig,
    VmmDriver,
    VmmObservation,
)
from chv.vmm.handing import handed_over

VMM_LOG = "vmm.log"
KVM_DEVICE = Path("/dev/kvm")
SOCKET_TIMEOUT_S = 5.0
SOCKET_POLL_S = 0.005


class Vmms:
    """Implements `VmmPort` for every driver of this node."""

    def __init__(
        self,
        layout: Layout,
        provider: Provider,
        probes: Probes,
        nwd: DaemonLink,
        console: ConsoleKeeper,
    ) -> None:
        self._layout = layout
        self._provider = provider
        self._probes = probes
        self._drivers: Mapping[str, VmmDriver] = probes.drivers
        self._nwd = nwd
        self._console = console

    # --- before a process exists
    async def select(self, choice: VmmChoice) -> VmmSelection:
        """Choose by what the probes saw."""
        return await self._probes.select(choice)

    async def prepare(self, vm: VmHandle) -> None:
        """Make the VM's directories with owner and mode."""
        await anyio.to_thread.run_sync(self._make_directories, vm)

    def _make_directories(self, vm: VmHandle) -> None:
        vmm_uid = self._layout.vmm_uid(vm.slot)
        ensure_dir(self._layout.vms, mode=0o711)
        ensure_dir(self._layout.vm(vm.uid), mode=0o710, gid=vmm_uid)
        ensure_dir(self._layout.vmm(vm.uid), mode=0o700, uid=vmm_uid, gid=vmm_uid)
        ensure_dir(self._layout.vm_state(vm.uid).parent, mode=0o711)
        ensure_dir(self._layout.vm_state(vm.uid), mode=0o711)
        ensure_dir(self._layout.vm_save(vm.uid), mode=0o711)

    async def spawn(self, request: SpawnRequest) -> WorkerRecord:
        """Open the taps, start the process, give it the descriptors."""
        vm, config = request.vm, request.config
        launch = self._driver(vm).launch(config)
        async with self._taps(launch.nic_fds) as taps:
            await failpoint("agent.vmm.spawn.taps_open")
            with handed_over(launch) as files:
                return await self._provider.spawn(self._spawn_spec(request, launch, taps, files))

    @asynccontextmanager
    async def _taps(self, nic_ids: Iterable[str]) -> AsyncIterator[dict[str, list[int]]]:
        """Open the taps of NICs, each of its queues."""
        opened: dict[str, list[int]] = {}
        try:
            for nic_id in nic_ids:
                _, opened[nic_id] = await self._nwd.call_fds(OPEN_NIC, OpenVmNic(nic_id=nic_id))
            yield opened
        finally:
            for fd in chain.from_iterable(opened.values()):
                os.close(fd)

    def _spawn_spec(
        self,
        request: SpawnRequest,
        launch: Launch,
        taps: Mapping[str, Sequence[int]],
        files: Mapping[int, int],
    ) -> SpawnSpec:
        vm, config = request.vm, request.config
        uid = 0 if launch.keep_root else self._layout.vmm_uid(vm.slot)
        return SpawnSpec(
            worker_id=config.worker_id,
            argv=launch.argv,
            uid=uid,
            gid=uid,
            groups=launch.groups,
            environment=dict(launch.environment),
            cwd=launch.cwd,
            fds={
                number: fd
                for nic_id, numbers in launch.nic_fds.items()
                for number, fd in zip(numbers, _of_nic(nic_id, numbers, taps), strict=True)
            }
            | dict(files),
            own_devices=(str(KVM_DEVICE),) if launch.private_kvm else (),
            log_path=str(self._layout.vm_state(vm.uid) / VMM_LOG),
            cgroup=f"{WORKER_KIND}-{self._layout.vm(vm.uid).name}",
            limits=vmm_limits(vm.driver, config),
        )

    # --- processes
    async def find(self, worker_id: str) -> WorkerRecord | None:
        """Return the live process with exactly this worker id."""
        found = await anyio.to_thread.run_sync(scan, worker_id)
        matching = [worker.record() for worker in found if worker.worker_id == worker_id]
        return matching[0] if matching else None

    async def find_all(self) -> list[WorkerRecord]:
        """Return every live VMM of this instance."""
        prefix = f"{self._layout.worker_prefix}{WORKER_KIND}:"
        return [worker.record() for worker in await anyio.to_thread.run_sync(scan, prefix)]

    async def verify(self, record: WorkerRecord) -> AdoptVerdict:
        """Judge a record against the kernel."""
        return await anyio.to_thread.run_sync(verify, record)

    async def signal(self, record: WorkerRecord, number: signal.Signals) -> None:
        """Signal exactly the recorded process."""
        await self._provider.kill(record, number)

    async def wait_gone(self, record: WorkerRecord) -> None:
        """Return when the process is gone."""
        await wait_process_gone(record)

    async def cleanup(self, vm: VmHandle, record: WorkerRecord | None) -> None:
        """Remove the sockets and the cgroup of a dead VMM."""
        runtime_dir = self._layout.vmm(vm.uid)
        kept: tuple[Path, ...] = ()
        if vm.driver:
            driver = self._driver(vm)
            await driver.close(runtime_dir)
            kept = driver.kept_files(runtime_dir)
        if record is not None:
            await self._provider.cleanup(record)
        await anyio.to_thread.run_sync(_empty_directory, runtime_dir)
        await anyio.to_thread.run_sync(_unlink, kept)

    def kept_files(self, vm: VmHandle) -> tuple[Path, ...]:
        """Return what the VM's driver keeps beside its private directory; pure."""
        driver = self._drivers.get(vm.driver)
        return () if driver is None else driver.kept_files(self._layout.vmm(vm.uid))

    async def remove(self, vm: VmHandle) -> None:
        """Remove the VM's directories."""
        for path in (self._layout.vm(vm.uid), self._layout.vm_state(vm.uid)):
            await anyio.to_thread.run_sync(_remove_tree, path)

    # --- the monitor
    async def observe(self, vm: VmHandle) -> VmmObservation:
        """Ask the monitor."""
        return await self._driver(vm).observe(self._layout.vmm(vm.uid))

    async def create(self, vm: VmHandle, config: VmmConfig) -> None:
        """Make the VM in a VMM that was started without one."""
        driver, runtime_dir = self._driver(vm), self._layout.vmm(vm.uid)
        # A tap that was handed over at the start is held by the VMM: opening it again is refused.
        given = driver.launch(config).nic_fds
        added = [nic.id for nic in config.nics if nic.id not in given]
        for nic_id in added:
            await driver.drop_nic(runtime_dir, nic_id)  # what an attempt that was cut short left
        async with self._taps(added) as taps:
            await failpoint("agent.vmm.create.taps_open")
            await driver.create(runtime_dir, config, taps)

    async def boot(self, vm: VmHandle) -> None:
        """Let a created VM run."""
        await self._driver(vm).boot(self._layout.vmm(vm.uid))

    async def pause(self, vm: VmHandle) -> None:
        """Stop the vCPUs."""
        await self._driver(vm).pause(self._layout.vmm(vm.uid))

    async def halt(self, vm: VmHandle) -> None:
        """Let no vCPU run on."""
        await self._driver(vm).halt(self._layout.vmm(vm.uid))

    async def resume(self, vm: VmHandle) -> None:
        """Let them run on."""
        await self._driver(vm).resume(self._layout.vmm(vm.uid))

    async def reset(self, vm: VmHandle) -> None:
        """Hard reset."""
        await self._driver(vm).reset(self._layout.vmm(vm.uid))

    async def power_button(self, vm: VmHandle) -> None:
        """Press the button."""
        await self._driver(vm).power_button(self._layout.vmm(vm.uid))

    async def quit(self, vm: VmHandle) -> None:
        """Ask the process to end."""
        await self._driver(vm).quit(self._layout.vmm(vm.uid))

    async def await_disks(self, vm: VmHandle, disk_ids: tuple[str, ...]) -> None:
        """Wait for the vhost-user disks to be connected again."""
        await self._driver(vm).await_disks(self._layout.vmm(vm.uid), disk_ids)

    async def disks(self, vm: VmHandle) -> tuple[PluggedDisk, ...]:
        """Return the vhost-user disks that are plugged."""
        return await self._driver(vm).disks(self._layout.vmm(vm.uid))

    async def add_disk(self, vm: VmHandle, disk: DiskConfig) -> None:
        """Plug a disk."""
        await self._driver(vm).add_disk(self._layout.vmm(vm.uid), disk)

    async def remove_disk(self, vm: VmHandle, disk_id: str) -> None:
        """Unplug a disk."""
        await self._driver(vm).remove_disk(self._layout.vmm(vm.uid), disk_id)

    async def nics(self, vm: VmHandle) -> tuple[str, ...]:
        """Return the NICs that are plugged."""
        return await self._driver(vm).nics(self._layout.vmm(vm.uid))

    async def add_nic(self, vm: VmHandle, nic: NicConfig) -> None:
        """Plug a NIC; what an attempt that was cut short left would keep its tap from us."""
        driver, runtime_dir = self._driver(vm), self._layout.vmm(vm.uid)
        if nic.id in await driver.nics(runtime_dir):
            return
        await driver.drop_nic(runtime_dir, nic.id)
        async with self._taps((nic.id,)) as taps:
            await failpoint("agent.vmm.add_nic.tap_open")
            await driver.add_nic(runtime_dir, nic, taps[nic.id])

    async def remove_nic(self, vm: VmHandle, nic_id: str) -> None:
        """Unplug a NIC."""
        await self._driver(vm).remove_nic(self._layout.vmm(vm.uid), nic_id)

    async def set_cpus(self, vm: VmHandle, cpus: int) -> None:
        """Change the number of CPUs."""
        await self._driver(vm).set_cpus(self._layout.vmm(vm.uid), cpus)

    async def set_memory(self, vm: VmHandle, memory_bytes: int) -> None:
        """Change the memory."""
        await self._driver(vm).set_memory(self._layout.vmm(vm.uid), memory_bytes)

    # --- saving
    def can_save(self, driver: str) -> bool:
        """Tell by what the driver says of the version here."""
        found = self._drivers.get(driver)
        return found is not None and Feature.SNAPSHOT in found.features()

    async def save(self, vm: VmHandle, directory: str) -> None:
        """Write memory and devices of a paused VM."""
        await self._driver(vm).snapshot(self._layout.vmm(vm.uid), Path(directory))

    async def identify(self, record: WorkerRecord) -> str:
        """Read the executable through the process: its path may have another by now."""
        return await anyio.to_thread.run_sync(sha256_file, Path(f"/proc/{record.pid}/exe"))

    async def find_binary(self, driver: str, sha256: str, hint: str) -> str:
        """Look at the hint and at what the probes found."""
        return await self._probes.find_binary(driver, sha256, hint)

    async def unfiltered(self, vm: VmHandle, record: WorkerRecord) -> tuple[str, ...] | None:
        """Look at the VMM's threads."""
        return await anyio.to_thread.run_sync(self._driver(vm).unfiltered, record.pid)

    async def ping_guest(self, vm: VmHandle) -> None:
        """Ask the guest agent whether it is there."""
        await self._driver(vm).ping_guest(self._layout.vmm(vm.uid))

    async def freeze_guest(self, vm: VmHandle) -> None:
        """Let the guest agent freeze the file systems."""
        await self._driver(vm).freeze_guest(self._layout.vmm(vm.uid))

    async def thaw_guest(self, vm: VmHandle) -> None:
        """Let the guest agent thaw them."""
        await self._driver(vm).thaw_guest(self._layout.vmm(vm.uid))

    # --- the console
    async def attach_console(self, vm: VmHandle) -> None:
        """Let the holder record the serial line."""
        serial = self._driver(vm).serial_socket(self._layout.vmm(vm.uid))
        # A VMM that has just been started makes its sockets within milliseconds.
        with anyio.move_on_after(SOCKET_TIMEOUT_S):
            while not serial.exists():  # noqa: ASYNC110  the file system has no event for us
                await anyio.sleep(SOCKET_POLL_S)
        await self._console.attach(vm.uid, serial)

    async def detach_console(self, vm: VmHandle) -> None:
        """End the recording."""
        await self._console.detach(vm.uid)

    def console_attached(self, vm: VmHandle) -> bool:
        """Tell from memory."""
        return self._console.attached(vm.uid)

    def _driver(self, vm: VmHandle) -> VmmDriver:
        driver = self._drivers.get(vm.driver)
        if driver is None:
            raise InvalidArgument(
                f"VM {vm.namespace}/{vm.name} was made with VMM {vm.driver!r}, which this node "
                "does not have",
                field="status.vmm.name",
            )
        return driver


def _of_nic(
    nic_id: str, numbers: Sequence[int], taps: Mapping[str, Sequence[int]]
) -> Sequence[int]:
    """Return the NIC's descriptors, as many as the VMM is told of."""
    fds = taps[nic_id]
    if len(fds) != len(numbers):
        raise Conflict(
            f"the NIC has {len(fds)} queues by now, and the VM was made for {len(numbers)}",
            resource=nic_id,
        )
    return fds


def _empty_directory(directory: Path) -> None:
    """Remove what is in a directory of sockets; missing is fine."""
    with suppress(FileNotFoundError):
        for entry in directory.iterdir():
            entry.unlink(missing_ok=True)


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _remove_tree(path: Path) -> None:
    """Remove a directory that is ours alone; missing is fine. shutil does not follow links."""
    with suppress(FileNotFoundError):
        shutil.rmtree(path)
