"""A VM is deleted from any state, and no live process of it is ever forgotten."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from unittest.mock import patch

import anyio
import pytest

from chv.common.errors import DeadlineExceeded, InUse, Unavailable
from chv.common.process.records import AdoptVerdict
from chv.common.wire import agent as api
from chv.common.wire.agent_clone import CloneVm
from chv.common.wire.agent_node import ActOnNode, NodeVerb
from chv.common.wire.agent_rebuild import RebuildVm
from tests.sim.bench import Bench, everything, image, manifest, open_bench, vm
from tests.sim.virtual import simulated
from tests.sim.vmms import SimProcess, SimVmms

Bring = Callable[[Bench], Awaitable[None]]


async def run(bench: Bench) -> None:
    await bench.apply(*everything())
    await bench.until("VMMRunning")


async def pending(bench: Bench) -> None:
    late = {"disk": {"sha256": "0" * 64, "format": "raw"}}
    root = {"size": "64Mi", "format": "raw", "source": {"image": "late"}}
    kept = [each for each in everything() if each["kind"] != "Volume"]
    await bench.apply(*kept, manifest("Image", "late", late), manifest("Volume", "data", root))


async def paused(bench: Bench) -> None:
    await run(bench)
    await bench.final((await bench.act("pause")).id)


async def stopping(bench: Bench) -> None:
    await run(bench)
    await bench.act("stop")


async def failed(bench: Bench) -> None:
    await run(bench)
    for _ in range(20):
        process = bench.process()
        if process is not None:
            bench.machine.host.die(process)
        try:
            await bench.until("phase=Failed", timeout_s=10.0)
        except DeadlineExceeded:
            continue
        return


async def without_storage(bench: Bench) -> None:
    await run(bench)
    bench.machine.host.lose_storage(bench.engine.vm_uid("web", "default"))


async def rebuilt(bench: Bench) -> None:
    await run(bench)
    await bench.engine.rebuild(RebuildVm(name="web", image="tiny", requester="test"))


async def drained(bench: Bench) -> None:
    await run(bench)
    await bench.engine.node.act(ActOnNode(verb=NodeVerb.DRAIN, requester="ann", reason="x"))


STATES: list[Bring] = [
    pending, paused, stopping, failed, without_storage, rebuilt, drained,
]  # fmt: skip


@pytest.mark.parametrize("bring", STATES, ids=lambda each: each.__name__)
def test_it_is_deleted_and_leaves_no_process_session_or_file(bring: Bring) -> None:
    @simulated
    async def deleted() -> None:
        async with open_bench(restarts_max=1) as bench:
            await bring(bench)
            uid = bench.engine.vm_uid("web", "default")
            final = await bench.final((await bench.delete("VirtualMachine", "web")).id, 300.0)
            assert final.state.value == "Succeeded", final.message
            host = bench.machine.host
            assert host.live(uid) is None
            assert uid not in host.stord.sessions
            assert uid not in host.seeds and uid not in host.dirs
            assert uid not in bench.machine.store.tables.workers
            assert not bench.machine.violations

    deleted()


@simulated
async def test_while_its_disks_are_being_taken_it_is_refused_and_says_for_what() -> None:
    async with open_bench() as bench:
        await run(bench)
        await bench.apply(manifest("VolumeSnapshot", "snap", {"virtualMachine": "web"}))
        with pytest.raises(InUse, match="VolumeSnapshot default/snap"):
            await bench.delete("VirtualMachine", "web")
        await bench.until("Ready", "snap", "VolumeSnapshot")
        await bench.engine.clone(CloneVm(name="web", new_name="two", requester="test"))
        with pytest.raises(InUse, match="VolumeSnapshot default/two-source"):
            await bench.delete("VirtualMachine", "web")
        await bench.until("Ready", "two-source", "VolumeSnapshot")
        final = await bench.final((await bench.delete("VirtualMachine", "web")).id)
        assert final.state.value == "Succeeded", final.message
        assert bench.process("two") is not None or await bench.until("VMMRunning", "two")


def silent(_: str) -> SimProcess:
    raise Unavailable("no monitor answers")


@simulated
async def test_one_whose_monitor_is_silent_is_killed_and_then_deleted() -> None:
    async with open_bench() as bench:
        await run(bench)
        uid = bench.engine.vm_uid("web", "default")
        with patch.object(bench.machine.host, "monitor", silent):
            await anyio.sleep(60)
            assert bench.get("VirtualMachine", "web").status.phase == "Unknown"
            final = await bench.final((await bench.delete("VirtualMachine", "web")).id, 300.0)
        assert final.state.value == "Succeeded", final.message
        assert bench.machine.host.live(uid) is None


@simulated
async def test_one_that_cannot_be_judged_is_kept_until_it_can_be() -> None:
    """In doubt about the process nothing is forgotten: neither its record nor the VM."""
    async with open_bench() as bench:
        await run(bench)
        uid = bench.engine.vm_uid("web", "default")

        async def unknown(*_: object) -> AdoptVerdict:
            return AdoptVerdict.UNKNOWN

        with patch.object(SimVmms, "verify", unknown):
            operation = await bench.delete("VirtualMachine", "web")
            with pytest.raises(DeadlineExceeded):
                await bench.final(operation.id, 120.0)
            assert uid in bench.machine.store.tables.workers
            assert bench.machine.host.live(uid) is not None
            assert bench.get("VirtualMachine", "web").status.phase == "Unknown"
        final = await bench.final(operation.id, 120.0)
        assert final.state.value == "Succeeded", final.message
        assert bench.machine.host.live(uid) is None


@simulated
async def test_a_vmm_that_no_record_explains_holds_the_deletion_up() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), vm(disks=[], interfaces=[], runStrategy="Halted"))
        await bench.until("phase=Stopped")
        uid = bench.engine.vm_uid("web", "default")
        context = bench.engine._context
        context.strangers[uid.replace("-", "")[:10]] = "worker-x"

        async def lives(*_: object) -> object:
            return object()

        with patch.object(SimVmms, "find", lives):
            operation = await bench.delete("VirtualMachine", "web")
            with pytest.raises(DeadlineExceeded):
                await bench.final(operation.id, 60.0)
            found = bench.engine.get(api.ObjectRef(kind="VirtualMachine", name="web"))
            assert found is not None
        assert (await bench.final(operation.id, 60.0)).state.value == "Succeeded"
