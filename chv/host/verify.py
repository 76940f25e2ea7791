"""`chv verify`: what is reported. A check has an id that never changes, and words for people.

The parts: `verify_plan` says what is made and what the probe is told, `verify_node` makes it by
the agent, drives it and takes it away again, `verify_judge` turns the probe's words into checks,
`verify_host` does what can be done without an agent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from chv.common.errors import ChvError


class Check(msgspec.Struct, frozen=True):
    """One finding. `message` of a failure ends in the likely cause and the command that helps."""

    id: str
    ok: bool
    ms: float
    message: str


class Report(msgspec.Struct, frozen=True):
    """What was proven. `vmm`: the one that ran the probe, with its version and accelerator."""

    ok: bool
    vmm: str
    checks: list[Check]


class Failed(Exception):
    """A check failed without which nothing that follows could be judged."""


class Findings:
    """The checks so far; `on_check` hears of each at once."""

    def __init__(self, on_check: Callable[[Check], None] = lambda check: None) -> None:
        self.checks: list[Check] = []
        self.vmm = ""
        self._on_check = on_check

    def add(self, check: Check) -> None:
        """Take a check."""
        self.checks.append(check)
        self._on_check(check)

    def report(self) -> Report:
        """Return all of them."""
        ok = bool(self.checks) and all(check.ok for check in self.checks)
        return Report(ok=ok, vmm=self.vmm, checks=self.checks)

    @contextmanager
    def needed(self, check_id: str, help_text: str) -> Iterator[Step]:
        """Time a step without which nothing goes on; an error of it becomes its failed check."""
        step = Step()
        started = time.monotonic()
        try:
            yield step
        except ChvError as error:
            message = failure(f"{error.message}", error.hint or "", help_text)
            self.add(Check(check_id, False, since_ms(started), message))
            raise Failed from error
        self.add(Check(check_id, True, since_ms(started), step.message))


class Step:
    """What a step has to say of itself."""

    message = ""


def since_ms(started: float) -> float:
    """Return milliseconds since a time of `time.monotonic`."""
    return round((time.monotonic() - started) * 1000, 1)


def failure(what: str, cause: str, command: str) -> str:
    """Return the words of a failure: what was seen, the likely cause, the command that helps."""
    return "; ".join(part for part in (what, cause, f"see {command}" if command else "") if part)
