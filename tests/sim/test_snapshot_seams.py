"""A VM saved and restored, with a kill or an error at every seam: one instant, or nothing left."""

from __future__ import annotations

import pytest

from chv.common.errors import ChvError, NotFound
from tests.sim.bench import Bench, manifest
from tests.sim.test_every_seam import DELETED, KINDS, STRIDE, Life
from tests.sim.verdict import fail_with


class SavedLife(Life):
    """Made, saved, brought back, stopped, brought back again, deleted."""

    stages = ("create", "save", "restore", "stop", "restore_stopped", "delete")
    deleted = (("VirtualMachineSnapshot", "saved"), *DELETED)

    async def _save(self, bench: Bench) -> None:
        whole = manifest("VirtualMachineSnapshot", "saved", {"virtualMachine": "web"})
        await self._retried(lambda: bench.apply(whole, idempotency_key="save"))
        await self._idle(bench)
        process = bench.process()
        assert process is not None
        assert process.state.value == "running"

    async def _restore(self, bench: Bench) -> None:
        await self._restored(bench, "restore")

    async def _restore_stopped(self, bench: Bench) -> None:
        await self._restored(bench, "restore_stopped")

    async def _restored(self, bench: Bench, key: str) -> None:
        """A snapshot that failed is refused, which is an end too."""
        status = bench.get("VirtualMachineSnapshot", "saved").status
        if status is None or status.phase != "Ready":
            return
        await self._retried(
            lambda: bench.act("restore", snapshot="saved", force=True, idempotency_key=key)
        )
        await self._idle(bench)
        given_up = bench.condition("VMMRunning")[1] == "GivenUp"
        assert given_up or bench.process() is not None

    async def _delete(self, bench: Bench) -> None:
        await super()._delete(bench)
        for kind, name in self.deleted:
            with pytest.raises((NotFound, ChvError)):
                bench.get(kind, name)

    def _leftovers(self) -> list[str]:
        host = self.machine.host
        left = {"memory": host.saved, "given": host.given}
        return super()._leftovers() + [f"I4: {w} left: {t}" for w, t in left.items() if t]


def test_a_vm_is_saved_and_brought_back_without_faults() -> None:
    life = SavedLife({})
    assert not life.run()
    operations = life.machine.store.tables.operations.values()
    verbs = [(each.verb, each.state.value) for each in operations if each.verb == "restore"]
    assert verbs == [("restore", "Succeeded")] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_every_seam_of_save_and_restore_is_survived(kind: str) -> None:
    undisturbed = SavedLife({})
    undisturbed.run()
    found = []
    first = 2 * KINDS.index(kind) % STRIDE
    for number in range(first, undisturbed.machine.chaos.calls, STRIDE):
        life = SavedLife({number: kind})
        found += [f"{kind} at {number}: {problem}" for problem in life.run()]
    fail_with(found)
