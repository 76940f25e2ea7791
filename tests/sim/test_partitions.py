"""The real agent with a control plane that comes and goes; long runs by CHV_LONG."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.sampling import LONG
from tests.sim.mutants_upstream import UPSTREAM_MUTANTS
from tests.sim.partitions import PartitionSchedule, run
from tests.sim.verdict import fail_where_broken

SCHEDULES = 2000 if LONG else 20
CHUNKS = 2
MUTANT_SEEDS_MAX = 30


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_partitions_keep_every_invariant_and_end_in_agreement(chunk: int) -> None:
    size = SCHEDULES // CHUNKS
    schedules = [PartitionSchedule(5000 + chunk * size + number) for number in range(size)]
    fail_where_broken([schedule.run() for schedule in schedules])
    assert sum(each.machine.cut_off_commits for each in schedules) >= size  # it was about something
    assert sum(each.crowd.denied for each in schedules) >= size // 4
    assert sum(each.machine.plane.again for each in schedules) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("mutant", UPSTREAM_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_bug_is_caught(mutant: Callable[[], AbstractContextManager[None]]) -> None:
    with mutant():
        caught = any(run(seed).problems for seed in range(1, MUTANT_SEEDS_MAX))
    assert caught


def test_a_schedule_replays_identically() -> None:
    assert run(3).trace == run(3).trace
