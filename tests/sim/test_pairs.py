"""Two deaths of the agent in every verb: the second in the recovery from the first."""

from __future__ import annotations

import random

import pytest

from tests.sampling import LONG
from tests.sim.pairs import VERBS, Verb, all_pairs, some_pairs
from tests.sim.verdict import fail_with

IN_CI = 2  # pairs of each verb


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_a_second_death_while_the_first_is_made_good_is_survived(verb: Verb) -> None:
    if LONG:
        fail_with([problem for _, found in all_pairs(verb) for problem in found])
    else:
        fail_with(some_pairs(verb, IN_CI, random.Random(f"pairs of {verb.name}")))
