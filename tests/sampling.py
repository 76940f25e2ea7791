"""Which cases of a table run: all of them with CHV_LONG=1, else a few, always the same ones."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
LONG = bool(os.environ.get("CHV_LONG"))


def sampled(cases: Sequence[T], count: int, *, seed: int, long: bool = LONG) -> list[T]:
    """Return `count` of the cases in their order; which, says the seed."""
    if long or count >= len(cases):
        return list(cases)
    chosen = sorted(random.Random(seed).sample(range(len(cases)), count))
    return [cases[number] for number in chosen]


def paired(
    first: Sequence[Any], second: Sequence[Any], *, shift: int = 0, long: bool = LONG
) -> list[Any]:
    """Return all pairs, or each of `first` once, with those of `second` in turn.

    Two tests with the same tables and all shifts below `len(second)` have all pairs between them.
    """
    if long:
        return [_pair(one, other) for one in first for other in second]
    return [_pair(one, second[(at + shift) % len(second)]) for at, one in enumerate(first)]


def _pair(one: Any, other: Any) -> Any:
    """Return a case with the marks of its first half."""
    return pytest.param(*getattr(one, "values", (one,)), other, marks=getattr(one, "marks", ()))
