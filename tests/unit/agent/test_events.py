"""The log of events: what a transaction tells, its numbers, and who listens to it."""

from __future__ import annotations

import json
import socket
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chv.agent import events_api
from chv.agent.events_derive import derived, with_events
from chv.agent.events_news import News, leak_news
from chv.agent.events_record import EVENTS_MAX, PAGE, PutEvents, PutSighting, Sighting
from chv.agent.events_words import END_REASONS, INTENTS, OUTCOMES
from chv.agent.leaks import LeakBook, Look
from chv.agent.ledger import Ledger
from chv.agent.node_record import Hold, NodeIntent, NodeRecord, PutNode
from chv.agent.records import (
    FINAL_STATES,
    AgentStore,
    Ending,
    EndKind,
    PutFacts,
    PutObject,
    PutOperation,
    PutStatus,
    PutWorker,
    RemoveObject,
    RemoveWorker,
    VmFacts,
)
from chv.agent.store_memory import MemoryStore
from chv.agent.store_sqlite import open_store
from chv.agent.tables import Tables
from chv.common.errors import Conflict, FailedPrecondition, ResourceExhausted
from chv.common.rpc import Server, connect
from chv.common.rpc.framing import FRAME_BYTES_MAX
from chv.common.wire.agent import OperationState
from chv.common.wire.agent_events import EVENT_METHODS, WATCH_EVENTS, Event, EventChunk, WatchEvents
from chv.common.wire.resources import Condition, ConditionStatus, VirtualMachineStatus, VmPhase
from chv.common.wire.types import CensusItem
from tests.helpers import wait_until
from tests.sim.events import told_wrongly
from tests.unit.agent.test_agent_store import UIDS, operation, stored, tombstone, worker

ALL = WatchEvents()
STATUSES = st.dictionaries(
    st.sampled_from(["VMMRunning", "SSHReady", "StorageLost"]),
    st.tuples(st.sampled_from(list(ConditionStatus)), st.sampled_from(["A", "B", "AOverdue"])),
)


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AgentStore]:
    if request.param == "memory":
        yield MemoryStore()
    else:
        async with open_store(tmp_path / "agent.db") as opened:
            yield opened


def numbered(first: int, count: int, **more: Any) -> PutEvents:
    given = {"reason": "Created", "kind": "VirtualMachine", "name": "web", **more}
    return PutEvents(events=tuple(Event(seq=first + n, at="t", **given) for n in range(count)))


def shown(conditions: dict[str, tuple[ConditionStatus, str]]) -> VirtualMachineStatus:
    return VirtualMachineStatus(
        phase=VmPhase.RUNNING,
        conditions=[Condition(type=k, status=s, reason=r) for k, (s, r) in conditions.items()],
    )


def told(tables: Tables, *changes: Any) -> list[tuple[str, str]]:
    """Return what a transaction tells, reason and message, and apply it."""
    events = [(event.reason, event.message) for event in derived(tables, changes)]
    tables.apply(changes)
    return events


# --- what a transaction tells


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(STATUSES, min_size=1, max_size=3), max_size=6))
def test_every_transition_of_a_condition_is_told_and_nothing_else(
    transactions: list[list[dict[str, tuple[ConditionStatus, str]]]],
) -> None:
    tables = Tables()
    tables.apply((PutObject(object=stored()),))
    for transaction in transactions:
        plain = tuple(PutStatus(uid=UIDS[0], status=shown(each)) for each in transaction)
        changes = with_events(tables, plain, "now")
        assert told_wrongly(tables, changes) == []
        last = tables.event_seq
        tables.apply(changes)
        seqs = [e.seq for c in changes if isinstance(c, PutEvents) for e in c.events]
        assert seqs == list(range(last + 1, tables.event_seq + 1))
        assert with_events(tables, plain[-1:], "now") == plain[-1:]  # as it was: nothing to tell


def test_the_checker_of_the_simulation_notices_what_is_not_told_and_what_is_made_up() -> None:
    tables = Tables()
    tables.apply((PutObject(object=stored()),))
    status = PutStatus(uid=UIDS[0], status=shown({"SSHReady": (ConditionStatus.TRUE, "A")}))
    honest = with_events(tables, (status,), "now")
    assert told_wrongly(tables, honest) == []
    assert told_wrongly(tables, (status,))
    assert told_wrongly(tables, honest[1:])
    ended = PutOperation(operation=operation(state=OperationState.SUCCEEDED))
    assert told_wrongly(tables, (ended,))


