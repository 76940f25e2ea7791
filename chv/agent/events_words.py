"""The words of events: what each kind of change is called, and what is a warning. Pure.

Each function compares something before and after and yields what is to be told of it; the same
twice yields nothing. A condition that is not shown counts as False.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from chv.agent.condition_table import OVERDUE
from chv.agent.generation_rows import changed_fields
from chv.agent.node_record import NODE_UID, NodeIntent, NodeRecord
from chv.agent.records import (
    FINAL_STATES,
    Ending,
    EndKind,
    Status,
    StoredObject,
    VmFacts,
    WorkerRow,
)
from chv.agent.vm.exits import describe
from chv.common.wire.agent import Operation, OperationState
from chv.common.wire.agent_events import Event, EventType
from chv.common.wire.resources import Condition, ConditionStatus

WARNING = EventType.WARNING
END_REASONS = {
    EndKind.STOP: "Stopped",
    EndKind.DRAIN: "StoppedForDrain",
    EndKind.RESTART: "StoppedForRestart",
    EndKind.RESTORE: "StoppedForRestore",
    EndKind.REBUILD: "StoppedForRebuild",
    EndKind.DELETE: "StoppedForDeletion",
    EndKind.GUEST_SHUTDOWN: "GuestShutdown",
    EndKind.CRASH: "Crashed",
    EndKind.PANIC: "GuestPanicked",
    EndKind.START_TIMEOUT: "StartTimedOut",
    EndKind.SPAWN_FAILED: "SpawnFailed",
    EndKind.STORAGE_LOST: "StorageLost",
    EndKind.RESTORE_FAILED: "RestoreFailed",
    EndKind.HOST_REBOOT: "HostRebooted",
}
ENDED_WELL = frozenset(
    {
        EndKind.STOP,
        EndKind.DRAIN,
        EndKind.RESTART,
        EndKind.RESTORE,
        EndKind.REBUILD,
        EndKind.DELETE,
        EndKind.GUEST_SHUTDOWN,
    }
)
BAD_PHASES = ("Failed", "Degraded", "Unknown")
OUTCOMES = {
    OperationState.SUCCEEDED: "OperationSucceeded",
    OperationState.FAILED: "OperationFailed",
    OperationState.CANCELLED: "OperationCancelled",
    OperationState.SUPERSEDED: "OperationSuperseded",
}
INTENTS = {
    NodeIntent.SERVE: "NodeResumed",
    NodeIntent.DRAIN: "DrainAsked",
    NodeIntent.MAINTAIN: "NodeHeld",
}


@dataclass(frozen=True, slots=True)
class Told:
    """One thing that is told, without of whom."""

    reason: str
    message: str = ""
    type: EventType = EventType.NORMAL
    data: dict[str, str] = field(default_factory=dict)


def of_object(stored: StoredObject) -> Event:
    """Return the head of an event of an object."""
    kind, namespace, name = stored.key
    return Event(kind=kind, namespace=namespace, name=name, uid=stored.uid)


def of_operation(operation: Operation) -> Event:
    """Return the head of an event of the object of an operation."""
    return Event(
        kind=operation.kind,
        namespace=operation.namespace,
        name=operation.name,
        uid=operation.uid,
        operation_id=operation.id,
    )


def of_node() -> Event:
    """Return the head of an event of the node."""
    return Event(kind="Node", name=NODE_UID, uid=NODE_UID)


def generation_events(before: StoredObject | None, now: StoredObject) -> Iterator[Told]:
    """An object comes, is changed, is to go."""
    new = now.resource.metadata
    if before is None:
        yield Told("Created", f"generation {new.generation}", data=_generation(now))
        return
    old = before.resource.metadata
    if old.generation != new.generation:
        names = ", ".join(changed_fields(before, now))
        words = f"generation {new.generation}" + (f": {names}" if names else "")
        yield Told("SpecChanged", words, data=_generation(now))
    elif old.labels != new.labels:
        yield Told("LabelsChanged", f"generation {new.generation}", data=_generation(now))
    if not before.deleting and now.deleting:
        yield Told("DeletionAsked")
    if before.deleting and not now.deleting:
        yield Told("DeletionTakenBack")


def _generation(stored: StoredObject) -> dict[str, str]:
    return {"generation": str(stored.resource.metadata.generation)}


def facts_events(before: StoredObject | None, now: StoredObject) -> Iterator[Told]:
    """What the node does with a VM by itself."""
    old = before.facts if before is not None else None
    new = now.facts
    if old is None or new is None:
        return
    if new.restarts > old.restarts:
        pause = f", after {new.backoff_s:g} s" if new.backoff_s > 0 else ""
        yield Told("Restarting", f"restart {new.restarts}{pause}", data=_restarts(new))
    if new.given_up and new.given_up != old.given_up:
        yield Told("GivenUp", new.given_up, WARNING, _restarts(new))
    if new.rebuilds > old.rebuilds:
        yield Told("Rebuilt", "it has another root disk")


def _restarts(facts: VmFacts) -> dict[str, str]:
    return {"restarts": str(facts.restarts)}


def phase_events(before: Status | None, now: Status | None) -> Iterator[Told]:
    """The phase; Pending where there is no status."""
    if now is None:
        return
    old = str(before.phase) if before is not None else "Pending"
    new = str(now.phase)
    if old != new:
        kind = WARNING if new in BAD_PHASES else EventType.NORMAL
        yield Told("Phase", f"{old} -> {new}", kind, {"from": old, "to": new})


def condition_events(before: Status | None, now: Status | None) -> Iterator[Told]:
    """Conditions whose status changed, and those that say in another way what is worth a word."""
    old = {each.type: each for each in before.conditions} if before is not None else {}
    new = {each.type: each for each in now.conditions} if now is not None else {}
    for kind in (*new, *(each for each in old if each not in new)):
        transition = _transition(kind, old.get(kind), new.get(kind))
        if transition is not None:
            yield transition


def _transition(kind: str, old: Condition | None, new: Condition | None) -> Told | None:
    was, is_ = _status(old), _status(new)
    reason, before = (new.reason if new else ""), (old.reason if old else "")
    late = reason.endswith(OVERDUE) and reason != before
    other = was is is_ is ConditionStatus.TRUE and reason != before
    if was is is_ and not late and not other:
        return None
    words = f"{kind} {was} -> {is_} ({reason})" if was is not is_ else f"{kind} {is_} ({reason})"
    if new is not None and new.message:
        words += f": {new.message}"
    data = {"type": kind, "from": str(was), "to": str(is_), "reason": reason}
    bad = late or (kind == "StorageLost" and is_ is ConditionStatus.TRUE)
    silent = was is ConditionStatus.TRUE and is_ is ConditionStatus.UNKNOWN
    short = kind == "SpaceAvailable" and (is_ is ConditionStatus.FALSE or reason == "Low")
    bad = bad or silent or short
    return Told("Condition", words, WARNING if bad else EventType.NORMAL, data)


def _status(condition: Condition | None) -> ConditionStatus:
    return condition.status if condition is not None else ConditionStatus.FALSE


def worker_events(
    before: WorkerRow | None, now: WorkerRow | None, ending: Ending | None
) -> Iterator[Told]:
    """A VMM comes, its guest runs, it has ended. `ending`: why, where it is gone."""
    if now is None:
        if before is not None:
            yield _ended(before, ending or before.ending)
        return
    known = before if before is not None and before.worker_id == now.worker_id else None
    if now.record is not None and (known is None or known.record is None):
        words = f"{now.driver}, pid {now.record.pid}"
        yield Told("VmmStarted", words, data={"pid": str(now.record.pid), "vmm": now.driver})
    if now.booted and (known is None or not known.booted):
        yield Told("Started", f"{now.driver} lets its vCPUs run")
    if known is not None and now.storage_resets > known.storage_resets:
        yield Told("ResetForStorage", "its storage daemon was lost and is back", WARNING)


def _ended(row: WorkerRow, ending: Ending | None) -> Told:
    if ending is None:
        return Told("VmmForgotten", f"{row.driver} of it is gone")
    data = {"kind": ending.kind.value, "rung": ending.rung or ending.tried, "why": ending.reason}
    kind = EventType.NORMAL if ending.kind in ENDED_WELL else WARNING
    return Told(END_REASONS[ending.kind], describe(ending, "").strip(), kind, data)


def operation_events(before: Operation | None, now: Operation) -> Iterator[Told]:
    """An operation begins and ends."""
    data = {"verb": now.verb, "requester": now.requester}
    if before is None:
        why = f": {now.reason}" if now.reason else ""
        yield Told("OperationBegun", f"{now.verb} by {now.requester}{why}", data=data)
    ended = before is not None and before.state in FINAL_STATES
    if now.state in FINAL_STATES and not ended:
        said = f": {now.message}" if now.message else ""
        if now.error is not None:
            data |= {"code": str(now.error.code)}
        kind = WARNING if now.state is OperationState.FAILED else EventType.NORMAL
        yield Told(OUTCOMES[now.state], f"{now.verb}{said}", kind, data)


def node_events(before: NodeRecord, now: NodeRecord) -> Iterator[Told]:
    """What an operator wants of the node."""
    if before.intent is not now.intent:
        data = {"from": before.intent.value, "to": now.intent.value}
        yield Told(INTENTS[now.intent], now.who or before.who, data=data)
    if before.paused is None and now.paused is not None:
        yield Told("SchedulingPaused", now.paused.words)
    if before.paused is not None and now.paused is None:
        yield Told("SchedulingResumed", before.paused.words)
