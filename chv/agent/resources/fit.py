"""How many VMs fit into what is left. Pure; more room never means fewer of a kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chv.common.wire.agent_inventory import FitNeed, FitResult


@dataclass(frozen=True, slots=True)
class Wish:
    """So many VMs, each of which takes so much of each resource by name."""

    count: int
    needs: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Room:
    """What is left of each resource that has a limit; one that is not named has none."""

    left: Mapping[str, int] = field(default_factory=dict)


def fit(wishes: Sequence[Wish], room: Room) -> list[FitResult]:
    """Return how many of each wish fit, one after the other, and what binds."""
    left = Counter(room.left)
    found = []
    for wish in wishes:
        result = _one(wish, left)
        for resource, per_vm in wish.needs.items():
            if resource in left:
                left[resource] -= per_vm * result.fits
        found.append(result)
    return found


def _one(wish: Wish, left: Mapping[str, int]) -> FitResult:
    needs = [
        FitNeed(
            resource=resource,
            per_vm=per_vm,
            left=max(0, left[resource]),
            fits=max(0, left[resource]) // per_vm,
        )
        for resource, per_vm in wish.needs.items()
        if resource in left and per_vm > 0
    ]
    scarcest = min(needs, key=lambda need: need.fits, default=None)
    lacking = {
        need.resource: need.per_vm * wish.count - need.left
        for need in needs
        if need.fits < wish.count
    }
    return FitResult(
        asked=wish.count,
        fits=wish.count if scarcest is None else min(wish.count, scarcest.fits),
        binds=scarcest.resource if scarcest is not None else "",
        needs=needs,
        lacking=lacking,
    )
