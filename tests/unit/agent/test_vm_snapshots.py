"""Snapshots of whole VMs and restores on the simulated machine: one instant, or nothing at all."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from chv.agent.records import PutFacts
from chv.common.errors import FailedPrecondition, InUse, NotFound, Unsupported
from chv.common.wire.agent import OperationState
from chv.vmm.driver import VmmState
from tests.sim.bench import Bench, everything, manifest, open_bench, volume

DISKS = [{"name": "data", "volume": "data"}, {"name": "more", "volume": "more"}]


def whole(name: str = "s", vm: str = "web") -> dict[str, Any]:
    return manifest("VirtualMachineSnapshot", name, {"virtualMachine": vm})


async def running(bench: Bench) -> None:
    await bench.apply(*everything(disks=DISKS), volume("more"))
    await bench.until("VMMRunning")


async def take(bench: Bench, name: str = "s") -> Any:
    reply = await bench.apply(whole(name))
    return await bench.final(reply.results[0].operation_id)


async def test_memory_and_all_disks_are_taken_while_the_vm_stands_and_it_runs_on() -> None:
    async with open_bench() as bench:
        await running(bench)
        assert (await take(bench)).state is OperationState.SUCCEEDED
        status = bench.get("VirtualMachineSnapshot", "s").status
        assert status.phase == "Ready"
        assert status.vmm.sha256 == "ab" * 32
        assert [part.volume for part in status.volumes] == ["data", "more"]
        assert status.size_bytes == 4096
        process = bench.process()
        assert process is not None
        assert process.state is VmmState.RUNNING
        assert not bench.machine.violations


async def test_restored_vm_goes_on_with_the_disks_that_its_memory_knew() -> None:
    async with open_bench() as bench:
        await running(bench)
        await take(bench)
        before = bench.process()
        operation = await bench.act("restore", snapshot="s", force=True)
        ended = await bench.final(operation.id)
        assert ended.state is OperationState.SUCCEEDED, ended.message
        after = bench.process()
        assert after is not None
        assert after is not before
        assert (after.state, after.boots) == (VmmState.RUNNING, 0)
        assert not bench.machine.host.given
        assert not bench.machine.violations


async def test_what_runs_after_a_later_restart_is_a_normal_boot() -> None:
    async with open_bench() as bench:
        await running(bench)
        await take(bench)
        await bench.final((await bench.act("restore", snapshot="s", force=True)).id)
        await bench.final((await bench.act("restart")).id)
        process = bench.process()
        assert process is not None
        assert process.boots == 1
        assert not process.config.restore_dir


async def test_running_vm_is_not_restored_without_force() -> None:
    async with open_bench() as bench:
        await running(bench)
        await take(bench)
        with pytest.raises(FailedPrecondition, match="it runs"):
            await bench.act("restore", snapshot="s")


async def test_paused_vm_stays_paused_over_its_snapshot() -> None:
    async with open_bench() as bench:
        await running(bench)
        await bench.final((await bench.act("pause")).id)
        assert (await take(bench)).state is OperationState.SUCCEEDED
        process = bench.process()
        assert process is not None
        assert process.state is VmmState.PAUSED


async def test_vmm_that_cannot_save_is_refused_at_once() -> None:
    async with open_bench() as bench:
        await running(bench)
        bench.machine.host.no_saves = True
        with pytest.raises(Unsupported, match="cannot save memory"):
            await bench.apply(whole())


async def test_vm_that_does_not_run_has_no_memory_to_save() -> None:
    async with open_bench() as bench:
        await running(bench)
        await bench.final((await bench.act("stop")).id)
        ended = await take(bench)
        assert ended.state is OperationState.FAILED
        assert "does not run" in ended.message
        await bench.until("phase=Failed", "s", "VirtualMachineSnapshot")


async def test_other_binary_refuses_the_restore_and_the_vm_runs_on() -> None:
    async with open_bench() as bench:
        await running(bench)
        await take(bench)
        uid = bench.get("VirtualMachineSnapshot", "s").metadata.uid
        stored = bench.machine.store.tables.objects[uid]
        context = bench.engine._context  # the record is changed, as a lost binary cannot be here
        facts = stored.snapshot_facts
        assert facts is not None and facts.saved is not None
        other = msgspec.structs.replace(facts.saved, sha256="cd" * 32)
        await context.ledger.commit(
            PutFacts(uid=uid, facts=msgspec.structs.replace(facts, saved=other))
        )
        before = bench.process()
        with pytest.raises(FailedPrecondition, match="only that very file reads it"):
            await bench.act("restore", snapshot="s", force=True)
        assert bench.process() is before


async def test_later_snapshots_refuse_the_restore_and_are_named() -> None:
    async with open_bench() as bench:
        await running(bench)
        await take(bench)
        await take(bench, "later")
        with pytest.raises(FailedPrecondition, match="VirtualMachineSnapshot default/later"):
            await bench.act("restore", snapshot="s", force=True)


async def test_vm_with_other_disks_than_then_is_not_restored() -> None:
    async with open_bench() as bench:
        await running(bench)
        await take(bench)
        await bench.final((await bench.act("stop")).id)
        await bench.apply(*everything(disks=DISKS[:1]))
        with pytest.raises(FailedPrecondition, match="other disks"):
            await bench.act("restore", snapshot="s")


async def test_unknown_snapshot_is_not_found() -> None:
    async with open_bench() as bench:
        await running(bench)
        with pytest.raises(NotFound, match="no VirtualMachineSnapshot"):
            await bench.act("restore", snapshot="s", force=True)


async def test_vm_is_held_by_its_snapshots_and_deleted_after_them() -> None:
    async with open_bench() as bench:
        bench.machine.host.stord.job_s = (0.1,)
        await running(bench)
        await take(bench)
        for kind, name in (("VirtualMachine", "web"), ("Volume", "data")):
            with pytest.raises(InUse, match="VirtualMachineSnapshot default/s"):
                await bench.delete(kind, name)
        await bench.final((await bench.delete("VirtualMachineSnapshot", "s")).id)
        assert not bench.machine.host.saved
        await bench.final((await bench.delete("VirtualMachine", "web")).id)
