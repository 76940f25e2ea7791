"""The drivers of the fake: `FakeDriver` for the process, and what it shares with `in_process`.

They honour the VmmDriver port exactly as the real drivers do; one behaviour suite holds them to
it. A call makes a connection of its own, so nothing is cached and nothing can go stale.
"""

from __future__ import annotations

import functools
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import UNIXSocketStream

from chv.common.errors import (
    ChvError,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    OutcomeUnknown,
    Unavailable,
    from_data,
)
from chv.common.layout import check_socket_path
from chv.vmm import fake_files, fake_spec
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
from chv.vmm.fake_spec import Reply, Request
from chv.vmm.fake_state import Behaviour, Fault, Image
from chv.vmm.limited import Limited

CALL_S_MAX = 5.0
DISKS_S_MAX = 30.0
DISKS_POLL_S = 0.02
REMOVE_S_MAX = 8.0
OBSERVE = Request(command="observe")
AGENT = Request(command="ask_agent")
READS = (OBSERVE, AGENT)


class Lost(OutcomeUnknown):
    """The fake hung up between a command and its answer."""


class FakeDriverBase(Limited, ABC):
    """The VmmDriver port in terms of one abstract `call`."""

    name = "fake"

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or Behaviour()

    @abstractmethod
    async def call(self, runtime_dir: Path, request: Request, fds: Sequence[int] = ()) -> Reply:
        """Send one request; raises as the port says, but for the error within the reply."""

    async def probe(self, guest: ProbeGuest | None) -> DriverProbe:
        """Say that the fake works everywhere and runs nothing."""
        del guest
        await anyio.lowlevel.checkpoint()
        reason = "the fake runs no guest"
        return DriverProbe(driver=self.name, usable=True, version=fake_spec.VERSION, reason=reason)

    def recall(self, result: DriverProbe) -> None:
        """Nothing depends on a probe."""
        del result

    def features(self) -> frozenset[Feature]:
        """Return what it can do."""
        return frozenset(Feature) - {Feature.CORE_DUMP}

    def launch(self, config: VmmConfig) -> Launch:
        """Return what to start."""
        check_socket_path(Path(config.runtime_dir) / fake_spec.CONTROL_SOCKET)
        launch = fake_spec.fake_launch(config, self.behaviour)
        return msgspec.structs.replace(launch, keep_root=not _code_is_readable_by_all())

    async def observe(self, runtime_dir: Path) -> VmmObservation:
        """Ask the fake for its state."""
        reply = await self._do(runtime_dir, OBSERVE)
        return VmmObservation(
            state=reply.state,
            reason=reply.reason,
            evidence=f"fake: {reply.state}",
            version=fake_spec.VERSION,
            reboots=reply.reboots,
            resets=reply.reboots,
        )

    async def create(
        self, runtime_dir: Path, config: VmmConfig, nic_fds: Mapping[str, Sequence[int]]
    ) -> None:
        """Make the VM, or take up a snapshot; its NICs' descriptors came with the start."""
        del nic_fds
        reply = await self._do(runtime_dir, OBSERVE)
        if not config.restore_dir:
            await self._do(runtime_dir, OBSERVE if config.incoming else Request(command="create"))
        elif reply.state is VmmState.EMPTY:
            image = await self.saved_image(Path(config.restore_dir))
            await self._do(runtime_dir, Request(command="load", image=image))

    async def boot(self, runtime_dir: Path) -> None:
        """Run a created VM."""
        await self._do(runtime_dir, Request(command="boot"))

    async def power_button(self, runtime_dir: Path) -> None:
        """Press the power button once."""
        await self._do(runtime_dir, Request(command="power_button"))

    async def pause(self, runtime_dir: Path) -> None:
        """Stop the vCPUs."""
        await self._do(runtime_dir, Request(command="pause"))

    async def halt(self, runtime_dir: Path) -> None:
        """Stop the vCPUs, or cut them off."""
        await self._do(runtime_dir, Request(command="halt"))

    async def resume(self, runtime_dir: Path) -> None:
        """Run a paused or reset VM."""
        await self._do(runtime_dir, Request(command="resume"))

    async def reset(self, runtime_dir: Path) -> None:
        """Hard reset."""
        await self._do(runtime_dir, Request(command="reset"))

    async def quit(self, runtime_dir: Path) -> None:
        """End the fake; that it hangs up is the expected answer."""
        try:
            await self._do(runtime_dir, Request(command="quit"))
        except Lost:
            return

    async def await_disks(self, runtime_dir: Path, disk_ids: tuple[str, ...]) -> None:
        """Wait until the fake is connected to the disks."""
        with anyio.move_on_after(DISKS_S_MAX):
            while not await self._disks_up(runtime_dir, disk_ids):  # noqa: ASYNC110
                await anyio.sleep(DISKS_POLL_S)
            return
        raise DeadlineExceeded(f"{disk_ids} not connected within {DISKS_S_MAX:g} s")

    async def _disks_up(self, runtime_dir: Path, disk_ids: tuple[str, ...]) -> bool:
        known = (await self._do(runtime_dir, OBSERVE)).disks
        if unknown := set(disk_ids) - known.keys():
            raise NotFound(f"the fake has no {sorted(unknown)}", field="disk_ids")
        return all(known[disk_id] for disk_id in disk_ids)

    async def disks(self, runtime_dir: Path) -> tuple[PluggedDisk, ...]:
        """Return the disks that are plugged, but for files, which stay."""
        known = (await self._do(runtime_dir, OBSERVE)).disks
        return tuple(PluggedDisk(id=disk_id, connected=up) for disk_id, up in known.items())

    async def add_disk(self, runtime_dir: Path, disk: DiskConfig) -> None:
        """Plug a disk."""
        await self._do(runtime_dir, Request(command="add_disk", disk=disk))

    async def remove_disk(self, runtime_dir: Path, disk_id: str) -> None:
        """Unplug a disk and wait until the guest has let go of it."""
        await self._do(runtime_dir, Request(command="remove_disk", disk_id=disk_id))
        with anyio.move_on_after(REMOVE_S_MAX):
            while disk_id in (await self._do(runtime_dir, OBSERVE)).disks:  # noqa: ASYNC110
                await anyio.sleep(DISKS_POLL_S)
            return
        raise DeadlineExceeded(f"the guest clings to disk {disk_id}", field="disk_id")

    async def nics(self, runtime_dir: Path) -> tuple[str, ...]:
        """Return the NICs that are plugged."""
        return (await self._do(runtime_dir, OBSERVE)).nics

    async def add_nic(self, runtime_dir: Path, nic: NicConfig, fds: Sequence[int]) -> None:
        """Plug a NIC."""
        await self._do(runtime_dir, Request(command="add_nic", nic=nic), fds)

    async def drop_nic(self, runtime_dir: Path, nic_id: str) -> None:
        """Nothing is held of what is not plugged."""
        del nic_id
        await self._do(runtime_dir, OBSERVE)

    async def remove_nic(self, runtime_dir: Path, nic_id: str) -> None:
        """Unplug a NIC and wait until the guest has let go of it."""
        await self._do(runtime_dir, Request(command="remove_nic", nic_id=nic_id))
        with anyio.move_on_after(REMOVE_S_MAX):
            while nic_id in await self.nics(runtime_dir):  # noqa: ASYNC110
                await anyio.sleep(DISKS_POLL_S)
            return
        raise DeadlineExceeded(f"the guest clings to NIC {nic_id}", field="nic_id")

    # --- sizes, snapshots and moves
    async def sizes(self, runtime_dir: Path) -> Sizes:
        """Ask for both."""
        return (await self._do(runtime_dir, OBSERVE)).sizes

    async def set_cpus(self, runtime_dir: Path, cpus: int) -> None:
        """Change the number of CPUs and wait until the guest has let go of the others."""
        await self._do(runtime_dir, Request(command="set_cpus", amount=cpus))
        with anyio.move_on_after(REMOVE_S_MAX):
            while (await self.sizes(runtime_dir)).cpus != cpus:  # noqa: ASYNC110
                await anyio.sleep(DISKS_POLL_S)
            return
        raise DeadlineExceeded("the guest clings to its CPUs", field="cpus")

    async def set_memory(self, runtime_dir: Path, memory_bytes: int) -> None:
        """Give the VM more memory."""
        await self._do(runtime_dir, Request(command="set_memory", amount=memory_bytes))

    async def snapshot(self, runtime_dir: Path, directory: Path) -> None:
        """Save a paused VM."""
        image = await self._image(runtime_dir)
        if image.running:
            raise FailedPrecondition("snapshot: the VM is running, not paused")
        await self.save_image(directory, image)

    async def receive(
        self,
        runtime_dir: Path,
        config: VmmConfig,
        nic_fds: Mapping[str, Sequence[int]],
        socket: Path,
    ) -> None:
        """Wait for a VM."""
        del config, nic_fds
        async with self.take_image(socket) as image:
            await self._do(runtime_dir, Request(command="load", image=image))

    async def send(self, runtime_dir: Path, socket: Path) -> None:
        """Hand the VM over and end."""
        await self.offer_image(socket, await self._image(runtime_dir))
        await self.quit(runtime_dir)

    async def _image(self, runtime_dir: Path) -> Image:
        reply = await self._do(runtime_dir, Request(command="image"))
        assert reply.image is not None
        return reply.image

    async def counters(self, runtime_dir: Path) -> Counters:
        """Return counters that stand still: nothing is read or written."""
        reply = await self._do(runtime_dir, OBSERVE)
        return {device: {"read_ops": 0, "write_ops": 0} for device in (*reply.disks, *reply.nics)}

    async def nmi(self, runtime_dir: Path) -> None:
        """Inject an NMI."""
        await self._do(runtime_dir, Request(command="nmi"))

    @abstractmethod
    async def save_image(self, directory: Path, image: Image) -> None:
        """Keep a snapshot; FailedPrecondition where there is one."""

    @abstractmethod
    async def saved_image(self, directory: Path) -> Image:
        """Return a snapshot; InvalidArgument where there is none."""

    @abstractmethod
    def take_image(self, socket: Path) -> AbstractAsyncContextManager[Image]:
        """Wait for a VM; once the block is left without an error the sender is told."""

    @abstractmethod
    async def offer_image(self, socket: Path, image: Image) -> None:
        """Hand a VM over; FailedPrecondition where nobody takes it."""

    async def ping_guest(self, runtime_dir: Path) -> None:
        """Ask the guest agent whether it is there."""
        await self._do(runtime_dir, AGENT)

    async def freeze_guest(self, runtime_dir: Path) -> None:
        """Let the guest agent freeze."""
        await self._do(runtime_dir, Request(command="freeze"))

    async def thaw_guest(self, runtime_dir: Path) -> None:
        """Let the guest agent thaw."""
        await self._do(runtime_dir, Request(command="thaw"))

    async def guest_frozen(self, runtime_dir: Path) -> bool:
        """Ask the guest agent."""
        return (await self._do(runtime_dir, AGENT)).frozen

    def serial_socket(self, runtime_dir: Path) -> Path:
        """Return the socket of the serial console."""
        return runtime_dir / fake_spec.SERIAL_SOCKET

    async def close(self, runtime_dir: Path) -> None:
        """Nothing is cached."""
        del runtime_dir
        await anyio.lowlevel.checkpoint()

    # --- beyond the port, for tests
    async def guest(self, runtime_dir: Path, action: str) -> None:
        """Let the guest do something on its own, see `FakeVm.guest`."""
        await self._do(runtime_dir, Request(command="guest", action=action))

    async def plant(self, runtime_dir: Path, fault: Fault) -> None:
        """Let a later call go wrong."""
        await self._do(runtime_dir, Request(command="plant", fault=fault))

    async def resets(self, runtime_dir: Path) -> int:
        """Return how often the VM was reset."""
        return (await self._do(runtime_dir, OBSERVE)).resets

    async def _do(self, runtime_dir: Path, request: Request, fds: Sequence[int] = ()) -> Reply:
        reply = await self.call(runtime_dir, request, fds)
        if reply.error is not None:
            raise from_data(reply.error)
        return reply