@pytest.mark.parametrize(
    ("kind", "before", "after", "type_"),
    [
        ("SpaceAvailable", ("TRUE", "Enough"), ("TRUE", "Low"), "Warning"),
        ("SpaceAvailable", ("TRUE", "Low"), ("FALSE", "Critical"), "Warning"),
        ("SpaceAvailable", ("FALSE", "Critical"), ("TRUE", "Enough"), "Normal"),
        ("StorageLost", ("FALSE", "NeverLost"), ("TRUE", "BackendLost"), "Warning"),
        ("VolumesReady", ("TRUE", "Attached"), ("UNKNOWN", "StorageUnavailable"), "Warning"),
        ("GuestBooted", ("FALSE", "NotRunning"), ("UNKNOWN", "NotProbedYet"), "Normal"),
        ("VMMRunning", ("FALSE", "Starting"), ("FALSE", "StartingOverdue"), "Warning"),
        ("VMMRunning", ("TRUE", "Running"), ("FALSE", "Stopped"), "Normal"),
    ],
)
def test_what_nobody_has_asked_for_is_a_warning(
    kind: str, before: tuple[str, str], after: tuple[str, str], type_: str
) -> None:
    statuses = [shown({kind: (ConditionStatus[s], r)}) for s, r in (before, after)]
    tables = Tables()
    tables.apply((PutObject(object=stored()), PutStatus(uid=UIDS[0], status=statuses[0])))
    (event,) = derived(tables, (PutStatus(uid=UIDS[0], status=statuses[1]),))
    assert (event.reason, event.type) == ("Condition", type_)
    assert event.data["reason"] == after[1]


def test_an_object_comes_is_changed_and_goes() -> None:
    tables = Tables()
    assert told(tables, PutObject(object=stored())) == [("Created", "generation 1")]
    vm = stored(generation=2).resource
    spec = msgspec.structs.replace(vm.spec, memory="1Gi")
    newer = msgspec.structs.replace(stored(), resource=msgspec.structs.replace(vm, spec=spec))
    assert told(tables, PutObject(object=newer)) == [("SpecChanged", "generation 2: memory")]
    assert told(tables, PutObject(object=newer)) == []
    assert told(tables, RemoveObject(tombstone=tombstone())) == [
        ("Deleted", "nothing of it is left")
    ]


def test_a_vmm_comes_and_ends_with_the_rung_and_the_reason() -> None:
    tables = Tables()
    tables.apply((PutObject(object=stored()),))
    assert told(tables, PutWorker(row=worker())) == []  # an intent is no VMM
    assert told(tables, PutWorker(row=worker(booted=True))) == [
        ("Started", "fake lets its vCPUs run")
    ]
    ending = Ending(kind=EndKind.STOP, reason="by ann", rung="acpi")
    (event,) = derived(tables, (RemoveWorker(vm_uid=UIDS[0], ending=ending),))
    assert (event.reason, event.message) == ("Stopped", "stopped by acpi (by ann)")
    assert event.data == {"kind": "stop", "rung": "acpi", "why": "by ann"}
    crash = RemoveWorker(vm_uid=UIDS[0], ending=Ending(kind=EndKind.CRASH))
    facts = VmFacts(slot=0, restarts=1, backoff_s=2.0)
    crashed, again = derived(tables, (crash, PutFacts(uid=UIDS[0], facts=facts)))
    assert (crashed.type, crashed.reason) == ("Warning", "Crashed")
    assert (again.reason, again.message) == ("Restarting", "restart 1, after 2 s")


def test_an_operation_begins_and_ends_once_and_its_object_names_it() -> None:
    tables = Tables()
    begun = PutOperation(operation=operation(reason="new"))
    created, event = derived(tables, (PutObject(object=stored()), begun))
    assert (created.operation_id, event.reason) == ("op-1", "OperationBegun")
    tables.apply((PutObject(object=stored()), begun))
    running = PutOperation(operation=operation(state=OperationState.RUNNING))
    assert told(tables, running) == []
    failed = PutOperation(operation=operation(state=OperationState.FAILED, message="no"))
    assert told(tables, failed) == [("OperationFailed", "start: no")]


def test_what_an_operator_wants_of_the_node_is_told() -> None:
    hold = Hold(requester="ann", reason="fans")
    drain = NodeRecord(intent=NodeIntent.DRAIN, hold=hold)
    assert told(Tables(), PutNode(record=drain)) == [("DrainAsked", "by ann: fans")]
    paused = PutNode(record=NodeRecord(paused=hold))
    assert told(Tables(), paused) == [("SchedulingPaused", "by ann: fans")]


