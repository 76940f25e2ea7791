"""What is to pass and does not says so: phases, reasons, with progress, over an agent's end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import patch

import anyio
import pytest

from chv.common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    OutcomeUnknown,
    ResourceExhausted,
)
from chv.common.wire import agent as api
from chv.common.wire.agent import ObjectRef
from chv.common.wire.agent_node import ActOnNode, NodeVerb
from tests.sim.bench import Bench, everything, open_bench
from tests.sim.virtual import simulated
from tests.sim.vmms import SimGuests
from tests.sim.world import Machine
from tests.unit.agent.test_vm_life import started


def of(bench: Bench, kind: str, name: str, type_: str = "Ready") -> tuple[str, str, str]:
    """Return status, reason and message of a condition."""
    conditions = bench.get(kind, name).status.conditions
    return next((c.status.value, c.reason, c.message) for c in conditions if c.type == type_)


def refused(*_: object) -> None:
    raise ResourceExhausted("there is no room")


@asynccontextmanager
async def without_its_volume(machine: Machine | None = None) -> AsyncIterator[Bench]:
    """A VM that is to start, whose volume cannot be made."""
    async with open_bench(machine) as bench:
        with patch.object(bench.machine.host.stord, "_OpenVolume", refused):
            if machine is None:
                await bench.apply(*everything())
            yield bench


@simulated
async def test_a_vm_that_waits_for_a_volume_for_too_long_says_so_and_for_which() -> None:
    async with without_its_volume() as bench:
        await anyio.sleep(60)
        assert bench.condition("VolumesReady") == ("False", "VolumeNotReady")
        await anyio.sleep(120)
        assert of(bench, "VirtualMachine", "web", "VolumesReady")[1] == "VolumeNotReadyOverdue"
        status, reason, message = of(bench, "VirtualMachine", "web", "VMMRunning")
        assert (status, reason) == ("False", "PendingOverdue")
        since = bench.get("VirtualMachine", "web").status.phase_since
        assert message.startswith(f"Pending since {since}, more than 120 s")
        why = await bench.engine.why.why(ObjectRef(kind="VirtualMachine", name="web"))
        assert "VolumeNotReadyOverdue" in why.verdict
        assert "volume/data" in str(why.fixes)
        assert of(bench, "Volume", "data")[1] == "PendingOverdue"
        assert "ResourceExhausted: " in of(bench, "Volume", "data")[2]


@simulated
async def test_what_was_overdue_is_forgotten_once_it_has_passed() -> None:
    async with open_bench() as bench:
        with patch.object(bench.machine.host.stord, "_OpenVolume", refused):
            await bench.apply(*everything())
            await anyio.sleep(180)
            assert bench.condition("VMMRunning")[1] == "PendingOverdue"
        await bench.until("phase=Running")
        assert bench.condition("VMMRunning") == ("True", "Running")
        assert bench.condition("VolumesReady") == ("True", "Attached")
        assert of(bench, "Volume", "data")[:2] == ("True", "Open")


@simulated
async def test_a_step_that_does_not_end_is_overdue_though_no_pass_ends() -> None:
    async with open_bench() as bench:
        await started(bench)
        with patch.object(bench.machine.host, "die", ignored):
            await bench.act("stop")
            await anyio.sleep(30)
            assert not bench.condition("VMMRunning")[1].endswith("Overdue")
            await anyio.sleep(30)
            shown = bench.get("VirtualMachine", "web").status
            assert shown.phase == "Stopping"
            assert of(bench, "VirtualMachine", "web", "VMMRunning")[1] == "StoppingOverdue"
            assert "more than 40 s" in of(bench, "VirtualMachine", "web", "VMMRunning")[2]
        await bench.until("phase=Stopped")
        assert bench.condition("VMMRunning") == ("False", "Stopped")


def ignored(*_: object) -> None:
    """A process in the kernel's hands takes no signal."""


@simulated
async def test_a_phase_counts_on_over_an_end_of_the_agent() -> None:
    async with without_its_volume() as bench:
        machine = bench.machine
        await anyio.sleep(100)
        assert bench.condition("VMMRunning")[1] == "Starting"
    async with without_its_volume(machine) as bench:
        await anyio.sleep(35)
        assert bench.condition("VMMRunning")[1] == "PendingOverdue"


@simulated
async def test_what_a_silent_stord_knows_is_unknown_and_comes_back() -> None:
    async with open_bench() as bench:
        await started(bench)
        before = bench.get("Volume", "data").status.conditions
        seen = {each.type: each.last_probe_time for each in before}
        bench.machine.host.stord.down_until = bench.machine.host.now() + 100
        await anyio.sleep(60)
        for type_ in ("Ready", "SizeApplied", "SpaceAvailable"):
            assert of(bench, "Volume", "data", type_)[:2] == ("Unknown", "StorageUnavailable")
        for type_ in ("VolumesReady", "StorageLost"):
            assert bench.condition(type_) == ("Unknown", "StorageUnavailable")
        assert bench.condition("VMMRunning") == ("True", "Running")
        shown = bench.get("Volume", "data").status.conditions
        moments = {each.type: each.last_probe_time for each in shown}
        assert moments.keys() == seen.keys()
        assert all(moments[type_] >= seen[type_] for type_ in seen)
        assert len(set(moments.values())) == 1  # when it was known last, not when it was asked
        at = moments["Ready"]
        await anyio.sleep(20)
        again = bench.get("Volume", "data").status.conditions
        assert {each.last_probe_time for each in again} == {at}
        await anyio.sleep(60)
        assert of(bench, "Volume", "data")[:2] == ("True", "Open")
        assert bench.condition("VolumesReady") == ("True", "Attached")
        assert bench.condition("StorageLost") == ("False", "NeverLost")


