"""Operations as readers see them: with how far they are and what they wait for. No I/O.

Both are told by memory: nothing of it is stored before the end of an operation.
"""

from __future__ import annotations

import msgspec

from chv.agent.chores import Chores
from chv.agent.context import Context
from chv.agent.draining import NodeDesk
from chv.agent.node_record import NODE_UID
from chv.agent.records import FINAL_STATES, is_side
from chv.agent.vm.cloning import made_for
from chv.common.wire.agent import Operation
from chv.common.wire.agent_operations import OperationProgress, QueuePlace


class OperationView:
    """See the module."""

    def __init__(self, context: Context, chores: Chores, desk: NodeDesk) -> None:
        self._context = context
        self._chores = chores
        self._desk = desk

    def seen(self, operation: Operation) -> Operation:
        """Return the operation with what is known of it now; one that has ended as it is."""
        if operation.state in FINAL_STATES:
            return operation
        progress, queue = self._progress(operation), self._queue(operation)
        if progress is None and queue is None:
            return operation
        return msgspec.structs.replace(operation, progress=progress, queue=queue)

    def listed(self, operation: Operation) -> Operation:
        """Return the operation as lists have it: a thousand of them fit into one reply."""
        return msgspec.structs.replace(self.seen(operation), request={}, result={})

    def _progress(self, operation: Operation) -> OperationProgress | None:
        if operation.uid == NODE_UID:
            drain = self._desk.progress()
            if drain is None:
                return None
            done = drain.total - drain.left
            return OperationProgress(done=done, total=drain.total, unit="VMs")
        if operation.verb == "clone":
            return self._of_volumes(operation)
        return self._context.progress.get(operation.id)

    def _of_volumes(self, operation: Operation) -> OperationProgress | None:
        """A clone is as far as its volumes are together."""
        clone = self._context.stored(operation.uid)
        if clone is None:
            return None
        ids = [
            self._context.operations.current_id(volume.uid)
            for volume in made_for(self._context.ledger.tables, clone)
        ]
        known = [each for each in map(self._context.progress.get, ids) if each is not None]
        if not known:
            return None
        done, total = sum(each.done for each in known), sum(each.total for each in known)
        return OperationProgress(done=done, total=total)

    def _queue(self, operation: Operation) -> QueuePlace | None:
        place = self._chores.place(operation)
        if place is None and not is_side(operation):
            place = self._context.places.get(operation.uid)
        return place