def test_a_page_of_the_longest_events_fits_into_a_frame() -> None:
    ill = "\x01" * 5000
    ending = Ending(kind=EndKind.CRASH, reason=ill, rung=ill)
    tables = Tables()
    tables.apply((PutObject(object=stored()), PutWorker(row=worker())))
    (event,) = derived(tables, (RemoveWorker(vm_uid=UIDS[0], ending=ending),))
    chunk = EventChunk(last_seq=1, log="l" * 16, events=[event] * PAGE)
    assert len(msgspec.json.encode(chunk)) < FRAME_BYTES_MAX * 0.9


def test_every_end_outcome_and_wish_has_a_word() -> None:
    assert set(END_REASONS) == set(EndKind)
    assert set(OUTCOMES) == FINAL_STATES
    assert set(INTENTS) == set(NodeIntent)


# --- the log


async def test_numbers_have_no_gap_and_the_oldest_go(store: AgentStore) -> None:
    await store.commit((numbered(1, 5),))
    with pytest.raises(Conflict):
        await store.commit((numbered(7, 1),))
    with pytest.raises(Conflict):
        await store.commit((numbered(5, 1),))
    await store.commit((msgspec.structs.replace(numbered(6, 2), kept_max=3),))
    page = await store.events(4, ALL, 10)
    assert [event.seq for event in page.events] == [5, 6, 7]
    assert (page.oldest_seq, page.newest_seq, page.last_seq) == (5, 7, 7)
    too_old = await store.events(3, ALL, 10)
    assert (too_old.events, too_old.oldest_seq) == ((), 5)
    assert [event.seq for event in (await store.last_events(ALL, 2)).events] == [6, 7]


async def test_a_page_says_how_far_it_has_looked(store: AgentStore) -> None:
    await store.commit((numbered(1, 3),))
    await store.commit((numbered(4, 2, kind="Volume"),))
    page = await store.events(0, WatchEvents(kind="VirtualMachine"), 2)
    assert ([event.seq for event in page.events], page.last_seq) == ([1, 2], 2)
    page = await store.events(2, WatchEvents(kind="VirtualMachine"), 2)
    assert ([event.seq for event in page.events], page.last_seq) == ([3], 5)


async def test_sightings_are_kept_and_go_with_their_object(store: AgentStore) -> None:
    mine = Sighting(kind="VirtualMachine", name="web", uid=UIDS[0], state="lost", reason="R")
    other = Sighting(kind="Daemon", name="nwd", state="ready 1", reason="DaemonUp")
    await store.commit(
        (PutObject(object=stored()), PutSighting(sighting=mine), PutSighting(sighting=other))
    )
    assert set((await store.load()).sightings) == {mine, other}
    await store.commit((RemoveObject(tombstone=tombstone()),))
    assert (await store.load()).sightings == (other,)


async def test_a_number_is_never_used_again_over_a_start_of_the_agent(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    async with open_store(path) as store:
        await store.commit((msgspec.structs.replace(numbered(1, 4), kept_max=1),))
        log = (await store.events(4, ALL, 1)).log
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM events")
    async with open_store(path) as store:
        assert (await store.load()).event_seq == 4
        page = await store.events(4, ALL, 1)
        assert (page.log, page.oldest_seq, page.newest_seq) == (log, 5, 4)


async def test_the_log_is_bounded(tmp_path: Path) -> None:
    async with open_store(tmp_path / "agent.db") as store:
        for first in range(1, EVENTS_MAX + 1002, 1000):
            await store.commit((numbered(first, 1000),))
        page = await store.last_events(ALL, 1)
        assert page.newest_seq - page.oldest_seq + 1 == EVENTS_MAX


# --- listeners


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[Ledger]:
    ledger = Ledger(MemoryStore(), lambda: "2026-01-01T00:00:00.000Z")
    await ledger.load()
    server = Server("agent", EVENT_METHODS, allow_uids=frozenset({0, *_uids()}))
    events_api.EventsApi(ledger, "node-1").register(server)
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.serve, path)
        yield ledger
        tasks.cancel_scope.cancel()


def _uids() -> tuple[int, ...]:
    import os

    return (os.geteuid(),)


async def happen(ledger: Ledger, count: int, message: str = "") -> None:
    """Let something change that often."""
    for number in range(count):
        state = f"ready {ledger.tables.event_seq}.{number}"
        sighting = Sighting(
            kind="Daemon", name="nwd", state=state, reason="DaemonUp", message=message
        )
        await ledger.commit(PutSighting(sighting=sighting))


async def listen(path: Path, **request: Any) -> list[Event]:
    found: list[Event] = []
    async with connect(path) as client:
        await client.stream(
            WATCH_EVENTS, WatchEvents(**request), lambda chunk: found.extend(chunk.events)
        )
    return found