@simulated
async def test_what_a_silent_nwd_knows_is_unknown_and_comes_back() -> None:
    async with open_bench() as bench:
        await started(bench)
        await bench.until("SSHReady")
        bench.machine.host.nwd.down_until = bench.machine.host.now() + 150
        await anyio.sleep(60)
        assert of(bench, "Network", "net")[:2] == ("Unknown", "NetworkUnavailable")
        assert bench.condition("NetworkReady") == ("Unknown", "NetworkUnavailable")
        assert bench.condition("VMMRunning") == ("True", "Running")
        await anyio.sleep(150)
        assert of(bench, "Network", "net")[:2] == ("True", "InKernel")
        assert bench.condition("NetworkReady") == ("True", "Attached")
        assert bench.condition("SSHReady") == ("True", "Banner")


@simulated
async def test_evidence_carries_the_moment_when_it_was_seen_and_lists_their_age() -> None:
    async with open_bench() as bench:
        await started(bench)
        await anyio.sleep(5)
        first = probed(bench, "VMMRunning")
        await anyio.sleep(60)
        assert probed(bench, "VMMRunning") > first  # nothing changed, it was looked at
        reply = bench.engine.list(api.ListObjects(kind="VirtualMachine"))
        assert len(reply.ages_s) == len(reply.items) == 1
        assert 0 <= reply.ages_s[0] <= 31


def probed(bench: Bench, type_: str) -> str:
    conditions = bench.get("VirtualMachine", "web").status.conditions
    return str(next(each.last_probe_time for each in conditions if each.type == type_))


@simulated
async def test_nothing_is_remembered_of_what_is_gone() -> None:
    async with open_bench() as bench:
        for result in (await bench.apply(*everything())).results:
            await bench.final(result.operation_id)
        await bench.until("phase=Running")
        for kind, name in (("VirtualMachine", "web"), ("Volume", "data"), ("Image", "tiny")):
            await bench.final((await bench.delete(kind, name)).id)
        await anyio.sleep(1)
        context = bench.engine._context
        left = {stored.uid for stored in context.ledger.tables.objects.values()}
        assert set(context.probed) <= left
        assert set(context.seen_at) <= left
        assert {uid for uid, _ in context.deadlines._since} <= left


@simulated
async def test_waiting_for_a_condition_that_is_unknown_can_be_asked_for() -> None:
    async with open_bench() as bench:
        await started(bench)
        bench.machine.host.stord.down_until = bench.machine.host.now() + 100
        await bench.until("VolumesReady", status="Unknown", timeout_s=60)
        with pytest.raises(DeadlineExceeded, match=r"VolumesReady is Unknown \(StorageUnavail"):
            await bench.until("VolumesReady", timeout_s=1)


@simulated
async def test_a_stopped_vm_that_has_no_disk_attached_is_not_late() -> None:
    async with open_bench() as bench:
        await started(bench)
        await bench.final((await bench.act("stop")).id)
        await anyio.sleep(300)
        assert bench.condition("VolumesReady") == ("False", "NotAttached")


@simulated
async def test_a_vm_whose_volume_has_failed_says_so_and_why() -> None:
    def unfit(*_: object) -> None:
        raise InvalidArgument("it is no qcow2")

    async with open_bench() as bench:
        with patch.object(bench.machine.host.stord, "_OpenVolume", unfit):
            await bench.apply(*everything())
            await anyio.sleep(20)
            assert bench.get("Volume", "data").status.phase == "Failed"
            status, reason, message = of(bench, "VirtualMachine", "web", "VolumesReady")
            assert (status, reason) == ("False", "VolumeNotReady")
            assert "volume data has failed: " in message
            assert "it is no qcow2" in message


@simulated
async def test_a_wait_for_what_only_a_person_can_change_fails_at_once() -> None:
    async with open_bench() as bench:
        await started(bench, guestPorts=[80])
        await bench.until("GuestBooted")
        with pytest.raises(FailedPrecondition, match=r"22 is not in spec\.guestPorts"):
            await bench.until("SSHReady", timeout_s=600)
        await bench.engine.node.act(
            ActOnNode(verb=NodeVerb.MAINTENANCE, requester="test", reason="a look")
        )
        with pytest.raises(FailedPrecondition) as caught:
            await bench.until("VMMRunning", status="True", timeout_s=600)
            await anyio.sleep(60)
            await bench.until("VMMRunning", status="True", timeout_s=600)
        assert caught.value.hint == "chv node resume"


@simulated
async def test_a_banner_that_nobody_could_ask_for_lately_is_unknown() -> None:
    async def unasked(*_: object) -> str:
        raise OutcomeUnknown("nwd is away")

    async with open_bench() as bench:
        machine = bench.machine
        await started(bench)
        await bench.until("SSHReady")
        with patch.object(SimGuests, "probe_ssh", unasked):
            await anyio.sleep(110)
            assert bench.condition("SSHReady") == ("Unknown", "NotHeard")
            assert bench.condition("GuestBooted")[0] == "True"  # of this boot that stays
            last = probed(bench, "SSHReady")
            await anyio.sleep(20)
            assert probed(bench, "SSHReady") == last
        await bench.until("SSHReady", timeout_s=60)
    with patch.object(SimGuests, "probe_ssh", unasked):
        machine.host.nwd.down_until = machine.host.now() + 100
        async with open_bench(machine) as bench:  # what an earlier agent has heard is old by now
            await bench.until("SSHReady", status="Unknown", timeout_s=30)
