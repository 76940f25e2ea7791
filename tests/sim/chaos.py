"""Faults of the simulation: kill, error, lost reply, hang and delay at every seam.

An agent that was killed has an old `life`: each of its later calls raises `Killed` and does
nothing, so that its `finally` blocks cannot tidy up, just as with SIGKILL. Everything is drawn
from one seeded generator.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
import anyio.lowlevel

from chv.common.errors import DeadlineExceeded, OutcomeUnknown, Unavailable

T = TypeVar("T")

KINDS = ("fail_before", "fail_after", "hang_before", "hang_after", "kill_before", "kill_after")
TIMEOUT_S = 10.0  # after which a hanging call is given up by its adapter
# Most calls are reads or show something; what can go wrong is in the effects, and most of all in
# those outside of the store, which are rare.
WEIGHT_READ, WEIGHT_COMMIT, WEIGHT_OUTSIDE = 0.25, 1.5, 4.0
SHOWS = "store.commit PutStatus"
DELAYS_S = (0.0, 0.0, 0.001, 0.01, 0.2)


class Killed(BaseException):
    """The agent was killed; this is its last instant."""


@dataclass
class Chaos:
    """Draws what goes wrong. `rates` per kind; none in the quiet phase."""

    random: random.Random
    rates: dict[str, float] = field(default_factory=dict)
    delays_s: tuple[float, ...] = DELAYS_S
    kills_max: int = 40
    life: int = 0
    quiet: bool = False
    calls: int = 0
    effects: int = 0  # mutating ones that reached the world
    kills: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)
    plan: dict[int, str] = field(default_factory=dict)  # the n-th call fails thus (exhaustive runs)
    on_kill: Callable[[], None] = lambda: None
    effects_at: list[int] = field(default_factory=list)  # calls that change more than what is shown

    async def seam(
        self, life: int, name: str, effect: Callable[[], T], *, mutating: bool = True
    ) -> T:
        """Do `effect` for an agent of this life, or what chaos has in mind."""
        fault = self._begin(life, name, mutating)
        delay_s = self.random.choice(self.delays_s)
        if delay_s:
            await anyio.sleep(delay_s)
        else:
            await anyio.lowlevel.checkpoint()
        self.check(life)
        if fault == "kill_before":
            self._kill(name)
        if fault == "fail_before":
            raise Unavailable(f"sim: {name} failed before its effect")
        if fault == "hang_before":
            await self._hang(life)
            raise DeadlineExceeded(f"sim: {name} hung")
        if mutating:
            self.effects += 1
        result = effect()
        if fault == "kill_after":
            self._kill(name)
        if fault == "hang_after":
            await self._hang(life)
        if fault in ("fail_after", "hang_after"):
            lost = OutcomeUnknown if mutating else Unavailable
            raise lost(f"sim: the reply of {name} was lost")
        return result

    def check(self, life: int) -> None:
        """Raise where the caller was killed."""
        if life != self.life:
            raise Killed

    def _begin(self, life: int, name: str, mutating: bool) -> str:
        self.check(life)
        number, self.calls = self.calls, self.calls + 1
        if mutating and name != SHOWS:
            self.effects_at.append(number)
        fault = self.plan.get(number, "") or self._draw(_weight(name, mutating))
        if fault.startswith("kill") and self.kills >= self.kills_max:
            fault = ""
        if fault:
            self.faults[fault] += 1
        self.trace.append(f"{number} {life} {name} {fault}")
        return fault

    def _draw(self, weight: float) -> str:
        if self.quiet:
            return ""
        drawn = self.random.random()
        for kind, rate in self.rates.items():
            if drawn < rate * weight:
                return kind
            drawn -= rate * weight
        return ""

    def _kill(self, name: str) -> None:
        self.kills += 1
        self.life += 1
        self.trace.append(f"KILL at {name}")
        self.on_kill()
        raise Killed

    async def _hang(self, life: int) -> None:
        await anyio.sleep(TIMEOUT_S)
        self.check(life)


def _weight(name: str, mutating: bool) -> float:
    if not mutating or name == SHOWS:
        return WEIGHT_READ
    return WEIGHT_COMMIT if name.startswith("store.") else WEIGHT_OUTSIDE


def swarm(generator: random.Random) -> dict[str, float]:
    """Return rates for one schedule: some kinds of fault off, some rare, some often."""
    rates = {kind: generator.choice((0.0, 0.005, 0.02, 0.05)) for kind in KINDS}
    for kind in ("hang_before", "hang_after"):
        rates[kind] /= 4
    return rates


def is_kill(error: BaseException) -> bool:
    """Tell whether an error of a life is its being killed."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_kill(each) for each in error.exceptions)
    return isinstance(error, Killed)
