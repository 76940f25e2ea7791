"""Imports, cancels and queues with a kill or an error at every seam: each operation ends once.

What an operation has come to is what is there: an Image whose artifact is stored, or neither.
"""

from __future__ import annotations

import os

import anyio
import pytest

from chv.common.errors import ChvError, FailedPrecondition, NotFound
from chv.common.wire import agent as api
from chv.common.wire.agent import Operation, OperationState
from chv.common.wire.agent_clone import CloneVm
from tests.sim.bench import Bench, bare, everything, image
from tests.sim.test_every_seam import KINDS, Life
from tests.sim.verdict import fail_with

STAGES = ("create", "fetch", "cancelled_fetch", "collect", "starts", "cancelled_clone", "delete")
STRIDE = int(os.environ.get("CHV_SIM_STRIDE", "1" if "CHV_LONG" in os.environ else "40"))
SUM, OTHER = "d" * 64, "f" * 64
NAMES = ("one", "two", "three")
DELETED = (
    *(("VirtualMachine", name) for name in ("web", *NAMES)),
    ("Volume", "data"),
    ("Network", "net"),
    ("Image", "far"),
    ("Image", "never"),
    ("Image", "tiny"),
)


class OperationLife(Life):
    """Of operations that are not a VM's own, and of those that are cancelled before they begin."""

    stages = STAGES
    deleted = DELETED

    async def _create(self, bench: Bench) -> None:
        await self._retried(lambda: bench.apply(*everything(), idempotency_key="create"))
        halted = [bare(name, runStrategy="Halted") for name in NAMES]
        await self._retried(lambda: bench.apply(image(), *halted, idempotency_key="vms"))
        await bench.until("VMMRunning", timeout_s=600)
        await self._idle(bench)

    async def _fetch(self, bench: Bench) -> None:
        ended = await self._asked(bench, "far", SUM)
        assert ended is not None
        there = self._image("far")
        if ended.state is OperationState.SUCCEEDED:
            await bench.until("Ready", "far", "Image", timeout_s=600)
            assert SUM in self.machine.host.artifacts
        else:
            assert not there, f"{ended.state}: {ended.message}"
        await self._idle(bench)

    async def _cancelled_fetch(self, bench: Bench) -> None:
        request = self._request("never", OTHER)
        async with anyio.create_task_group() as group:
            group.start_soon(self._quietly, bench, request)
            operation = await self._found(bench, "never")
            group.cancel_scope.cancel()
        if operation is None:
            operation = await self._asked(bench, "never", OTHER)
        assert operation is not None
        await self._cancel(bench, operation)
        ended = await bench.final(operation.id, 600)
        assert self._image("never") == (ended.state is OperationState.SUCCEEDED), ended
        await self._idle(bench)

    async def _collect(self, bench: Bench) -> None:
        request = api.CollectImages(requester="sim", idempotency_key="collect")
        try:
            await self._retried(lambda: bench.engine.collect_images(request))
        except AssertionError:  # its failure is what is remembered under its key
            await bench.engine.collect_images(api.CollectImages(requester="sim"))
        await self._idle(bench)

    async def _starts(self, bench: Bench) -> None:
        """A queue of starts, of which one is taken back where that is not too late."""
        for name in NAMES:
            await self._retried(
                lambda name=name: bench.act("start", name, idempotency_key=f"start {name}")
            )
        key = f"start {NAMES[-1]}"
        last = await bench.act("start", NAMES[-1], idempotency_key=key)
        await self._cancel(bench, last)
        await self._idle(bench)
        ended = await bench.final(last.id, 600)
        if ended.state is OperationState.CANCELLED:
            assert bench.process(NAMES[-1]) is None

    async def _cancelled_clone(self, bench: Bench) -> None:
        request = CloneVm(name="web", new_name="copy", requester="sim", idempotency_key="clone")
        await self._retried(lambda: bench.engine.clone(request))
        operation = (await bench.engine.clone(request)).operation
        await self._cancel(bench, operation)
        await self._idle(bench)
        ended = await bench.final(operation.id, 600)
        there = self.machine.store.tables.find("VirtualMachine", "default", "copy") is not None
        assert there == (ended.state is OperationState.SUCCEEDED), ended
        if there:
            await self._gone(bench, ("VirtualMachine", "copy"), ("Volume", "copy-data"))

    async def _gone(self, bench: Bench, *targets: tuple[str, str]) -> None:
        for kind, name in targets:
            await self._retried(lambda kind=kind, name=name: bench.delete(kind, name))
            await bench.until("deleted", name, kind, timeout_s=600)

    # --- words

    @staticmethod
    def _request(name: str, sha256: str) -> api.FetchImage:
        return api.FetchImage(
            name=name,
            url=f"https://host/{name}",
            sha256=sha256,
            requester="sim",
            idempotency_key=name,
        )

    async def _asked(self, bench: Bench, name: str, sha256: str) -> Operation | None:
        """Ask until it has ended, however."""
        for _ in range(20):
            await self._quietly(bench, self._request(name, sha256))
            found = await self._found(bench, name)
            if found is not None and found.ended_at:
                return found
            await anyio.sleep(1)
        return await self._found(bench, name)

    @staticmethod
    async def _quietly(bench: Bench, request: api.FetchImage) -> None:
        try:
            await bench.engine.import_image(request)
        except ChvError:
            return

    async def _found(self, bench: Bench, name: str) -> Operation | None:
        for _ in range(5):
            operations = self.machine.store.tables.operations.values()
            found = [each for each in operations if (each.verb, each.name) == ("import", name)]
            if found:
                return found[-1]
            await anyio.sleep(0.001)
        return None

    async def _cancel(self, bench: Bench, operation: Operation) -> None:
        request = api.CancelOperation(operation_id=operation.id, requester="sim")
        try:
            await self._retried(lambda: bench.engine.cancel(request))
        except (AssertionError, FailedPrecondition, NotFound):
            return  # too late, five times over

    def _image(self, name: str) -> bool:
        return self.machine.store.tables.find("Image", "default", name) is not None


def test_a_life_of_operations_without_faults_ends_each_as_it_should() -> None:
    life = OperationLife({})
    assert not life.run()
    states = {
        (each.verb, each.name): each.state.value
        for each in life.machine.store.tables.operations.values()
        if each.verb in ("import", "collect_images", "clone")
    }
    assert states[("import", "far")] == states[("collect_images", "node")] == "Succeeded"
    assert states[("clone", "copy")] == "Cancelled"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_every_seam_of_them_is_survived(kind: str) -> None:
    undisturbed = OperationLife({})
    undisturbed.run()
    first, last = undisturbed.spans["fetch"][0], undisturbed.spans["cancelled_clone"][1]
    found = []
    for number in range(first + 3 * KINDS.index(kind) % STRIDE, last, STRIDE):
        life = OperationLife({number: kind})
        found += [f"{kind} at {number}: {problem}" for problem in life.run()]
    fail_with(found)
