"""The desired-state history: nothing is lost, nothing is made up, and there is a way back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chv.agent.generation_rows import with_history
from chv.agent.generations import DELETED_GENERATIONS_MAX, GENERATIONS_MAX
from chv.agent.records import AgentStore, Prune, PutObject, RemoveObject, StoredObject, Tombstone
from chv.agent.store_memory import MemoryStore
from chv.agent.store_sqlite import MIGRATIONS, open_store
from chv.agent.tables import Tables
from chv.common.errors import ChvError, FailedPrecondition, NotFound
from chv.common.ids import Ids
from chv.common.store import Store
from chv.common.wire import agent_history as wire
from chv.common.wire.agent import ObjectRef
from chv.common.wire.manifest import parse
from tests.sim.bench import Bench, bare, image, network, open_bench, volume

IDS = Ids(7)
UIDS = [IDS.uid() for _ in range(200)]
VM = "VirtualMachine"


async def rows(bench: Bench, name: str = "web", kind: str = VM) -> list[wire.GenerationInfo]:
    reply = await bench.engine.history.rows(wire.ListGenerations(kind=kind, name=name))
    return reply.generations


async def spec(bench: Bench, generation: int, name: str = "web", kind: str = VM) -> Any:
    request = wire.GetGeneration(kind=kind, name=name, generation=generation)
    return msgspec.json.decode((await bench.engine.history.get(request)).object)


async def roll_back(bench: Bench, to: int, name: str = "web", **more: Any) -> Any:
    request = wire.Rollback(kind=VM, name=name, to=to, requester="alice", **more)
    (result,) = (await bench.engine.history.rollback(request)).results
    return result


async def test_each_generation_tells_who_made_it_when_and_why() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), bare(), reason="first")
        await bench.apply(bare(memory="256Mi", cpus=2), reason="more")
        await bench.act("stop", reason="enough")
        newest, changed, first = await rows(bench)
    assert (first.generation, first.verb, first.reason, first.changed) == (1, "create", "first", [])
    assert (changed.verb, changed.reason, changed.requester) == ("update", "more", "test")
    assert changed.changed == ["cpus", "memory"]
    assert (newest.generation, newest.verb, newest.reason) == (3, "stop", "enough")
    assert newest.changed == ["runStrategy"]
    assert newest.operation_id.startswith("op")
    assert first.at <= changed.at <= newest.at != ""


async def test_what_the_node_does_by_itself_is_recorded_as_the_nodes() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), bare())
        await bench.until("phase=Running")
        process = bench.process()
        assert process is not None
        bench.machine.host.power_off(process)
        await bench.until("phase=Stopped")
        newest = (await rows(bench))[0]
    assert (newest.requester, newest.verb, newest.changed) == ("system", "halt", ["runStrategy"])
    assert "GuestShutdown" in newest.reason


async def test_an_apply_of_the_same_makes_no_row_and_a_refused_one_neither() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), bare())
        await bench.apply(bare())
        await bench.apply(bare(memory="512Mi"), dry_run=True)
        with pytest.raises(ChvError):
            await bench.apply(bare(disks=[{"name": "x", "volume": "nowhere"}]))
        assert [row.generation for row in await rows(bench)] == [1]


async def test_labels_belong_to_the_generation_they_were_given_in() -> None:
    labelled = bare()
    labelled["metadata"]["labels"] = {"tier": "front"}
    async with open_bench() as bench:
        await bench.apply(image(), bare(), reason="first")
        await bench.apply(labelled, reason="labels alone")
        await bench.apply(bare(memory="256Mi"))
        first, second = await spec(bench, 1), await spec(bench, 2)
        assert first["metadata"]["labels"] == {"tier": "front"}
        assert "labels" not in second["metadata"]
        assert [row.reason for row in await rows(bench)] == ["", "first"]
        await roll_back(bench, 1)
        assert bench.get(VM, "web").metadata.labels == {"tier": "front"}


async def test_a_rollback_is_an_apply_of_that_very_spec_as_a_new_generation() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), bare())
        before = bench.get(VM, "web").spec
        await bench.apply(bare(memory="256Mi", cpus=4))
        result = await roll_back(bench, 1, reason="too large")
        assert (result.action, result.generation) == ("configured", 3)
        assert bench.get(VM, "web").spec == before
        newest = (await rows(bench))[0]
        assert (newest.requester, newest.verb) == ("alice", "update")
        assert newest.reason == "rollback to generation 1: too large"
        assert (await spec(bench, 3))["spec"] == (await spec(bench, 1))["spec"]
        assert (await roll_back(bench, 1)).action == "unchanged"


async def test_a_rollback_starts_a_vm_again_that_was_stopped_since() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), bare())
        await bench.act("stop")
        await bench.until("phase=Stopped")
        await roll_back(bench, 1)
        await bench.until("phase=Running")


async def test_a_rollback_goes_through_every_check_of_an_apply() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), volume(), bare(disks=[{"name": "d", "volume": "data"}]))
        await bench.act("stop")
        await bench.until("phase=Stopped")
        await bench.apply(bare(runStrategy="Halted"))
        gone = await bench.delete("Volume", "data")
        await bench.final(gone.id)
        with pytest.raises(ChvError, match="data"):
            await roll_back(bench, 1)
        assert (await rows(bench))[0].generation == 3


async def test_there_is_no_way_back_to_what_is_not_known_or_being_deleted() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), bare())
        with pytest.raises(NotFound, match="known: 1 to 1"):
            await roll_back(bench, 9)
        with pytest.raises(NotFound):
            await roll_back(bench, 1, "nobody")
        await bench.until("phase=Running")
        gone = await bench.delete(VM, "web")
        with pytest.raises(FailedPrecondition):
            await roll_back(bench, 1)
        await bench.final(gone.id)
        with pytest.raises(NotFound) as refusal:
            await roll_back(bench, 1)
        assert "chv history" in refusal.value.hint


async def test_what_is_deleted_keeps_a_history_beside_the_next_of_that_name() -> None:
    async with open_bench() as bench:
        await bench.apply(network())
        await bench.final((await bench.delete("Network", "net")).id)
        request = wire.ListGenerations(kind="Network", name="net")
        old = await bench.engine.history.rows(request)
        assert old.deleted
        assert [row.verb for row in old.generations] == ["delete", "create"]
        await bench.apply(network())
        new = await bench.engine.history.rows(request)
        assert (new.deleted, new.others) == (False, [old.uid])
        request = wire.ListGenerations(kind="Network", name="net", uid=old.uid)
        assert (await bench.engine.history.rows(request)).uid == old.uid


async def test_a_history_outlives_the_agent() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), bare())
        await bench.apply(bare(memory="256Mi"))
        known = await rows(bench)
    async with open_bench(bench.machine) as bench:
        assert await rows(bench) == known


# --- the stores


@asynccontextmanager
async def opened(kind: str, path: Path) -> AsyncIterator[AgentStore]:
    if kind == "memory":
        yield MemoryStore()
        return
    async with open_store(path / "agent.db") as store:
        yield store


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AgentStore]:
    async with opened(request.param, tmp_path) as store:
        yield store


def stored(number: int, generation: int, name: str = "net") -> StoredObject:
    resource = parse(network(name))
    named = msgspec.structs.replace(
        resource.metadata, uid=UIDS[number], generation=generation, resource_version="1"
    )
    return StoredObject(resource=msgspec.structs.replace(resource, metadata=named))


async def put(store: AgentStore, number: int, generation: int, name: str = "net") -> None:
    change = PutObject(object=stored(number, generation, name))
    await store.commit(with_history(Tables(), (change,), f"at {generation}"))


async def remove(store: AgentStore, number: int, name: str = "net") -> None:
    tombstone = Tombstone(
        uid=UIDS[number],
        kind="Network",
        namespace="default",
        name=name,
        generation=99,
        revision=number + 2,
        deleted_at="now",
    )
    await store.commit((RemoveObject(tombstone=tombstone),))


async def test_the_oldest_generations_go_first(store: AgentStore) -> None:
    for generation in range(1, GENERATIONS_MAX + 6):
        await put(store, 0, generation)
    await put(store, 1, 1, "other")
    known = [row.generation for row in await store.history(UIDS[0])]
    assert known == list(range(GENERATIONS_MAX + 5, 5, -1))
    assert await store.generation(UIDS[0], 5) is None
    assert len(await store.history(UIDS[1])) == 1


async def test_a_generation_is_never_written_over(store: AgentStore) -> None:
    await put(store, 0, 1)
    change = PutObject(object=stored(0, 1))
    await store.commit(with_history(Tables(), (change,), "later"))
    (row,) = await store.history(UIDS[0])
    assert row.at == "at 1"


async def test_of_what_is_gone_the_newest_generations_and_objects_are_kept(
    store: AgentStore,
) -> None:
    for number in range(4):
        for generation in range(1, DELETED_GENERATIONS_MAX + 4):
            await put(store, number, generation)
        if number < 3:
            await remove(store, number)
            assert len(await store.history(UIDS[number])) == DELETED_GENERATIONS_MAX
    await store.commit((Prune(operations_max=9, requests_max=9, histories_max=2),))
    assert await store.history(UIDS[0]) == []
    assert await store.histories("Network", "default", "net") == [UIDS[3], UIDS[2], UIDS[1]]


async def test_a_transaction_that_fails_leaves_neither_object_nor_row(store: AgentStore) -> None:
    await put(store, 0, 1)
    changes = (PutObject(object=stored(0, 2)), PutObject(object=stored(1, 1)))
    with pytest.raises(ChvError):
        await store.commit(with_history(Tables(), changes, "now"))
    assert [row.generation for row in await store.history(UIDS[0])] == [1]
    assert await store.history(UIDS[1]) == []


async def test_object_and_row_are_one_transaction_on_the_disk(tmp_path: Path) -> None:
    """Whatever a crash leaves of the log, an object is never newer than its history."""
    path = tmp_path / "agent.db"
    async with open_store(path) as store:
        for generation in range(1, 9):
            await put(store, 0, generation)
        log = Path(f"{path}-wal").read_bytes()
        file = path.read_bytes()
    seen = set()
    for cut in range(0, len(log) + 1, 1024):
        picture = tmp_path / f"cut-{cut}.db"
        picture.write_bytes(file)
        Path(f"{picture}-wal").write_bytes(log[:cut])
        found = _pair(picture)
        assert found[0] == found[1]
        seen.add(found[0])
    assert len(seen) > 4


def _pair(path: Path) -> tuple[int, int]:
    db = sqlite3.connect(path)
    try:
        newest = "SELECT coalesce(max(generation), 0) FROM "
        names = {row[0] for row in db.execute("SELECT name FROM sqlite_master")}
        if "objects" not in names or "generations" not in names:
            return (0, 0)
        objects = db.execute(newest + "objects").fetchone()[0]
        return objects, db.execute(newest + "generations").fetchone()[0]
    finally:
        db.close()


async def test_what_was_there_before_there_was_a_history_is_its_first_row(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    object_json = msgspec.json.encode(stored(0, 3).resource).decode()
    operation = {"id": "op-1", "uid": UIDS[0], "generation": 3, "verb": "update",
                 "requester": "bob", "reason": "because", "created_at": "then"}  # fmt: skip
    async with Store.open(path, MIGRATIONS[:1]) as old:

        def fill(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT INTO objects VALUES (?, 'Network', 'default', 'net', 3, 1, ?, NULL, NULL,"
                " NULL, 0)",
                (UIDS[0], object_json),
            )
            db.execute(
                "INSERT INTO operations (id, kind, namespace, name, final, body)"
                " VALUES ('op-1', 'Network', 'default', 'net', 1, ?)",
                (json.dumps(operation),),
            )

        await old.write(fill)
    async with open_store(path) as store:
        (row,) = await store.history(UIDS[0])
        assert (row.generation, row.requester, row.reason) == (3, "bob", "because")
        assert (row.at, row.operation_id, row.verb) == ("then", "op-1", "update")
        found = await store.generation(UIDS[0], 3)
        assert found is not None
        kept = parse(network() | {"spec": json.loads(found.spec)})
        assert kept.spec == stored(0, 3).resource.spec
    assert (tmp_path / f"agent.db.before-{len(MIGRATIONS)}").exists()


# --- why


async def test_why_says_in_a_line_that_nothing_is_in_the_way() -> None:
    async with open_bench() as bench:
        applied = await bench.apply(network(), reason="a lab")
        await bench.final(applied.results[0].operation_id)
        reply = await bench.engine.why.why(ObjectRef(kind="Network", name="net"))
    assert reply.as_wanted
    assert reply.verdict == "network/net is Ready, as test wanted (a lab): nothing is in its way"
    assert (reply.conditions, reply.fixes, reply.operation) == ([], [], None)


async def test_why_of_a_stopped_vm_names_who_stopped_it() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), bare())
        await bench.until("phase=Running")
        await bench.final((await bench.act("stop", reason="night")).id)
        reply = await bench.engine.why.why(ObjectRef(kind=VM, name="web"))
    assert reply.as_wanted
    assert reply.verdict.startswith("vm/web is stopped, as test wanted")
    assert "night" in reply.verdict


async def test_why_leads_from_a_vm_to_the_daemon_that_is_silent() -> None:
    async with open_bench() as bench:
        bench.machine.host.stord.down_until = float("inf")
        await bench.apply(
            image(), volume(), bare(disks=[{"name": "data", "volume": "data"}]), reason="a test"
        )
        with pytest.raises(ChvError):
            await bench.until("phase=Running", timeout_s=4)
        reply = await bench.engine.why.why(ObjectRef(kind=VM, name="web"))
        assert not reply.as_wanted
        assert reply.wanted is not None
        assert reply.wanted.reason == "a test"
        assert reply.operation is not None
        assert reply.operation.verb == "create"
        assert [each.type for each in reply.conditions][:1] == ["VolumesReady"]
        assert [each.name for each in reply.obstacles] == ["data"]
        assert "chv why volume/data" in reply.fixes


async def test_why_of_nobody_is_not_found() -> None:
    async with open_bench() as bench:
        with pytest.raises(NotFound):
            await bench.engine.why.why(ObjectRef(kind=VM, name="nobody"))
