"""A node with a control plane: what it takes, what it refuses while cut off, what it reports."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest

from chv.agent.engine import Engine
from chv.agent.ports import Limits
from chv.agent.upstream.port import Session
from chv.common.errors import FailedPrecondition, InvalidArgument, Unsupported
from chv.common.ids import Ids
from chv.common.wire import agent as api
from chv.common.wire.upstream import ReportKind
from tests.sim.bench import Bench, bare, everything, image, open_bench
from tests.sim.chaos import Chaos
from tests.sim.upstream import Plane, PlaneUpstream
from tests.sim.virtual import simulated
from tests.sim.world import Machine

IMAGE, WEB, OTHER = (Ids(number).uid() for number in (8, 9, 10))
SELDOM = Limits(monitor_s=3600.0, resync_s=3600.0)  # looks at the world, over days


def machine_of(plane: Plane, limits: Limits | None = None) -> Machine:
    machine = Machine(1, Chaos(random.Random(1), delays_s=(0.0,)), limits)
    machine.chaos.quiet = True
    machine.host.stord.mishaps = False
    machine.upstream = lambda chaos: PlaneUpstream(plane, chaos)
    return machine


@asynccontextmanager
async def managed(
    plane: Plane | None = None, limits: Limits | None = None
) -> AsyncIterator[tuple[Bench, Plane]]:
    """A node whose plane wants a VM, which runs."""
    plane = plane or Plane()
    plane.wanted_as(IMAGE, image(), 1)
    plane.wanted_as(WEB, bare(), 3)
    async with open_bench(machine_of(plane, limits)) as bench:
        await until(lambda: bench.machine.store.tables.assignments.keys() == {IMAGE, WEB})
        await bench.until("VMMRunning")
        yield bench, plane


async def until(holds: Any, timeout_s: float = 120.0) -> None:
    with anyio.fail_after(timeout_s):
        while not holds():  # noqa: ASYNC110
            await anyio.sleep(0.25)


async def cut_off(bench: Bench, plane: Plane) -> None:
    plane.cut = True
    await until(lambda: not bench.engine.upstream.link.connected)


async def healed(bench: Bench, plane: Plane) -> None:
    plane.cut = False
    await until(lambda: bench.engine.upstream.link.session and not waiting(bench))


def waiting(bench: Bench) -> list[Any]:
    return list(bench.machine.store.tables.outbox.values())


def strategy(bench: Bench) -> str:
    return str(bench.get("VirtualMachine", "web").spec.run_strategy)


@simulated
async def test_what_the_plane_wants_runs_under_its_uid_and_is_reported() -> None:
    async with managed() as (bench, plane):
        assert bench.engine.vm_uid("web", "default") == WEB
        await until(lambda: WEB in plane.statuses and not waiting(bench))
        assert plane.statuses[WEB].generation == 3
        verbs = {r.operation.verb for r in plane.outcomes.values() if r.operation is not None}
        assert verbs == {"create"}
        assert not plane.problems


@simulated
async def test_newer_generation_is_taken_equal_changes_nothing_older_is_refused() -> None:
    async with managed() as (bench, plane):
        plane.wanted_as(WEB, bare(cpus=2), 4)
        await until(lambda: bench.get("VirtualMachine", "web").spec.cpus == 2)
        plane.tell(msgspec.structs.replace(plane.wanted[WEB], generation=3))
        plane.wanted_as(WEB, bare(cpus=1), 4)  # another content under the same number: not believed
        await until(lambda: any(r.kind is ReportKind.REFUSED for r in plane.reports))
        await anyio.sleep(10)
        assert bench.get("VirtualMachine", "web").spec.cpus == 2
        (refused,) = [r for r in plane.reports if r.kind is ReportKind.REFUSED]
        assert refused.error is not None
        assert (refused.error.code, refused.generation) == ("STALE_GENERATION", 3)


@simulated
async def test_deletion_is_done_and_told_and_an_object_no_longer_listed_is_kept() -> None:
    async with managed() as (bench, plane):
        plane.wanted_as(WEB, bare(), 4, deleting=True)
        await until(lambda: WEB in plane.gone)
        del plane.wanted[IMAGE]
        plane.cut = True
        await anyio.sleep(60)
        await healed(bench, plane)
        assert IMAGE in bench.machine.store.tables.objects
        (condition,) = [c for c in bench.engine.upstream.conditions() if c.type == "UpstreamAgrees"]
        assert (condition.status, condition.reason) == ("False", "NotListed")
        assert condition.since


@simulated
async def test_what_is_refused_is_told_and_taken_once_it_can_be() -> None:
    plane = Plane()
    async with managed(plane) as (bench, _):
        wrong = {**bare("other"), "spec": {**bare("other")["spec"], "boot": {"image": "late"}}}
        plane.wanted_as(OTHER, wrong, 1)
        await until(lambda: any(r.uid == OTHER for r in plane.reports))
        assert next(r for r in plane.reports if r.uid == OTHER).kind is ReportKind.REFUSED
        await bench.apply(image("late"))  # the node's own
        await until(lambda: OTHER in plane.statuses)
        assert sum(r.uid == OTHER and r.kind is ReportKind.REFUSED for r in plane.reports) == 1


@simulated
async def test_what_is_the_nodes_own_is_not_taken_over_and_a_uid_keeps_its_name() -> None:
    async with managed() as (bench, plane):
        await bench.apply(image("own"))
        own = bench.get("Image", "own").metadata.uid
        plane.wanted_as(OTHER, image("own"), 1)  # its name
        plane.wanted_as(own, image("own"), 9)  # its uid
        plane.wanted_as(IMAGE, image("renamed"), 2)
        await until(lambda: len(refusals(plane)) == 3)
        assert {uid: report.error.code for uid, report in refusals(plane).items()} == {
            OTHER: "OWNERSHIP_CONFLICT",
            own: "OWNERSHIP_CONFLICT",
            IMAGE: "CONFLICT",
        }
        plane.wanted_as(own, image("own"), 10, deleting=True)
        await until(lambda: refusals(plane)[own].generation == 10)
        assert not bench.get("Image", "own").metadata.deletion_timestamp


def refusals(plane: Plane) -> dict[str, Any]:
    return {report.uid: report for report in plane.reports if report.kind is ReportKind.REFUSED}


# --- cut off


@simulated
async def test_short_silence_is_no_partition_and_a_long_one_is_told() -> None:
    async with managed() as (bench, plane):
        plane.cut = True
        await anyio.sleep(20)
        condition = bench.engine.upstream.conditions()[0]
        assert (condition.status, condition.reason) == ("True", "Reconnecting")
        await bench.apply(image("second"))
        await anyio.sleep(40)
        condition = bench.engine.upstream.conditions()[0]
        assert (condition.type, condition.status) == ("UpstreamConnected", "False")
        assert condition.reason == "Silent"


@simulated
async def test_cut_off_the_vm_runs_on_and_is_healed_and_nothing_new_is_made() -> None:
    async with managed() as (bench, plane):
        await cut_off(bench, plane)
        with pytest.raises(FailedPrecondition, match="control plane"):
            await bench.apply(bare("more"))
        with pytest.raises(FailedPrecondition):
            await bench.apply(bare(cpus=2))
        first = bench.process()
        assert first is not None
        bench.machine.host.die(first)
        await until(lambda: bench.process() not in (None, first))
        for verb in ("pause", "resume", "reset", "restart"):
            await bench.final((await bench.act(verb)).id)


@simulated
async def test_agent_that_begins_cut_off_has_not_seen_its_plane() -> None:
    async with managed() as (bench, plane):
        machine = bench.machine
        plane.cut = True
    async with open_bench(machine) as bench:
        assert bench.engine.upstream.conditions()[0].reason == "NotYetSeen"
        with pytest.raises(FailedPrecondition):
            await bench.apply(image("second"))
        assert bench.process() is not None


@simulated
async def test_stop_on_the_spot_holds_until_a_newer_generation_and_start_takes_it_back() -> None:
    async with managed() as (bench, plane):
        await cut_off(bench, plane)
        await bench.final((await bench.act("stop", reason="smoke")).id)
        assert bench.machine.store.tables.assignments[WEB].override == "stop by test: smoke"
        await healed(bench, plane)
        await anyio.sleep(60)
        assert (strategy(bench), plane.statuses[WEB].override) == ("Halted", "stop by test: smoke")
        assert plane.statuses[WEB].generation == 3
        await cut_off(bench, plane)
        await bench.act("start")
        await bench.until("VMMRunning")
        assert bench.machine.store.tables.assignments[WEB].override == ""
        await bench.final((await bench.act("stop")).id)
        await healed(bench, plane)
        plane.wanted_as(WEB, bare(), 4)
        await until(lambda: bench.process() is not None)
        await until(
            lambda: plane.statuses[WEB].generation == 4 and not plane.statuses[WEB].override
        )


@simulated
async def test_cut_off_nothing_starts_that_the_plane_wanted_halted() -> None:
    async with managed() as (bench, plane):
        plane.wanted_as(WEB, bare(runStrategy="Halted"), 4)
        await until(lambda: bench.process() is None)
        await cut_off(bench, plane)
        for verb in ("start", "restart"):
            with pytest.raises(FailedPrecondition):
                await bench.act(verb)


@simulated
async def test_cut_off_a_deletion_is_forced_by_name_and_reason_or_not_done() -> None:
    async with managed() as (bench, plane):
        await cut_off(bench, plane)
        asked = api.DeleteObject(kind="VirtualMachine", name="web", requester="ann")
        with pytest.raises(FailedPrecondition):
            await bench.engine.delete(asked)
        with pytest.raises(InvalidArgument, match="reason"):
            await bench.engine.delete(msgspec.structs.replace(asked, force=True))
        forced = msgspec.structs.replace(asked, force=True, reason="it burns")
        operation = (await bench.engine.delete(forced)).operation
        await bench.final(operation.id)
        await healed(bench, plane)
        told = plane.outcomes[operation.id].operation
        assert told is not None
        assert (told.requester, told.reason) == ("ann", "it burns")
        assert WEB in plane.gone


@simulated
async def test_own_api_as_control_plane_has_no_reports_and_nothing_to_force() -> None:
    async with open_bench() as bench:
        await bench.apply(*everything())
        await bench.until("VMMRunning")
        assert not waiting(bench)
        condition = bench.engine.upstream.conditions()[0]
        assert (condition.status, condition.reason) == ("True", "Embedded")
        asked = api.DeleteObject(
            kind="VirtualMachine", name="web", requester="ann", force=True, reason="x"
        )
        with pytest.raises(Unsupported, match="its own control plane"):
            await bench.engine.delete(asked)


# --- reports


@simulated
async def test_hour_of_reports_waits_coalesced_and_goes_in_order() -> None:
    async with managed(limits=SELDOM) as (bench, plane):
        await until(lambda: not waiting(bench))
        await cut_off(bench, plane)
        known = set(plane.outcomes)
        done = []
        for _ in range(4):
            for verb in ("stop", "start"):
                operation = await bench.act(verb)
                await bench.final(operation.id)
                done.append(operation.id)
            await anyio.sleep(900)
        kinds = [report.kind for report in waiting(bench)]
        assert kinds.count(ReportKind.STATUS) == 1
        before = len(plane.reports)
        await healed(bench, plane)
        flushed = plane.reports[before:]
        assert [report.seq for report in flushed] == sorted(report.seq for report in flushed)
        told = [r.operation.id for r in flushed if r.operation is not None]
        assert [each for each in told if each in done] == done
        assert len(told) == len(set(told)) and not known & set(told)
        assert not plane.problems


class Buggy(PlaneUpstream):
    """A port that raises what no port may."""

    failures = 2

    async def follow(self, session: Session) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise ValueError("a bug")
        await super().follow(session)


@simulated
async def test_bug_of_a_port_is_told_and_ends_no_agent() -> None:
    plane = Plane()
    plane.wanted_as(IMAGE, image(), 1)
    machine = machine_of(plane)
    machine.upstream = lambda chaos: Buggy(plane)
    engine = Engine(machine.agent_store(), machine.world())
    await engine.load()
    await engine.recover()
    async with anyio.create_task_group() as group:
        await group.start(engine.run)
        await until(lambda: IMAGE in machine.store.tables.assignments)
        group.cancel_scope.cancel()
    assert engine.bugs() == ("upstream: ValueError('a bug')",) * 2
