"""Operations of no object: they outlive callers and agents, join, wait their turn, end once."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from chv.agent.chores import Came, Task, Way, Wish
from chv.agent.side_verbs import REAP_LEAK
from chv.common.errors import (
    Cancelled,
    ChvError,
    Conflict,
    FailedPrecondition,
    OutcomeUnknown,
    Unavailable,
)
from chv.common.wire import agent as api
from chv.common.wire.agent import Operation, OperationState
from tests.sim.bench import Bench, open_bench
from tests.sim.chaos import Chaos
from tests.sim.virtual import simulated
from tests.sim.vmms import SimImages
from tests.sim.world import Machine

SHA256 = "d" * 64


class Gate:
    """A download that stands at its half until it is let go, in any number of agents."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = False
        self.begun = 0
        original = SimImages.fetch

        async def fetch(images: SimImages, *arguments: Any) -> Any:
            self.begun += 1
            *_, on_progress = arguments
            await on_progress(50, 100)
            while not self.open:  # noqa: ASYNC110
                await anyio.sleep(0.1)
            return await original(images, *arguments)

        monkeypatch.setattr(SimImages, "fetch", fetch)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def still() -> Machine:
    import random

    machine = Machine(1, Chaos(random.Random(1), delays_s=(0.0,)))
    machine.chaos.quiet = True
    return machine


def fetch(name: str = "far", **more: Any) -> api.FetchImage:
    values = {"name": name, "url": f"https://host/{name}", "sha256": SHA256, "requester": "ann"}
    return api.FetchImage(**values | more)


async def ask(bench: Bench, request: api.FetchImage) -> None:
    """A caller that leaves at once."""
    async with anyio.create_task_group() as group:
        group.start_soon(bench.engine.import_image, request)
        await anyio.sleep(1)
        group.cancel_scope.cancel()


async def listed(bench: Bench, **wanted: Any) -> list[Operation]:
    request = api.ListOperations(**wanted)
    return (await bench.engine.list_operations(request)).operations


async def show(bench: Bench, operation_id: str) -> Operation:
    request = api.OperationRef(operation_id=operation_id)
    return (await bench.engine.get_operation(request)).operation


def cancel(operation_id: str, **more: Any) -> api.CancelOperation:
    return api.CancelOperation(operation_id=operation_id, requester="bob", **more)


@simulated
async def test_an_import_goes_on_where_its_caller_leaves_and_shows_how_far_it_is(
    gate: Gate,
) -> None:
    async with open_bench() as bench:
        await ask(bench, fetch(reason="needed"))
        (operation,) = await listed(bench, verb="import")
        assert (operation.requester, operation.reason) == ("ann", "needed")
        assert operation.state is OperationState.RUNNING
        assert operation.progress is not None
        assert (operation.progress.done, operation.progress.total) == (50, 100)
        gate.open = True
        ended = await bench.final(operation.id)
        assert ended.state is OperationState.SUCCEEDED
        assert ended.result["sha256"] == SHA256
        assert ended.progress is not None and ended.progress.done == ended.progress.total
        await bench.until("Ready", "far", "Image")


@simulated
async def test_the_same_import_joins_and_another_of_the_same_artifact_is_refused(
    gate: Gate,
) -> None:
    async with open_bench() as bench:
        await ask(bench, fetch())
        await ask(bench, fetch(requester="bob"))
        (operation,) = await listed(bench, verb="import")
        assert gate.begun == 1
        with pytest.raises(Conflict, match="by ann") as caught:
            await bench.engine.import_image(fetch(url="https://host/other"))
        assert operation.id in str(caught.value)
        await ask(bench, fetch(artifact="kernel", sha256="e" * 64))  # beside it
        assert gate.begun == 2
        gate.open = True


@simulated
async def test_an_import_that_a_killed_agent_had_begun_is_brought_to_its_end(gate: Gate) -> None:
    machine = still()
    async with open_bench(machine) as bench:
        await ask(bench, fetch())
    machine.chaos.life += 1
    gate.open = True
    async with open_bench(machine) as bench:
        (operation,) = await listed(bench, verb="import")
        assert (await bench.final(operation.id)).state is OperationState.SUCCEEDED
        await bench.until("Ready", "far", "Image")
        assert gate.begun == 2


@simulated
async def test_a_cancelled_import_leaves_no_image_and_says_who_wanted_that(gate: Gate) -> None:
    async with open_bench() as bench:
        await ask(bench, fetch())
        (operation,) = await listed(bench, verb="import")
        told = await bench.engine.cancel(cancel(operation.id, reason="too large"))
        assert not told.joined
        ended = await bench.final(operation.id)
        assert ended.state is OperationState.CANCELLED
        assert ended.message == "cancelled by bob: too large"
        assert (await bench.engine.cancel(cancel(operation.id))).joined
        assert not bench.machine.host.artifacts
        assert not bench.engine._context.ledger.tables.of_kind("Image")


@simulated
async def test_a_cancel_is_kept_over_the_death_of_the_agent(gate: Gate) -> None:
    machine = still()
    async with open_bench(machine) as bench:
        await ask(bench, fetch())
        (operation,) = await listed(bench, verb="import")
        bench.engine.chores.cancel = lambda operation_id: None  # type: ignore[method-assign]
        await bench.engine.cancel(cancel(operation.id))
    machine.chaos.life += 1
    async with open_bench(machine) as bench:
        assert (await bench.final(operation.id)).state is OperationState.CANCELLED
        assert gate.begun == 1


