"""Moves: another class, pool, place or format in the spec, made true while a VM may run on.

stord's job does it, under the id of the operation that wanted it. What was begun is recorded
first; a pass compares where the volume is with where it is wanted. A move that has failed is not
tried again before the spec changes: it may have copied for hours.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from chv.agent.actors import Again, Outcome, Waiting
from chv.agent.context import Context
from chv.agent.generations import Author
from chv.agent.operations import SYSTEM
from chv.agent.records import Change, PutFacts, PutObject, StoredObject, VolumeFacts, VolumeMove
from chv.agent.vm.holding import standing
from chv.agent.volume.jobs import POLL_S, cancel_job, find_job
from chv.agent.volume.wish import (
    moved_back,
    place_text,
    same_place,
    with_the_source_of,
)
from chv.common.errors import Conflict, ErrorData
from chv.common.failpoint import failpoint
from chv.common.wire import stord
from chv.common.wire.agent import OperationState
from chv.common.wire.resources import VirtualMachine, VmPhase, Volume
from chv.common.wire.stord import JobInfo, JobKind, JobState

BEGIN_S_MAX = 15.0  # less than the call and the moment may take
_replace = msgspec.structs.replace


class Step(Protocol):
    """How a reconciler journals an effect and does it."""

    async def __call__(
        self, operation_id: str, name: str, act: Callable[[str], Awaitable[None]], /
    ) -> None: ...


class Mover:
    """The moves of one volume."""

    def __init__(self, context: Context, uid: str, step: Step) -> None:
        self._context = context
        self._uid = uid
        self._step = step
        self._blocked = ""  # by what somebody has to take away first

    def problem(self, stored: StoredObject) -> str:
        """Return why the volume is not where it is wanted."""
        move = _move(stored)
        why = self._blocked or (move.failed if move is not None else "")
        return f"not moved: {why}" if why else ""

    async def tend(
        self, stored: StoredObject, seen: stord.VolumeInfo, wanted: stord.VolumeBackend
    ) -> Outcome | None:
        """Make one pass; None: it is where it is wanted, or has failed to get there."""
        if seen.backend is None:  # a stord that does not say where it is cannot be asked to move it
            return None
        self._blocked = ""
        job = await find_job(self._context, seen.job) if seen.job else None
        moving = job is not None and job.kind is JobKind.MOVE
        move = _move(stored)
        if move is not None and move.cancelling:
            return await self._take_back(stored, move, seen, job if moving else None)
        if same_place(wanted, seen.backend):
            return await self._stay(move, job if moving else None)
        if moving and job is not None:
            return await self._go_on(move, job, wanted, seen.attached_to)
        if job is not None:
            return Waiting(POLL_S)  # something else is under way
        if seen.snapshots:
            self._blocked = f"it has {len(seen.snapshots)} snapshots"
            return None
        return await self._begin_or_give_up(stored, seen, wanted)

    async def _stay(self, move: VolumeMove | None, job: JobInfo | None) -> Outcome | None:
        if job is not None:  # back before it had arrived
            await cancel_job(self._context, job.job_id)
            return Waiting(POLL_S)
        if move is not None:
            await self._record(None)
            return Again()
        return None

    async def _go_on(
        self, move: VolumeMove | None, job: JobInfo, wanted: stord.VolumeBackend, vm_uid: str
    ) -> Outcome:
        ours = move is not None and move.job_id == job.job_id and move.target == place_text(wanted)
        if not ours:  # to where nobody wants it any more
            await cancel_job(self._context, job.job_id)
        else:
            await self.let_begin(job, vm_uid)
        return Waiting(POLL_S)

    async def let_begin(self, job: JobInfo, vm_uid: str) -> None:
        """Let a mirror begin that waits for a guest that stands."""
        if job.waits:
            async with standing(self._context, vm_uid):
                await failpoint("agent.volume.move.standing")
                until_s = self._context.world.clock.monotonic() + BEGIN_S_MAX
                request = stord.BeginMirror(job_id=job.job_id, until_s=until_s)
                await self._context.stord.call(stord.BEGIN_MIRROR, request)

    async def _begin_or_give_up(
        self, stored: StoredObject, seen: stord.VolumeInfo, wanted: stord.VolumeBackend
    ) -> Outcome | None:
        move, generation = _move(stored), stored.resource.metadata.generation
        current = move is not None and move.target == place_text(wanted)
        if move is not None and current and move.generation == generation and move.failed:
            return None
        if move is not None and current and not move.failed:
            ended = await find_job(self._context, move.job_id)
            if ended is not None and ended.state in (JobState.FAILED, JobState.CANCELLED):
                await self._fail(move, generation, ended)
                return Again()
        await self._begin(stored, seen, wanted)
        return Again()

    async def _begin(
        self, stored: StoredObject, seen: stord.VolumeInfo, wanted: stord.VolumeBackend
    ) -> None:
        operation = await self._context.operations.require(stored)
        generation = stored.resource.metadata.generation
        now = self._context.stored(self._uid)
        if now is None or now.resource.metadata.generation != generation:
            raise Conflict("the volume was changed meanwhile", resource=stored.title)
        assert seen.backend is not None
        target = with_the_source_of(wanted, seen.backend)
        move = VolumeMove(job_id=operation.id, generation=generation, target=place_text(wanted))

        async def act(operation_id: str) -> None:
            await failpoint("agent.volume.move.before")
            request = stord.MoveVolume(
                meta=self._context.meta(operation_id, generation),
                volume_id=self._uid,
                backend=target,
                replace_backend=self._is_running(seen.attached_to),
                waits=True,  # where a VM has it by then, which what was seen cannot say
            )
            await self._context.stord.call(stord.MOVE_VOLUME, request)
            await failpoint("agent.volume.move.after")

        await self._record(move)
        await self._step(operation.id, "move", act)

    def _is_running(self, vm_uid: str) -> bool:
        """Tell whether the VM's vCPUs run: one that stands may not come back to its disks."""
        stored = self._context.stored(vm_uid) if vm_uid else None
        vm = stored.resource if stored is not None else None
        return (
            isinstance(vm, VirtualMachine)
            and vm.status is not None
            and vm.status.phase is VmPhase.RUNNING
        )

    async def _fail(self, move: VolumeMove, generation: int, job: JobInfo) -> None:
        error = job.error or ErrorData(code="CANCELLED", message=f"the move was {job.state.value}")
        await self._record(_replace(move, generation=generation, failed=error.message))
        cancelled = job.state is JobState.CANCELLED
        state = OperationState.CANCELLED if cancelled else OperationState.FAILED
        current = self._context.operations.current_id(self._uid)
        await self._context.operations.end(current, state, error.message, error)

    async def _take_back(
        self,
        stored: StoredObject,
        move: VolumeMove,
        seen: stord.VolumeInfo,
        job: JobInfo | None,
    ) -> Outcome:
        """Somebody cancelled it: end the job, then let the spec say where the volume is."""
        if job is not None:
            await cancel_job(self._context, job.job_id)
            return Waiting(POLL_S)
        context = self._context
        async with context.ledger.writing() as tables:
            now = tables.objects[self._uid]
            assert isinstance(now.resource, Volume) and seen.backend is not None
            changes: list[Change] = [self._change(None)]
            if now.resource.metadata.generation == stored.resource.metadata.generation:
                operation = context.operations.current(self._uid)
                said = operation.message if operation is not None else ""
                author = Author(requester=SYSTEM, reason=said or "cancelled", verb="cancel")
                changes.insert(0, PutObject(object=self._back(now, seen.backend), author=author))
                if operation is not None:
                    changes += context.operations.ending(
                        operation, OperationState.CANCELLED, "the volume stays where it is"
                    )
            await context.ledger.commit_held(*changes)
        return Again()

    def _back(self, stored: StoredObject, there: stord.VolumeBackend) -> StoredObject:
        volume = stored.resource
        assert isinstance(volume, Volume)
        metadata = _replace(
            volume.metadata,
            generation=volume.metadata.generation + 1,
            resource_version=str(self._context.ledger.next_revision()),
        )
        spec = moved_back(volume.spec, there)
        return _replace(stored, resource=_replace(volume, metadata=metadata, spec=spec))

    async def _record(self, move: VolumeMove | None) -> None:
        async with self._context.ledger.writing():
            await self._context.ledger.commit_held(self._change(move))

    def _change(self, move: VolumeMove | None) -> PutFacts:
        stored = self._context.stored(self._uid)
        facts = (stored.volume_facts if stored is not None else None) or VolumeFacts()
        return PutFacts(uid=self._uid, facts=_replace(facts, move=move))


def _move(stored: StoredObject) -> VolumeMove | None:
    return stored.volume_facts.move if stored.volume_facts is not None else None
