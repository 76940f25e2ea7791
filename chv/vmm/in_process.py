"""Fake VMMs without processes, for simulation and for thousands of VMs in one test.

`InProcessVmms` is the driver and the world at once: `start` takes the place of the process
provider's spawn, `kill` of a signal. No threads, no files, no real time: it waits by anyio alone,
so a virtual clock drives it. Whoever simulates a crash of the agent keeps this object and makes
a new agent: VMMs outlive it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel

from chv.common.errors import (
    ERRORS_BY_CODE,
    ChvError,
    Conflict,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from chv.vmm import fake_spec
from chv.vmm.fake_driver import CALL_S_MAX, FakeDriverBase, late_error, lost_error
from chv.vmm.fake_spec import FakeArguments, Reply, Request
from chv.vmm.fake_state import Behaviour, Fault, Image

PID_FIRST = 1_000_000_001  # beyond the kernel's largest pid: never a real process


class InProcessVmm:
    """A VMM that lives until it quits or is killed."""

    def __init__(self, pid: int, arguments: FakeArguments, behaviour: Behaviour) -> None:
        self.pid = pid
        self.worker_id = arguments.worker_id
        self.runtime_dir = Path(arguments.runtime_dir)
        self.vm = fake_spec.make_vm(arguments, behaviour, anyio.current_time)
        self.gone = anyio.Event()
        self._thawed: anyio.Event | None = None

    def freeze(self) -> None:
        """Answer nothing from now on, as after SIGSTOP."""
        self._thawed = self._thawed or anyio.Event()

    def thaw(self) -> None:
        """Answer again."""
        if self._thawed is not None:
            self._thawed.set()
            self._thawed = None

    async def awake(self) -> None:
        """Return once it is not frozen."""
        while self._thawed is not None:
            await self._thawed.wait()


class Meeting:
    """A receiver that waits, and what it was given."""

    def __init__(self) -> None:
        self.image: Image | None = None
        self.offered = anyio.Event()
        self.over = anyio.Event()
        self.taken = False


class InProcessVmms(FakeDriverBase):
    """All VMMs of a simulated node, and their driver."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        super().__init__(behaviour)
        self._vmms: dict[str, InProcessVmm] = {}
        self._saved: dict[Path, Image] = {}
        self._meetings: dict[Path, Meeting] = {}
        self._next_pid = PID_FIRST

    # --- in place of the process provider
    def start(self, argv: Sequence[str], environment: dict[str, str] | None = None) -> int:
        """Start what `launch` returned; return a pid that no process has."""
        arguments = fake_spec.parse_argv(argv)
        if arguments.worker_id in self._vmms:
            raise Conflict(f"{arguments.worker_id} runs already", resource=arguments.worker_id)
        text = (environment or {}).get(fake_spec.BEHAVIOUR_VARIABLE, "")
        behaviour = fake_spec.parse_behaviour(text) if text else self.behaviour
        pid = self._next_pid
        self._next_pid += 1
        self._vmms[arguments.worker_id] = InProcessVmm(pid, arguments, behaviour)
        return pid

    def running(self) -> dict[str, InProcessVmm]:
        """Return every VMM that lives, by worker id: what a scan of /proc would find."""
        return dict(self._vmms)

    def kill(self, worker_id: str) -> bool:
        """End a VMM at once; False when it was gone."""
        vmm = self._vmms.pop(worker_id, None)
        if vmm is None:
            return False
        vmm.gone.set()
        return True

    async def wait_gone(self, worker_id: str) -> None:
        """Return when the VMM has ended; at once when it is gone already."""
        vmm = self._vmms.get(worker_id)
        if vmm is not None:
            await vmm.gone.wait()

    def at(self, runtime_dir: Path) -> InProcessVmm:
        """Return the VMM that serves this directory; NotFound where none does."""
        for vmm in reversed(self._vmms.values()):
            if vmm.runtime_dir == runtime_dir:
                return vmm
        raise NotFound(f"no VMM serves {runtime_dir}")

    # --- the driver
    async def save_image(self, directory: Path, image: Image) -> None:
        """Keep a snapshot for whoever asks for that directory."""
        await anyio.lowlevel.checkpoint()
        if directory in self._saved:
            raise FailedPrecondition(f"{directory} is not empty", field="directory")
        self._saved[directory] = image

    async def saved_image(self, directory: Path) -> Image:
        """Return a snapshot."""
        await anyio.lowlevel.checkpoint()
        if directory not in self._saved:
            raise InvalidArgument(f"no snapshot in {directory}", field="restore_dir")
        return self._saved[directory]

    @asynccontextmanager
    async def take_image(self, socket: Path) -> AsyncIterator[Image]:
        """Wait for a VM; once the block is left without an error the sender is told."""
        meeting = self._meetings[socket] = Meeting()
        try:
            await meeting.offered.wait()
            assert meeting.image is not None
            yield meeting.image
            meeting.taken = True
        finally:
            del self._meetings[socket]
            meeting.over.set()

    async def offer_image(self, socket: Path, image: Image) -> None:
        """Hand a VM over to whoever waits."""
        await anyio.lowlevel.checkpoint()
        meeting = self._meetings.get(socket)
        if meeting is None:
            raise FailedPrecondition(f"nobody takes the VM on {socket}: it goes on here")
        meeting.image = image
        meeting.offered.set()
        await meeting.over.wait()
        if not meeting.taken:
            raise FailedPrecondition("the other side did not take the VM: it goes on here")

    async def call(self, runtime_dir: Path, request: Request, fds: Sequence[int] = ()) -> Reply:
        """Answer as a process would, with its faults; descriptors are nobody's here."""
        del fds
        await anyio.lowlevel.checkpoint()
        try:
            vmm = self.at(runtime_dir)
        except NotFound as error:
            raise Unavailable(error.message) from error
        with anyio.move_on_after(CALL_S_MAX):
            await self._until_dead_or_awake(vmm)
            if vmm.gone.is_set():
                raise lost_error(request)(f"{runtime_dir}: the VMM ended")
            return await self._answer(vmm, request)
        raise late_error(request)(f"{runtime_dir}: no answer to {request.command}")

    async def _until_dead_or_awake(self, vmm: InProcessVmm) -> None:
        async with anyio.create_task_group() as either:

            async def dead() -> None:
                await vmm.gone.wait()
                either.cancel_scope.cancel()

            either.start_soon(dead)
            await vmm.awake()
            either.cancel_scope.cancel()

    async def _answer(self, vmm: InProcessVmm, request: Request) -> Reply:
        fault = vmm.vm.take_fault(request.command)
        if fault is not None:
            await self._suffer(vmm, request, fault)
        try:
            reply = self._apply(vmm, request)
        except ChvError as error:
            return Reply(state=vmm.vm.state, error=error.data())
        if fault is not None and fault.kind == "apply_drop":
            raise lost_error(request)(f"{vmm.runtime_dir}: hung up after {request.command}")
        return reply

    async def _suffer(self, vmm: InProcessVmm, request: Request, fault: Fault) -> None:
        match fault.kind:
            case "error":
                raise ERRORS_BY_CODE.get(fault.code, Internal)("a planted fault")
            case "hang":
                await anyio.sleep_forever()
            case "delay":
                await anyio.sleep(fault.seconds)
            case "exit":
                self.kill(vmm.worker_id)
            case _:
                pass
        if fault.kind in ("drop", "exit"):
            raise lost_error(request)(f"{vmm.runtime_dir}: hung up on {request.command}")

    def _apply(self, vmm: InProcessVmm, request: Request) -> Reply:
        vm = vmm.vm
        if request.command == "quit":
            self.kill(vmm.worker_id)
            return fake_spec.reply_of(vm)
        if request.disk is not None:
            vm.disks.setdefault(request.disk.id, True)
        if request.nic is not None:
            vm.nics.add(request.nic.id)
        reply = fake_spec.answer(vm, request)
        vm.output.clear()  # nobody reads this console
        return reply
