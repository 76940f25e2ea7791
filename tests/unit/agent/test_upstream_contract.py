"""One contract, two control planes: one in memory and virtual time, one in a process of its own.

The agent's code is the real one, over a simulated machine.
"""

from __future__ import annotations

import random
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import anyio
import msgspec
import pytest

from chv.agent.upstream.port import Upstream
from chv.agent.upstream.records import PutReport
from chv.common import virtual_time
from chv.common.errors import ChvError, FailedPrecondition, Unavailable
from chv.common.ids import Ids
from chv.common.rpc import connect
from chv.common.wire.types import Empty
from chv.common.wire.upstream import NodeView, Report, ReportKind, Wanted
from tests.doubles.control_plane import CUT, GET_TOLD, WANT, Cut, RpcUpstream, Want
from tests.sim.bench import Bench, bare, image, open_bench
from tests.sim.chaos import Chaos
from tests.sim.upstream import Plane, PlaneUpstream
from tests.sim.world import Machine

IMAGE, WEB = (Ids(number).uid() for number in (8, 9))
WAIT_S = 60.0


class Harness(Protocol):
    """What a test does to a control plane."""

    def upstream(self, chaos: Chaos) -> Upstream: ...
    async def want(self, wanted: Wanted, *, remember: bool = True) -> None: ...
    async def cut(self, *, cut: bool, lossy: bool = False) -> None: ...
    async def told(self) -> list[Report]: ...


class MemoryHarness:
    def __init__(self) -> None:
        self.plane = Plane()

    def upstream(self, chaos: Chaos) -> Upstream:
        return PlaneUpstream(self.plane)

    async def want(self, wanted: Wanted, *, remember: bool = True) -> None:
        if remember:
            self.plane.wanted[wanted.uid] = wanted
        self.plane.tell(wanted)

    async def cut(self, *, cut: bool, lossy: bool = False) -> None:
        self.plane.cut, self.plane.lossy = cut, lossy

    async def told(self) -> list[Report]:
        assert not self.plane.problems
        return list(self.plane.reports)


class RpcHarness:
    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def upstream(self, chaos: Chaos) -> Upstream:
        return RpcUpstream(self._socket)

    async def want(self, wanted: Wanted, *, remember: bool = True) -> None:
        async with connect(self._socket) as client:
            await client.call(WANT, Want(wanted=wanted, remember=remember))

    async def cut(self, *, cut: bool, lossy: bool = False) -> None:
        async with connect(self._socket) as client:
            await client.call(CUT, Cut(cut=cut, lossy=lossy))

    async def told(self) -> list[Report]:
        async with connect(self._socket) as client:
            return list((await client.call(GET_TOLD, Empty())).reports)


@asynccontextmanager
async def in_memory(path: Path) -> AsyncIterator[Harness]:
    yield MemoryHarness()


@asynccontextmanager
async def over_a_process(path: Path) -> AsyncIterator[Harness]:
    socket = path / "plane.sock"
    command = [sys.executable, "-m", "tests.doubles.control_plane", str(socket)]
    async with await anyio.open_process(command, stdout=None, stderr=None) as process:
        harness = RpcHarness(socket)
        await until(lambda: _answers(harness))
        try:
            yield harness
        finally:
            process.kill()


async def _answers(harness: RpcHarness) -> bool:
    try:
        await harness.told()
    except ChvError:
        return False
    return True


async def until(holds: Callable[[], Any]) -> None:
    """Wait until it is so; what it awaits is awaited."""
    with anyio.fail_after(WAIT_S):
        while not await holds():  # noqa: ASYNC110  it asks another process
            await anyio.sleep(0.05)


def wanted(
    uid: str, manifest: dict[str, Any], generation: int, *, deleting: bool = False
) -> Wanted:
    raw = msgspec.Raw(msgspec.json.encode(manifest))
    return Wanted(uid=uid, generation=generation, object=raw, deleting=deleting)


def machine_of(harness: Harness) -> Machine:
    machine = Machine(1, Chaos(random.Random(1), delays_s=(0.0,)))
    machine.chaos.quiet = True
    machine.host.stord.mishaps = False
    machine.upstream, machine.grace_s = harness.upstream, 2.0
    return machine


async def has(harness: Harness, check: Callable[[Report], bool]) -> bool:
    return any(check(report) for report in await harness.told())


def waits(bench: Bench) -> bool:
    return bool(bench.machine.store.tables.outbox)


