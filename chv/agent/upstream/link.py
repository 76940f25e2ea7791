"""Whether the node sees its control plane: by its last word, on a clock that never jumps.

A connection that breaks is no partition yet: for `grace_s` after the last word the node counts as
connected. An agent that has just begun has heard no word, so it counts as cut off.
"""

from __future__ import annotations

from chv.common.clock import Clock, timestamp
from chv.common.wire.agent import NodeCondition

GRACE_S = 40.0  # as long as a Lease of a node lasts
CONDITION = "UpstreamConnected"


class Link:
    """One per agent. A session has a number; 0 is none."""

    def __init__(self, clock: Clock, *, embedded: bool, grace_s: float = GRACE_S) -> None:
        self._clock = clock
        self._embedded = embedded
        self._grace_s = grace_s
        self._sessions = 0
        self._last_s: float | None = None
        self._since = timestamp(clock.now())
        self._was_connected = embedded
        self._why = "no word from it since the agent started"
        self.session = 0

    @property
    def connected(self) -> bool:
        """Tell whether the control plane is seen, or was until a moment ago."""
        if self._embedded:
            return True
        return self._last_s is not None and self.silent_s <= self._grace_s

    @property
    def silent_s(self) -> float:
        """Seconds since its last word; 0 where there was none."""
        return 0.0 if self._last_s is None else self._clock.monotonic() - self._last_s

    def opened(self) -> int:
        """Begin a session: its first word was heard. Return its number."""
        self._sessions += 1
        self.session = self._sessions
        self.heard()
        return self.session

    def heard(self) -> None:
        """Note that the control plane has said something just now."""
        if not self.connected or not self._was_connected:
            self._since, self._was_connected = timestamp(self._clock.now()), True
        self._last_s = self._clock.monotonic()

    def closed(self, why: str) -> None:
        """End the session, whichever it is."""
        self.session, self._why = 0, why

    def condition(self, waiting: int = 0) -> NodeCondition:
        """Return the node's condition. `waiting`: reports that are not delivered yet."""
        self._note()
        if self._embedded:
            reason, message = "Embedded", "the node is its own control plane"
        elif self.connected:
            reason = "Connected" if self.session else "Reconnecting"
            message = "" if self.session else f"{self._why}; last word {self.silent_s:.0f} s ago"
        else:
            reason = "NotYetSeen" if self._last_s is None else "Silent"
            said = f"no word for {self.silent_s:.0f} s: " if self._last_s is not None else ""
            message = f"{said}{self._why}; what runs is kept, nothing new is taken"
        if waiting:
            message = f"{message}; reports that wait: {waiting}".removeprefix("; ")
        status = "True" if self.connected else "False"
        return NodeCondition(
            type=CONDITION, status=status, reason=reason, message=message, since=self._since
        )

    def _note(self) -> None:
        """Date the silence where nobody has noticed it before."""
        if self._was_connected and not self.connected:
            self._since, self._was_connected = timestamp(self._clock.now()), False