@simulated
async def test_a_key_replays_what_came_of_the_first_request(gate: Gate) -> None:
    gate.open = True
    machine = still()
    request = fetch(idempotency_key="once")
    async with open_bench(machine) as bench:
        first = await bench.engine.import_image(request)
    machine.chaos.life += 1
    async with open_bench(machine) as bench:
        assert await bench.engine.import_image(request) == first
        assert gate.begun == 1
        with pytest.raises(Conflict, match="another request"):
            await bench.engine.import_image(fetch("other", idempotency_key="once"))


@simulated
async def test_a_failed_import_is_replayed_as_failed() -> None:
    async with open_bench() as bench:
        request = fetch("missing", idempotency_key="once")
        for _ in range(2):
            with pytest.raises(ChvError, match="404"):
                await bench.engine.import_image(request)
        assert len(await listed(bench, verb="import")) == 1


@simulated
async def test_imports_wait_their_turn_in_the_order_in_which_they_came(gate: Gate) -> None:
    async with open_bench() as bench:
        for number in range(6):
            await ask(bench, fetch(f"far{number}", sha256=f"{number}" * 64))
        queued = [each for each in await listed(bench, verb="import") if each.queue is not None]
        places = {each.name: each.queue.position for each in queued if each.queue is not None}
        assert places == {"far4": 1, "far5": 2}
        assert gate.begun == 4
        first = next(each for each in await listed(bench, name="far0"))
        await bench.engine.cancel(cancel(first.id))
        await bench.final(first.id)
        await anyio.sleep(1)
        assert gate.begun == 5
        (moved,) = [each for each in await listed(bench, name="far5") if each.verb == "import"]
        assert moved.queue is not None and moved.queue.position == 1
        await bench.engine.cancel(cancel(moved.id))  # one that waits ends, too
        assert (await bench.final(moved.id)).state is OperationState.CANCELLED
        gate.open = True


@simulated
async def test_what_cannot_be_cancelled_is_refused_with_what_to_do() -> None:
    async with open_bench() as bench:
        began = anyio.Event()

        async def forever(task: Task) -> Came:
            began.set()
            await anyio.sleep_forever()
            return Came("")

        bench.engine.chores.teach(REAP_LEAK, Way(forever))
        wish = Wish(verb=REAP_LEAK, kind="Leak", name="0123456789", requester="ann")
        operation, _ = await bench.engine.chores.begin(wish)
        await began.wait()
        with pytest.raises(FailedPrecondition, match="does not come back"):
            await bench.engine.cancel(cancel(operation.id))


@simulated
@pytest.mark.parametrize(
    ("errors", "state"),
    [
        ([OutcomeUnknown("lost"), Unavailable("not yet")], OperationState.SUCCEEDED),
        ([Unavailable("stopped")], OperationState.FAILED),
    ],
)
async def test_a_doubt_is_looked_into_and_a_refusal_is_final(
    errors: list[ChvError], state: OperationState
) -> None:
    seen: list[bool] = []
    left = list(errors)

    async def do(task: Task) -> Came:
        seen.append(task.again)
        if left:
            raise left.pop(0)
        return Came("done")

    async with open_bench() as bench:
        bench.engine.chores.teach(REAP_LEAK, Way(do))
        wish = Wish(verb=REAP_LEAK, kind="Leak", name="0123456789", requester="ann")
        operation, _ = await bench.engine.chores.begin(wish)
        assert (await bench.final(operation.id)).state is state
    assert seen == ([False, True, True] if state is OperationState.SUCCEEDED else [False])


@simulated
async def test_waiting_for_a_cancelled_one_raises_that(gate: Gate) -> None:
    async with open_bench() as bench:
        await ask(bench, fetch())
        (operation,) = await listed(bench, verb="import")
        await bench.engine.cancel(cancel(operation.id))
        with pytest.raises(Cancelled):
            await bench.engine.chores.outcome(operation.id)


@simulated
async def test_operations_are_filtered(gate: Gate) -> None:
    gate.open = True
    async with open_bench() as bench:
        await bench.engine.import_image(fetch())
        with pytest.raises(ChvError):
            await bench.engine.import_image(fetch("missing"))
        await bench.until("Ready", "far", "Image")
        failed = await listed(bench, states=[OperationState.FAILED])
        assert [each.name for each in failed] == ["missing"]
        both = [OperationState.FAILED, OperationState.SUCCEEDED]
        assert len(await listed(bench, verb="import", states=both)) == 2
        stamp = (await listed(bench, name="missing"))[0].created_at
        assert {each.verb for each in await listed(bench, since=stamp)} >= {"import"}
        assert await listed(bench, since="9999-01-01T00:00:00Z") == []


@simulated
async def test_what_has_failed_for_a_moment_is_not_said_to_work_later_under_its_key() -> None:
    async with open_bench() as bench:

        async def do(task: Task) -> Came:
            raise Unavailable("nwd is away")

        bench.engine.chores.teach(REAP_LEAK, Way(do))
        wish = Wish(
            verb=REAP_LEAK, kind="Leak", name="0123456789", requester="a", idempotency_key="k"
        )
        operation, _ = await bench.engine.chores.begin(wish)
        with pytest.raises(Unavailable):
            await bench.engine.chores.outcome(operation.id)
        again, known = await bench.engine.chores.begin(wish)
        assert known and again.id == operation.id
        with pytest.raises(FailedPrecondition, match="nwd is away"):
            await bench.engine.chores.outcome(again.id)


@simulated
async def test_what_was_stored_without_a_reply_is_done_all_the_same(gate: Gate) -> None:
    gate.open = True
    machine = still()
    async with open_bench(machine) as bench:
        request = fetch(idempotency_key="once")
        machine.chaos.plan[machine.chaos.calls] = "fail_after"
        with pytest.raises(OutcomeUnknown):
            await bench.engine.import_image(request)
        with anyio.fail_after(30):
            assert (await bench.engine.import_image(request)).sha256 == SHA256
        assert gate.begun == 1