# --- the contract


async def takes_wanted_objects_and_reports_them(harness: Harness) -> None:
    await harness.want(wanted(IMAGE, image(), 1))
    async with open_bench(machine_of(harness)) as bench:
        await harness.want(wanted(WEB, bare(), 3))
        running = _status(WEB, 3, b"Running")
        await until(lambda: has(harness, running))
        assert bench.engine.vm_uid("web", "default") == WEB
        await until(lambda: has(harness, lambda r: _is_of(r, "create", WEB)))
        assert await has(harness, lambda r: _is_of(r, "create", IMAGE))


async def believes_newer_generations_alone(harness: Harness) -> None:
    await harness.want(wanted(IMAGE, image(), 1))
    await harness.want(wanted(WEB, bare(), 3))
    async with open_bench(machine_of(harness)) as bench:
        await until(lambda: has(harness, _status(WEB, 3, b"Running")))
        for generation in (4, 3, 4):  # newer, older, equal
            cpus = 2 if generation == 4 else 1
            await harness.want(wanted(WEB, bare(cpus=cpus), generation), remember=False)
        await harness.want(wanted(WEB, bare(cpus=2), 4))
        await until(lambda: has(harness, _refused(WEB, 3)))
        await until(lambda: has(harness, _status(WEB, 4, b"")))
        assert bench.get("VirtualMachine", "web").spec.cpus == 2


async def catches_up_after_more_than_is_remembered(harness: Harness) -> None:
    await harness.want(wanted(IMAGE, image(), 1))
    async with open_bench(machine_of(harness)) as bench:
        await until(lambda: has(harness, _status(IMAGE, 1, b"")))
        await harness.cut(cut=True)
        for generation in range(2, 22):
            labelled = {**image(), "metadata": {"name": "tiny", "labels": {"n": str(generation)}}}
            await harness.want(wanted(IMAGE, labelled, generation))
        await harness.cut(cut=False)
        await until(lambda: has(harness, _status(IMAGE, 21, b"")))
        assert bench.get("Image", "tiny").metadata.labels == {"n": "21"}


async def cut_off_takes_nothing_and_tells_all_afterwards(harness: Harness) -> None:
    await harness.want(wanted(IMAGE, image(), 1))
    await harness.want(wanted(WEB, bare(), 3))
    async with open_bench(machine_of(harness)) as bench:
        await until(lambda: has(harness, _status(WEB, 3, b"Running")))
        await harness.cut(cut=True)

        async def silent() -> bool:
            return not bench.engine.upstream.link.connected

        await until(silent)
        await harness.want(wanted(WEB, bare(cpus=2), 4))
        with pytest.raises(FailedPrecondition):
            await bench.apply(bare("more"))
        stop = await bench.act("stop", force=True)
        await bench.final(stop.id)
        assert bench.get("VirtualMachine", "web").spec.cpus == 1
        assert waits(bench)
        await harness.cut(cut=False)
        await until(lambda: has(harness, lambda r: _is_outcome(r, stop.id)))
        await until(lambda: has(harness, _status(WEB, 4, b"Running")))
        await _sent(bench)
        _in_order(await harness.told())


async def reply_lost_reports_come_again_with_their_numbers(harness: Harness) -> None:
    await harness.want(wanted(IMAGE, image(), 1))
    async with open_bench(machine_of(harness)) as bench:
        await until(lambda: has(harness, _status(IMAGE, 1, b"")))
        await _sent(bench)
        before = len(await harness.told())
        await harness.cut(cut=False, lossy=True)
        view = Report(kind=ReportKind.NODE, node=NodeView(state="TenantReady"))
        await bench.engine.ledger.commit(PutReport(report=view))

        async def came_again() -> bool:
            return sum(r.kind is ReportKind.NODE for r in await harness.told()) > 1

        await until(came_again)
        assert waits(bench)
        await harness.cut(cut=False)
        await _sent(bench)
        numbers = [r.seq for r in (await harness.told())[before:] if r.kind is ReportKind.NODE]
        assert len(numbers) >= 2
        assert len(set(numbers)) == 1


async def deletion_ends_with_a_word_that_it_is_gone(harness: Harness) -> None:
    await harness.want(wanted(IMAGE, image(), 1))
    async with open_bench(machine_of(harness)) as bench:
        await until(lambda: has(harness, _status(IMAGE, 1, b"")))
        await harness.want(wanted(IMAGE, image(), 2, deleting=True))
        await until(lambda: has(harness, lambda r: (r.kind, r.uid) == (ReportKind.GONE, IMAGE)))
        assert not bench.machine.store.tables.assignments