async def test_a_listener_goes_on_exactly_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with served(path) as ledger:
        await happen(ledger, 250)
        assert [event.seq for event in await listen(path)] == list(range(1, 251))
        later = await listen(path, after_seq=120)
        assert [event.seq for event in later] == list(range(121, 251))
        assert {event.node for event in later} == {"node-1"}
        assert await listen(path, after_seq=250) == []
        assert [event.seq for event in await listen(path, tail=3)] == [248, 249, 250]


async def test_who_follows_hears_each_once_as_it_comes(tmp_path: Path) -> None:
    path, chunks = tmp_path / "s", list[EventChunk]()
    async with served(path) as ledger, connect(path) as client, anyio.create_task_group() as tasks:
        await happen(ledger, 3)
        tasks.start_soon(client.stream, WATCH_EVENTS, WatchEvents(follow=True), chunks.append)
        for _ in range(4):
            await happen(ledger, 5)
            await wait_until(lambda: ledger.tables.event_seq in [c.last_seq for c in chunks])
        tasks.cancel_scope.cancel()
    seqs = [event.seq for chunk in chunks for event in chunk.events]
    assert seqs == list(range(1, 24))


async def test_a_number_that_cannot_be_gone_on_from_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    async with served(path) as ledger:
        await happen(ledger, 6)
        store = ledger.store
        assert isinstance(store, MemoryStore)
        for seq in (1, 2, 3):
            del store.tables.events[seq]
        with pytest.raises(FailedPrecondition, match="events 2 to 3 are not kept any more") as old:
            await listen(path, after_seq=1)
        assert "--after 3" in old.value.hint
        assert [event.seq for event in await listen(path, after_seq=3)] == [4, 5, 6]
        with pytest.raises(FailedPrecondition, match="another store: the last one here is 6"):
            await listen(path, after_seq=7)
        with pytest.raises(FailedPrecondition, match="the node was made anew"):
            await listen(path, after_seq=5, log="0123")


async def test_who_does_not_read_is_cut_off_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_api, "SLOW_S", 0.3)
    path = tmp_path / "s"
    async with served(path) as ledger:
        deaf = socket.socket(socket.AF_UNIX)
        deaf.connect(str(path))
        request = {"jsonrpc": "2.0", "id": 1, "method": "WatchEvents", "params": {"follow": True}}
        deaf.sendall(json.dumps(request).encode() + b"\n")
        await happen(ledger, 3000, "x" * 500)  # far more than a socket holds, and nobody waits
        await anyio.sleep(0.6)
        lines = await anyio.to_thread.run_sync(_all_lines, deaf)
    *events, end = lines
    heard = [e["seq"] for line in events for e in line["params"]["event"]["events"]]
    assert heard == list(range(1, len(heard) + 1))
    assert len(heard) < 3000
    assert end["error"]["data"]["code"] == ResourceExhausted.code
    assert f"told up to event {heard[-1]}" in end["error"]["message"]


def _all_lines(connection: socket.socket) -> list[dict[str, Any]]:
    """Read until the answer."""
    data = b""
    connection.settimeout(10)
    while b'"error"' not in data and (chunk := connection.recv(1 << 20)):
        data += chunk
    connection.close()
    return [json.loads(line) for line in data.splitlines()]


# --- what is seen


async def test_what_is_seen_again_as_it_was_is_not_told_again() -> None:
    ledger = Ledger(MemoryStore(), lambda: "t")
    await ledger.load()
    news = News(ledger)
    seen = [
        Sighting(kind="Daemon", name="nwd", state=state, reason="DaemonUp")
        for state in ("ready 1", "ready 1", "down", "ready 2")
    ]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(news.run)
        news.tell(*seen)
        await wait_until(lambda: ledger.tables.event_seq == 3)
        news.tell(seen[-1])
        await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    assert ledger.tables.event_seq == 3
    assert ledger.tables.sightings["Daemon//nwd/"].state == "ready 2"


async def test_a_leak_is_told_when_it_is_certain_and_when_it_is_gone() -> None:
    book, tables = LeakBook(1.0), Tables()
    item = CensusItem(kind="netns", name="chv-x", owner="", known=False)
    look = Look((("nwd", item),), frozenset({"nwd"}))
    book.note(look, (), 0.0, "t0")
    assert leak_news(tables, book) == []
    book.note(look, (), 5.0, "t1")
    (found,) = leak_news(tables, book)
    assert (found.reason, found.message) == ("LeakFound", "netns chv-x, since t0")
    tables.apply((PutSighting(sighting=found),))
    book.note(Look((), frozenset({"nwd"})), (), 9.0, "t2")
    (gone,) = leak_news(tables, book)
    assert (gone.reason, gone.state, gone.key) == ("LeakGone", "", found.key)
