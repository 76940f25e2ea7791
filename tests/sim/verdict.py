"""How a simulation fails in pytest: by what is broken and where, without the whole run."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.sim.schedule import Result

LINES_MAX = 40


def fail_with(found: list[str]) -> None:
    """Fail with these lines, if there are any."""
    more = [f"... and {len(found) - LINES_MAX} more"] if len(found) > LINES_MAX else []
    if found:
        pytest.fail("\n".join(found[:LINES_MAX] + more), pytrace=False)


def fail_where_broken(results: Iterable[Result]) -> None:
    """Fail with the problems of each seed, if there are any."""
    fail_with([f"seed {each.seed}: {problem}" for each in results for problem in each.problems])
