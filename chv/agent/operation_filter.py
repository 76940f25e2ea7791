"""Which operations a reader wants, beyond their object. Pure."""

from __future__ import annotations

from typing import NamedTuple

from chv.common.wire.agent import Operation, OperationState


class OperationFilter(NamedTuple):
    """Each where not empty. `since`: RFC 3339, of their beginning."""

    verb: str = ""
    states: tuple[OperationState, ...] = ()
    since: str = ""

    def takes(self, operation: Operation) -> bool:
        """Tell whether this one is wanted."""
        return (
            (not self.verb or operation.verb == self.verb)
            and (not self.states or operation.state in self.states)
            and operation.created_at >= self.since
        )


EVERY = OperationFilter()
