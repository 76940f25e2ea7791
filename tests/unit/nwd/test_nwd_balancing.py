"""Checks and drains in virtual time: what a target comes to, when, and what outlives us."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chv.common import virtual_time
from chv.common.errors import Unavailable
from chv.common.virtual_time import VirtualClock
from chv.common.wire.nwd_policy import HealthCheck, HealthProtocol
from chv.nwd.asking import Question, judged
from chv.nwd.balancing import Balancer, Judgement, without_health
from chv.nwd.records import Drain, ExposureRow, Health, Network
from tests.unit.nwd.nwd_rows import BOOT, exposure, exposure_row, network, nic, open_parts

CHECK = HealthCheck(protocol=HealthProtocol.TCP, interval_s=1.0, timeout_s=5.0, rise=2, fall=3)


class Rig:
    """A balancer over real records; `told` is what it has found out."""

    def __init__(self, parts: object, tasks: anyio.abc.TaskGroup, row: ExposureRow) -> None:
        self.clock = VirtualClock()
        self.told: list[tuple[float, bool, str]] = []
        self.drained: list[float] = []
        self.asked: list[tuple[float, Question]] = []
        self.refusals = 0
        self.is_well: Callable[[], bool] = lambda: True
        self.parts = parts
        self.row = row
        self.balancer = Balancer(parts, self.clock, tasks, self.changed, self.drain)  # type: ignore[arg-type]
        self.balancer.ask = self.ask

    async def ask(self, question: Question) -> str:
        self.asked.append((self.clock.monotonic(), question))
        return "" if self.is_well() else "refused"

    async def changed(self, exposure_id: str, nic_id: str, health: Health) -> None:
        if self.refusals:
            self.refusals -= 1
            raise Unavailable("not now")
        self.told.append((round(self.clock.monotonic(), 3), health.healthy, health.message))
        assert exposure_id == self.row.exposure.exposure_id

    async def drain(self, network_id: str) -> None:
        self.drained.append(round(self.clock.monotonic(), 3))


def run(
    path: Path, act: Callable[[Rig, Network], object], seconds: float = 20.0, **changes: Any
) -> Rig:
    """Start the checks of one target, `act`, and let time go by."""

    async def main() -> Rig:
        async with open_parts(path / "db") as parts, anyio.create_task_group() as tasks:
            net = network()
            target = nic(net.network_id, 5)
            await parts.records.put_network(net)
            await parts.records.put_nic(target)
            made = exposure(net.network_id, targets=[target.nic_id], health=CHECK)
            fields = {
                key: value(target.nic_id) if callable(value) else value
                for key, value in changes.items()
            }
            row = exposure_row(made, **fields)
            await parts.records.put_exposure(row)
            rig = Rig(parts, tasks, row)
            act(rig, net)
            rig.balancer.refresh(net.network_id)
            await rig.clock.sleep(seconds)
            tasks.cancel_scope.cancel()
        return rig

    return virtual_time.run(main)


def test_a_target_is_healthy_after_rise_answers_and_asked_from_the_gateway(tmp_path: Path) -> None:
    rig = run(tmp_path, lambda rig, net: None)
    assert [(at, healthy) for at, healthy, _ in rig.told] == [(1.0, True)]
    question = rig.asked[0][1]
    assert (question.gateway, question.address, question.port) == ("10.0.0.1", "10.0.0.5", 80)
    assert question.timeout_s == 1.0, "no check outlasts its interval"
    times = [at for at, _ in rig.asked]
    assert all(abs(later - earlier - 1.0) < 0.01 for earlier, later in pairwise(times))


def test_a_target_that_ends_is_found_out_within_fall_intervals(tmp_path: Path) -> None:
    def act(rig: Rig, net: Network) -> None:
        rig.is_well = lambda: rig.clock.monotonic() < 5.5

    rig = run(tmp_path, act)
    assert rig.told == [(1.0, True, ""), (8.0, False, "refused")]
    assert rig.told[1][0] <= 5.5 + CHECK.fall * CHECK.interval_s


def test_what_was_known_outlives_us_and_only_a_change_is_told(tmp_path: Path) -> None:
    rig = run(
        tmp_path,
        lambda rig, net: None,
        health=lambda uid: {uid: Health(healthy=True, since="")},
    )
    assert rig.told == []


def test_a_change_that_could_not_be_recorded_is_told_again(tmp_path: Path) -> None:
    def act(rig: Rig, net: Network) -> None:
        rig.refusals = 2

    assert [at for at, *_ in run(tmp_path, act).told] == [3.0]


def test_checks_that_are_late_go_on_at_once(tmp_path: Path) -> None:
    """Time goes by between two looks at the clock: nobody sleeps for less than nothing."""

    def act(rig: Rig, net: Network) -> None:
        exact, looks, ask = rig.clock.monotonic, itertools.count(), rig.ask

        async def slow(question: Question) -> str:
            await rig.clock.sleep(1.5)
            return await ask(question)

        rig.balancer.ask = slow
        rig.clock.monotonic = lambda: exact() + next(looks) * 1e-6  # type: ignore[method-assign]

    assert len(run(tmp_path, act, 15.5).asked) == 10


def test_a_refresh_without_a_change_starts_nothing_anew(tmp_path: Path) -> None:
    def act(rig: Rig, net: Network) -> None:
        rig.balancer.refresh(net.network_id)

    assert len(run(tmp_path, act, 5.5).asked) == 6


def test_a_drain_ends_at_its_recorded_time(tmp_path: Path) -> None:
    drain = Drain(nic_id="gone", addresses=["10.0.0.6"], boot_id=BOOT, end_s=7.0)
    rig = run(tmp_path, lambda rig, net: None, 7.5, draining=[drain])
    assert rig.drained == [7.0]


def test_a_target_that_is_new_once_more_has_no_health() -> None:
    row = exposure_row(exposure("n"), health={"a": Health(healthy=True, since="")})
    assert without_health(row, "a").health == {}


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.integers(1, 5))
def test_a_judgement_changes_only_after_as_many_in_a_row(
    answers: list[bool], rise: int, fall: int
) -> None:
    judgement = Judgement(rise, fall)
    for index, answer in enumerate(answers):
        verdict = judgement.note(is_well=answer)
        if verdict is None:
            continue
        needed = rise if verdict else fall
        assert answers[: index + 1][-needed:] == [verdict] * needed
        assert verdict is not judgement.healthy
        judgement.healthy = verdict
    if len(answers) >= rise and all(answers[-rise:]):
        assert judgement.healthy is True
    if len(answers) >= fall and not any(answers[-fall:]):
        assert judgement.healthy is False


@pytest.mark.parametrize(
    ("head", "wrong"),
    [
        (b"HTTP/1.1 200 OK\r\n", ""),
        (b"HTTP/1.0 399\r\n", ""),
        (b"HTTP/1.1 400 Bad\r\n", "HTTP status 400"),
        (b"HTTP/1.1 199 Odd\n", "HTTP status 199"),
        (b"HTTP/1.1 2000 OK\r\n", "no HTTP answer"),
        (b"SSH-2.0-x\r\n", "no HTTP answer"),
        (b"\xff\x00\r\n", "no HTTP answer"),
        (b"", "no HTTP answer"),
    ],
)
def test_the_first_line_of_an_answer_is_judged(head: bytes, wrong: str) -> None:
    assert judged(head).startswith(wrong)
    assert bool(judged(head)) is bool(wrong)
