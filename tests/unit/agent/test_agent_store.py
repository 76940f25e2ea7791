"""Both stores keep the same contract: what is committed is there, what breaks a rule is not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chv.agent import store_sqlite, tables
from chv.agent.node_record import Hold, NodeIntent, NodeRecord, PutNode
from chv.agent.records import (
    AgentStore,
    Prune,
    PutFacts,
    PutObject,
    PutOperation,
    PutRequest,
    PutStatus,
    PutStep,
    PutWorker,
    RemoveObject,
    RemoveWorker,
    RequestRow,
    StoredObject,
    Tombstone,
    VmFacts,
    WorkerRow,
)
from chv.agent.store_memory import MemoryStore
from chv.agent.store_sqlite import MIGRATIONS, SqliteStore, open_store
from chv.common import store_file
from chv.common.errors import AlreadyExists, ChvError, Conflict, NotFound, StaleGeneration
from chv.common.ids import Ids
from chv.common.store import Store
from chv.common.wire.agent import Operation, OperationState, OperationStep
from chv.common.wire.manifest import parse
from chv.common.wire.resources import VirtualMachineStatus, VmPhase
from chv.vmm.driver import VmmConfig
from tests.sim.bench import bare, network

IDS = Ids(5)
UIDS = [IDS.uid() for _ in range(4)]


@asynccontextmanager
async def opened(kind: str, path: Path) -> AsyncIterator[AgentStore]:
    if kind == "memory":
        yield MemoryStore()
    else:
        async with open_store(path / "agent.db") as store:
            yield store


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AgentStore]:
    async with opened(request.param, tmp_path) as store:
        yield store


def stored(number: int = 0, name: str = "web", slot: int = 0, **metadata: Any) -> StoredObject:
    resource = parse(bare(name))
    given = {"uid": UIDS[number], "generation": 1, "resource_version": "1", **metadata}
    named = msgspec.structs.replace(resource.metadata, **given)
    return StoredObject(
        resource=msgspec.structs.replace(resource, metadata=named), facts=VmFacts(slot=slot)
    )


def worker(number: int = 0, worker_id: str = "chv:abcdef:vmm:0:1", **more: Any) -> WorkerRow:
    config = VmmConfig(
        vm_id="v", name="n", worker_id=worker_id, cpus=1, memory_bytes=1, runtime_dir="/", uuid="u"
    )
    return WorkerRow(
        vm_uid=UIDS[number],
        worker_id=worker_id,
        driver="fake",
        config=config,
        generation=1,
        **more,
    )


def operation(number: int = 0, id: str = "op-1", **more: Any) -> Operation:
    return Operation(
        id=id,
        verb="start",
        kind="VirtualMachine",
        namespace="default",
        name=f"vm{number}",
        uid=UIDS[number],
        generation=1,
        requester="test",
        **more,
    )


def tombstone(number: int = 0, **more: Any) -> Tombstone:
    given = {"kind": "VirtualMachine", "namespace": "default", "name": "web", "revision": 9, **more}
    return Tombstone(uid=UIDS[number], generation=2, deleted_at="now", **given)


async def refused(store: AgentStore, error: type[ChvError], *changes: Any) -> None:
    """The transaction fails with this error and nothing of it is there."""
    before = await store.load()
    with pytest.raises(error):
        await store.commit(changes)
    assert await store.load() == before


async def test_what_is_committed_is_loaded(store: AgentStore) -> None:
    status = VirtualMachineStatus(phase=VmPhase.RUNNING)
    await store.commit((PutObject(object=stored()), PutWorker(row=worker())))
    await store.commit((PutStatus(uid=UIDS[0], status=status),))
    await store.commit((PutFacts(uid=UIDS[0], facts=VmFacts(slot=0, restarts=3)),))
    snapshot = await store.load()
    assert snapshot.revision == 1
    assert snapshot.workers == (worker(),)
    (found,) = snapshot.objects
    assert found.resource.status == status
    assert found.facts is not None
    assert found.facts.restarts == 3
    assert found.resource.spec == stored().resource.spec


async def test_record_of_the_node_is_one_and_changes_with_all_else_or_not_at_all(
    store: AgentStore,
) -> None:
    assert (await store.load()).node == NodeRecord()
    hold = Hold(requester="ann", reason="fans", since="then", operation_id="op-9")
    drained = NodeRecord(intent=NodeIntent.DRAIN, hold=hold, stopped=2)
    await store.commit((PutNode(record=drained),))
    assert (await store.load()).node == drained
    later = NodeRecord(intent=NodeIntent.MAINTAIN, hold=hold, paused=hold)
    await refused(store, NotFound, PutNode(record=later), PutFacts(uid="x", facts=VmFacts(slot=0)))
    await store.commit((PutNode(record=later),))
    assert (await store.load()).node == later


async def test_an_object_stored_again_keeps_its_place_and_takes_the_new_spec(
    store: AgentStore,
) -> None:
    await store.commit((PutObject(object=stored()),))
    newer = stored(generation=2, resource_version="7")
    await store.commit((PutObject(object=newer),))
    snapshot = await store.load()
    assert snapshot.objects == (newer,)
    assert snapshot.revision == 7


async def test_a_name_is_taken_only_once(store: AgentStore) -> None:
    await store.commit((PutObject(object=stored()),))
    await refused(store, AlreadyExists, PutObject(object=stored(1, slot=1)))


async def test_two_objects_swap_names_in_one_transaction_or_keep_them(store: AgentStore) -> None:
    await store.commit((PutObject(object=stored(0, "web")), PutObject(object=stored(1, "new", 1))))
    root, former = stored(1, "web", 1), stored(0, "former")
    await refused(store, AlreadyExists, PutObject(object=root), PutObject(object=former))
    await store.commit((PutObject(object=former), PutObject(object=root)))
    found = {each.uid: each.key[2] for each in (await store.load()).objects}
    assert found == {UIDS[0]: "former", UIDS[1]: "web"}
    await store.commit((PutObject(object=stored(2, "new", 2)),))  # its first name is free


async def test_a_slot_belongs_to_one_vm(store: AgentStore) -> None:
    await store.commit((PutObject(object=stored()),))
    await refused(store, Conflict, PutObject(object=stored(1, "other")))


async def test_an_object_without_a_slot_is_no_vm(store: AgentStore) -> None:
    resource = parse(network())
    metadata = msgspec.structs.replace(resource.metadata, uid=UIDS[2], generation=1)
    net = StoredObject(resource=msgspec.structs.replace(resource, metadata=metadata))
    await store.commit((PutObject(object=stored()), PutObject(object=net)))
    assert net in (await store.load()).objects


async def test_an_older_generation_is_refused(store: AgentStore) -> None:
    await store.commit((PutObject(object=stored(generation=10)),))
    await refused(store, StaleGeneration, PutObject(object=stored(generation=9)))


async def test_a_tombstone_frees_name_and_slot_but_never_the_uid(store: AgentStore) -> None:
    await store.commit((PutObject(object=stored()),))
    await store.commit((RemoveObject(tombstone=tombstone()),))
    await refused(store, StaleGeneration, PutObject(object=stored(generation=99)))
    await store.commit((PutObject(object=stored(1, resource_version="3")),))
    assert (await store.load()).revision == 9  # never back, or two objects share a version


async def test_an_object_with_a_vmm_cannot_go(store: AgentStore) -> None:
    await store.commit((PutObject(object=stored()), PutWorker(row=worker())))
    await refused(store, Conflict, RemoveObject(tombstone=tombstone()))
    await store.commit((RemoveWorker(vm_uid=UIDS[0]), RemoveObject(tombstone=tombstone())))
    assert (await store.load()).objects == ()


async def test_removing_what_is_not_there_is_refused(store: AgentStore) -> None:
    await refused(store, NotFound, RemoveObject(tombstone=tombstone()))


async def test_a_second_worker_is_refused_until_the_first_is_forgotten(store: AgentStore) -> None:
    await store.commit((PutObject(object=stored()), PutWorker(row=worker())))
    await refused(store, Conflict, PutWorker(row=worker(worker_id="chv:abcdef:vmm:0:2")))
    await store.commit((PutWorker(row=worker(booted=True)),))
    assert (await store.load()).workers == (worker(booted=True),)


async def test_a_worker_needs_its_vm(store: AgentStore) -> None:
    await refused(store, NotFound, PutWorker(row=worker()))


async def test_facts_of_nobody_are_refused_and_a_status_is_dropped(store: AgentStore) -> None:
    await refused(store, NotFound, PutFacts(uid=UIDS[0], facts=VmFacts(slot=0)))
    await store.commit((PutStatus(uid=UIDS[0], status=VirtualMachineStatus()),))
    assert (await store.load()).objects == ()


async def test_one_broken_rule_undoes_the_whole_transaction(store: AgentStore) -> None:
    await store.commit((PutObject(object=stored()),))
    await refused(
        store,
        AlreadyExists,
        PutObject(object=stored(generation=5, resource_version="5")),
        PutWorker(row=worker()),
        PutOperation(operation=operation()),
        PutObject(object=stored(1, slot=1)),
    )
    assert await store.operation("op-1") is None


async def test_an_operation_keeps_its_steps_and_is_found_by_id(store: AgentStore) -> None:
    step = OperationStep(name="boot", started_at="then")
    done = msgspec.structs.replace(step, outcome="done")
    await store.commit((PutOperation(operation=operation()),))
    await store.commit((PutStep(operation_id="op-1", index=0, step=step),))
    await store.commit((PutStep(operation_id="op-1", index=0, step=done),))
    await store.commit((PutStep(operation_id="op-1", index=1, step=step),))
    running = operation(state=OperationState.RUNNING)
    await store.commit((PutOperation(operation=running),))
    found = await store.operation("op-1")
    assert found is not None
    assert found.state is OperationState.RUNNING
    assert found.steps == [done, step]
    assert (await store.load()).operations == (found,)


async def test_a_final_operation_does_not_change_and_is_history(store: AgentStore) -> None:
    await store.commit((PutOperation(operation=operation(state=OperationState.SUCCEEDED)),))
    await refused(store, Conflict, PutOperation(operation=operation()))
    assert (await store.load()).operations == ()


async def test_a_step_needs_its_operation(store: AgentStore) -> None:
    step = OperationStep(name="boot", started_at="then")
    await refused(store, NotFound, PutStep(operation_id="op-9", index=0, step=step))


async def test_operations_are_listed_newest_first_with_filters(store: AgentStore) -> None:
    for number in range(3):
        await store.commit((PutOperation(operation=operation(number, f"op-{number}")),))
    listed = await store.operations(limit=2)
    assert [each.id for each in listed] == ["op-2", "op-1"]
    only = await store.operations(kind="VirtualMachine", name="vm0", limit=9)
    assert [each.id for each in only] == ["op-0"]
    assert not await store.operations(namespace="elsewhere", limit=9)


async def test_pruning_drops_the_oldest_final_operations_alone(store: AgentStore) -> None:
    for number in range(4):
        final = operation(number, f"op-{number}", state=OperationState.FAILED)
        await store.commit((PutOperation(operation=final),))
    await store.commit((PutOperation(operation=operation(0, "op-live")),))
    await store.commit((Prune(operations_max=1, requests_max=10),))
    left = [each.id for each in await store.operations(limit=9)]
    assert left == ["op-live", "op-3"]


async def test_the_oldest_of_too_many_tombstones_go(
    store: AgentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (tables, store_sqlite):
        monkeypatch.setattr(module, "TOMBSTONES_MAX", 1)
    for number in range(3):
        await store.commit((PutObject(object=stored(number)),))
        await store.commit((RemoveObject(tombstone=tombstone(number, revision=10 + number)),))
    await store.commit((Prune(operations_max=10, requests_max=10),))
    await refused(store, StaleGeneration, PutObject(object=stored(2)))
    await store.commit((PutObject(object=stored(0)),))
    assert (await store.load()).revision >= 12


async def test_a_request_is_remembered_until_it_is_pruned(store: AgentStore) -> None:
    rows = [RequestRow(key=f"k{n}", digest="d", reply=b"r") for n in range(3)]
    await store.commit(tuple(PutRequest(request=row) for row in rows))
    assert await store.request("k0") == rows[0]
    await store.commit((Prune(operations_max=10, requests_max=1),))
    assert await store.request("k0") is None
    assert await store.request("k2") == rows[2]


async def test_sqlite_has_everything_after_it_was_opened_again(tmp_path: Path) -> None:
    async with opened("sqlite", tmp_path) as store:
        await store.commit((PutObject(object=stored()), PutWorker(row=worker())))
        await store.commit((PutOperation(operation=operation()),))
        before = await store.load()
    async with opened("sqlite", tmp_path) as store:
        assert await store.load() == before


async def test_a_full_disk_is_told_with_its_directory_until_there_is_space_again(
    tmp_path: Path,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_file, "free_bytes", lambda path: 0)
        async with Store.open(tmp_path / "agent.db", MIGRATIONS, reserve_bytes=1 << 16) as inner:
            store = SqliteStore(inner)
            assert str(tmp_path) in await store.shortage()
            assert "bytes free" in await store.shortage()
            patch.undo()
            assert not await store.shortage(), "looked at anew without any other write"


async def test_memory_is_never_short() -> None:
    assert not await MemoryStore().shortage()