class FakeDriver(FakeDriverBase):
    """Drives `python -m chv.vmm.fake` processes."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> FakeDriver:
        """Return a driver whose fakes behave as `CHV_FAKE` says."""
        return cls(fake_spec.parse_behaviour(environment.get(fake_spec.BEHAVIOUR_VARIABLE, "")))

    async def save_image(self, directory: Path, image: Image) -> None:
        """Write a snapshot to its directory."""
        await anyio.to_thread.run_sync(fake_files.write, directory, image)

    async def saved_image(self, directory: Path) -> Image:
        """Read a snapshot."""
        return await anyio.to_thread.run_sync(fake_files.read, directory)

    def take_image(self, socket: Path) -> AbstractAsyncContextManager[Image]:
        """Wait for a VM on a Unix socket."""
        return fake_files.take(socket)

    async def offer_image(self, socket: Path, image: Image) -> None:
        """Hand a VM over a Unix socket."""
        await fake_files.offer(socket, image)

    async def call(self, runtime_dir: Path, request: Request, fds: Sequence[int] = ()) -> Reply:
        """Send one request over a connection of its own."""
        path = runtime_dir / fake_spec.CONTROL_SOCKET
        sent = False
        try:
            with anyio.fail_after(CALL_S_MAX):
                async with await anyio.connect_unix(path) as stream:
                    line = msgspec.json.encode(request) + b"\n"
                    await (stream.send_fds(line, list(fds)) if fds else stream.send(line))
                    sent = True
                    return msgspec.json.decode(await _line(stream), type=Reply)
        except TimeoutError as error:
            kind = late_error(request) if sent else DeadlineExceeded
            message = f"{path}: no answer to {request.command} in {CALL_S_MAX:g} s"
            raise kind(message) from error
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError) as error:
            kind = lost_error(request) if sent else Unavailable
            raise kind(f"{path}: no connection for {request.command}") from error


@functools.cache
def _code_is_readable_by_all() -> bool:
    """Whether any uid may start the interpreter and read our code, wherever the checkout is."""
    places = (Path(sys.executable), Path(fake_spec.__file__), Path(msgspec.__file__))
    directories = {parent for place in places for parent in place.absolute().parents}
    return all(directory.stat().st_mode & stat.S_IXOTH for directory in directories)


def lost_error(request: Request) -> type[ChvError]:
    """Return what a lost answer means: nothing for a read, doubt for a change."""
    return Unavailable if request in READS else Lost


def late_error(request: Request) -> type[ChvError]:
    """Return what a late answer means."""
    return DeadlineExceeded if request in READS else OutcomeUnknown


async def _line(stream: UNIXSocketStream) -> bytes:
    buffer = b""
    while not buffer.endswith(b"\n"):
        buffer += await stream.receive()
        if len(buffer) > fake_spec.LINE_BYTES_MAX:
            raise anyio.BrokenResourceError
    return buffer
