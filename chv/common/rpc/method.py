"""`Method`: one row of an API's table, with its types and limits. Types only, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

P = TypeVar("P", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)


@dataclass(frozen=True)
class Method(Generic[P, R]):
    """A remote procedure. Client and server share the object, so neither can misspell it."""

    name: str
    params: type[P]
    result: type[R]
    timeout_s: float = 10.0
    # How many file descriptors a reply may carry.
    fds: int = 0
    # A lost reply of a mutating call is OUTCOME_UNKNOWN, of any other UNAVAILABLE.
    mutating: bool = True
    # Type of the notifications that come before the reply; None: the method sends none.
    events: type[Any] | None = None

    @property
    def event_name(self) -> str:
        """The `method` member of this method's notifications."""
        return f"{self.name}/event"