CONTRACT = (
    takes_wanted_objects_and_reports_them,
    believes_newer_generations_alone,
    catches_up_after_more_than_is_remembered,
    cut_off_takes_nothing_and_tells_all_afterwards,
    reply_lost_reports_come_again_with_their_numbers,
    deletion_ends_with_a_word_that_it_is_gone,
)


async def _sent(bench: Bench) -> None:
    async def nothing_waits() -> bool:
        return not waits(bench)

    await until(nothing_waits)


def _status(uid: str, generation: int, text: bytes) -> Callable[[Report], bool]:
    return lambda report: (
        (report.kind, report.uid, report.generation) == (ReportKind.STATUS, uid, generation)
        and text in bytes(report.status)
    )


def _refused(uid: str, generation: int) -> Callable[[Report], bool]:
    wanted = (ReportKind.REFUSED, uid, generation)
    return lambda report: (report.kind, report.uid, report.generation) == wanted


def _is_of(report: Report, verb: str, uid: str) -> bool:
    return report.operation is not None and (report.operation.verb, report.uid) == (verb, uid)


def _is_outcome(report: Report, operation_id: str) -> bool:
    return report.operation is not None and report.operation.id == operation_id


def _in_order(reports: list[Report]) -> None:
    numbers = [report.seq for report in reports]
    assert numbers == sorted(numbers)


def run(
    harness: Callable[[Path], AbstractAsyncContextManager[Harness]], term: Any, path: Path
) -> Callable[[], Any]:
    async def body() -> None:
        async with harness(path) as made:
            await term(made)

    return body


@pytest.mark.parametrize("term", CONTRACT, ids=lambda term: term.__name__)
def test_plane_in_memory(term: Any, tmp_path: Path) -> None:
    virtual_time.run(run(in_memory, term, tmp_path))


@pytest.mark.parametrize("term", CONTRACT, ids=lambda term: term.__name__)
def test_plane_over_a_process(term: Any, tmp_path: Path) -> None:
    anyio.run(run(over_a_process, term, tmp_path))


async def test_cut_off_neither_port_claims_that_a_report_came(tmp_path: Path) -> None:
    report = Report(kind=ReportKind.NODE, seq=1)
    for made in (in_memory, over_a_process):
        async with made(tmp_path) as harness:
            await harness.cut(cut=True)
            upstream = harness.upstream(Chaos(random.Random(1)))
            with pytest.raises(ChvError):
                await upstream.report((report,))
            with pytest.raises(Unavailable):
                await upstream.follow(Unheard())
            assert await harness.told() == []


class Unheard:
    """A session that is never spoken to."""

    async def relist(self, objects: tuple[Wanted, ...]) -> None:
        raise AssertionError("a list came")

    async def change(self, wanted: Wanted) -> None:
        raise AssertionError("a change came")

    def contact(self) -> None:
        raise AssertionError("a word came")


# --- the store on disk, and a kill between a report and its answer


@asynccontextmanager
async def agent_process(path: Path, *more: str) -> AsyncIterator[anyio.abc.Process]:
    files = (str(path / "plane.sock"), str(path / "agent.db"))
    command = [sys.executable, "-m", "tests.doubles.managed_agent", *files, *more]
    async with await anyio.open_process(command, stdout=None, stderr=None) as process:
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()


async def test_agent_killed_before_the_answer_reports_again_under_the_same_ids(
    tmp_path: Path,
) -> None:
    async with over_a_process(tmp_path) as harness:
        await harness.want(wanted(IMAGE, image(), 1))
        created = {"verb": "create", "uid": IMAGE}
        async with agent_process(tmp_path, "hold") as process:
            await until(lambda: has(harness, lambda report: _is_of(report, **created)))
            process.kill()
            await process.wait()
        before = [report for report in await harness.told() if _is_of(report, **created)]
        async with agent_process(tmp_path):

            async def came_again() -> bool:
                now = [report for report in await harness.told() if _is_of(report, **created)]
                return len(now) > len(before)

            await until(came_again)
        told = [report for report in await harness.told() if _is_of(report, **created)]
        assert {(r.seq, r.operation.id) for r in told if r.operation} == {
            (before[0].seq, before[0].operation.id if before[0].operation else "")
        }
