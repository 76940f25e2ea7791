"""How far operations are, in memory: it is seen anew after a start of the agent, and never stored
before the end. No I/O.
"""

from __future__ import annotations

import msgspec

from chv.common.wire.agent_operations import OperationProgress

KNOWN_MAX = 1000


class ProgressBook:
    """The last word on each operation under way; of those that have ended, for a while."""

    def __init__(self) -> None:
        self._known: dict[str, OperationProgress] = {}

    def put(self, operation_id: str, done: int, total: int = 0, unit: str = "bytes") -> None:
        """Note how far it is. `total` 0: not known."""
        if operation_id not in self._known and len(self._known) >= KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self._known[operation_id] = OperationProgress(done=done, total=total, unit=unit)

    def get(self, operation_id: str) -> OperationProgress | None:
        """Return how far it is, None where nobody has said."""
        return self._known.get(operation_id)

    def last(self, operation_id: str, *, succeeded: bool) -> OperationProgress | None:
        """Return what an operation that ends carries; with success all of it is done."""
        known = self._known.get(operation_id)
        if known is None or not succeeded or not known.total:
            return known
        return msgspec.structs.replace(known, done=known.total)
