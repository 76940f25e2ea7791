"""Both stores keep assignments and waiting reports alike; what a transaction leads to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chv.agent.generations import Author
from chv.agent.records import (
    AgentStore,
    Change,
    PutObject,
    PutOperation,
    PutStatus,
    RemoveObject,
    StoredObject,
)
from chv.agent.store_sqlite import open_store
from chv.agent.tables import Tables
from chv.agent.upstream import outbox
from chv.agent.upstream.outbox import spec_of, with_reports
from chv.agent.upstream.records import Assignment, DropReports, PutAssignment, PutReport, key_of
from chv.common.errors import NotFound, StaleGeneration
from chv.common.wire.agent import OperationState
from chv.common.wire.resources import RunStrategy, VirtualMachineStatus, VmPhase
from chv.common.wire.upstream import Report, ReportKind
from tests.unit.agent.test_agent_store import UIDS, opened, operation, refused, stored, tombstone

RUNNING = VirtualMachineStatus(phase=VmPhase.RUNNING, observed_generation=1)


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AgentStore]:
    async with opened(request.param, tmp_path) as store:
        yield store


def assigned(number: int = 0, generation: int = 5, **more: Any) -> Assignment:
    return Assignment(
        uid=UIDS[number], generation=generation, taken_as=1, spec=spec_of(stored()), **more
    )


def status(seq: int, number: int = 0, generation: int = 5) -> Report:
    return Report(kind=ReportKind.STATUS, seq=seq, uid=UIDS[number], generation=generation)


def done(id: str, requester: str = "ann", number: int = 0) -> Any:
    found = operation(number, id, state=OperationState.SUCCEEDED)
    return msgspec.structs.replace(found, requester=requester)


async def test_reports_wait_one_of_each_key_and_their_numbers_never_come_again(
    store: AgentStore,
) -> None:
    await store.commit((PutReport(report=status(1)), PutReport(report=status(2, 1))))
    await store.commit((PutReport(report=status(3)),))
    snapshot = await store.load()
    assert [(r.seq, r.uid) for r in snapshot.outbox] == [(2, UIDS[1]), (3, UIDS[0])]
    await store.commit((DropReports(seqs=(1, 2, 3)),))
    snapshot = await store.load()
    assert (snapshot.outbox, snapshot.outbox_seq) == ((), 3)


async def test_reports_and_their_numbers_outlive_the_process(tmp_path: Path) -> None:
    async with open_store(tmp_path / "agent.db") as store:
        await store.commit((PutObject(object=stored()), PutAssignment(assignment=assigned())))
        await store.commit((PutReport(report=status(7)), PutReport(report=status(8, 1))))
        await store.commit((DropReports(seqs=(8,)),))
    async with open_store(tmp_path / "agent.db") as store:
        snapshot = await store.load()
    assert snapshot.outbox == (status(7),)
    assert snapshot.outbox_seq == 8
    assert snapshot.assignments == (assigned(),)


async def test_assignment_never_goes_back_and_ends_with_its_object(store: AgentStore) -> None:
    await refused(store, NotFound, PutAssignment(assignment=assigned()))
    await store.commit((PutObject(object=stored()), PutAssignment(assignment=assigned())))
    await refused(
        store,
        StaleGeneration,
        PutReport(report=status(1)),
        PutAssignment(assignment=assigned(generation=4)),
    )
    await store.commit((PutAssignment(assignment=assigned(override="stop by ann")),))
    assert (await store.load()).assignments == (assigned(override="stop by ann"),)
    await store.commit((RemoveObject(tombstone=tombstone()),))
    assert (await store.load()).assignments == ()


# --- what a transaction leads to


def tables(*changes: Change) -> Tables:
    made = Tables()
    made.apply((PutObject(object=stored()), PutAssignment(assignment=assigned()), *changes))
    return made


def step(on: Tables, *changes: Change) -> list[Report]:
    """Do a transaction with what follows from it; return what waits then."""
    on.apply(with_reports(on, changes, "then"))
    return sorted(on.outbox.values(), key=lambda report: report.seq)


def test_only_what_is_assigned_is_reported() -> None:
    on = tables()
    own = stored(1, "own", slot=1)
    assert step(on, PutObject(object=own), PutStatus(uid=own.uid, status=RUNNING)) == []
    assert step(on, PutOperation(operation=done("op-1", number=1))) == []


def test_newest_status_waits_and_each_outcome_once() -> None:
    on = tables()
    step(on, PutStatus(uid=UIDS[0], status=RUNNING))
    step(on, PutOperation(operation=done("op-1")))
    later = VirtualMachineStatus(phase=VmPhase.STOPPED, observed_generation=1)
    waiting = step(on, PutOperation(operation=done("op-2")), PutStatus(uid=UIDS[0], status=later))
    assert [key_of(each).split()[0] for each in waiting] == ["operation", "status", "operation"]
    assert b"Stopped" in bytes(waiting[1].status)


def test_operation_that_goes_on_is_no_outcome() -> None:
    assert step(tables(), PutOperation(operation=operation(0, "op-1"))) == []


def test_departure_is_told_last_and_no_status_waits_any_more() -> None:
    on = tables()
    step(on, PutStatus(uid=UIDS[0], status=RUNNING))
    ended = PutOperation(operation=done("op-1"))
    waiting = step(on, RemoveObject(tombstone=tombstone()), ended)
    assert [each.kind for each in waiting] == [ReportKind.OPERATION, ReportKind.GONE]


def test_observed_generation_is_the_planes_once_the_object_was_seen_so() -> None:
    on = tables(PutStatus(uid=UIDS[0], status=RUNNING))
    newer = assigned(generation=9)
    newer = msgspec.structs.replace(newer, taken_as=2, observed=5)
    (report,) = step(on, PutAssignment(assignment=newer))
    assert report.generation == 5
    seen = VirtualMachineStatus(phase=VmPhase.RUNNING, observed_generation=2)
    (report,) = step(on, PutStatus(uid=UIDS[0], status=seen))
    assert report.generation == 9


def halted(author: Author | None = None) -> PutObject:
    object = stored(generation=2)
    spec = msgspec.structs.replace(object.resource.spec, run_strategy=RunStrategy.HALTED)
    resource = msgspec.structs.replace(object.resource, spec=spec)
    return PutObject(
        object=shown(msgspec.structs.replace(object, resource=resource)), author=author
    )


def shown(object: StoredObject) -> StoredObject:
    """The object with its status, as the agent puts it."""
    resource = msgspec.structs.replace(object.resource, status=RUNNING)
    return msgspec.structs.replace(object, resource=resource)


def test_who_changes_an_object_on_the_spot_is_told_until_it_is_as_wanted_again() -> None:
    on = tables(PutStatus(uid=UIDS[0], status=RUNNING))
    stop = msgspec.structs.replace(operation(0, "op-1"), verb="stop", reason="smoke")
    (report,) = step(on, halted(), PutOperation(operation=stop))
    assert report.override == "stop by test: smoke"
    back = shown(stored(generation=3))
    (report,) = step(on, PutObject(object=back))
    assert (report.override, on.assignments[UIDS[0]].override) == ("", "")


def test_consequence_of_the_run_strategy_names_the_node() -> None:
    on = tables()
    author = Author(requester="system", reason="the guest powered off", verb="halt")
    step(on, halted(author))
    assert on.assignments[UIDS[0]].override == "halt by system: the guest powered off"


@given(st.lists(st.sampled_from(["status", "user", "system", "gone"]), max_size=40))
def test_full_outbox_drops_statuses_first_and_counts_each_outcome_that_goes(
    kinds: list[str],
) -> None:
    on = tables()
    sent = 0
    with patch.object(outbox, "OUTBOX_MAX", 6):
        for number, kind in enumerate(kinds):
            if kind == "status":
                phase = VmPhase.RUNNING if number % 2 else VmPhase.STOPPED
                seen = VirtualMachineStatus(phase=phase, observed_generation=1)
                step(on, PutStatus(uid=UIDS[0], status=seen))
            elif kind == "gone":
                report = Report(kind=ReportKind.GONE, uid=f"gone-{number % 3}")
                step(on, PutReport(report=report))
            else:
                requester = "system" if kind == "system" else "ann"
                sent += 1
                step(on, PutOperation(operation=done(f"op-{number}", requester)))
        waiting = list(on.outbox.values())
    outcomes = [each for each in waiting if each.kind is ReportKind.OPERATION]
    lost = [each.count for each in waiting if each.kind is ReportKind.LOST]
    assert len(outcomes) + sum(lost) == sent
    assert len(waiting) <= 6 + len(lost)
    if sum(lost):
        statuses = [each.seq for each in waiting if each.kind is ReportKind.STATUS]
        assert all(seq > min(each.seq for each in outcomes) for seq in statuses)


def test_full_outbox_drops_the_nodes_own_outcomes_before_those_of_people() -> None:
    on = tables(PutStatus(uid=UIDS[0], status=RUNNING))
    with patch.object(outbox, "OUTBOX_MAX", 2):
        step(on, PutOperation(operation=done("op-1")))
        step(on, PutOperation(operation=done("op-2", "system")))
        waiting = step(on, PutOperation(operation=done("op-3")))
        assert [r.operation.id for r in waiting if r.operation] == ["op-1", "op-3"]
        waiting = step(on, PutOperation(operation=done("op-4")))
    assert [r.operation.id for r in waiting if r.operation] == ["op-3", "op-4"]
    (lost,) = [each for each in waiting if each.kind is ReportKind.LOST]
    assert (lost.count, lost.since) == (2, "then")
