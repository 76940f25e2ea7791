"""VMs for one run: what an end means to them. Pure but for ids and the clock.

An ephemeral VM is deleted once its guest has run and ends, whoever or whatever ended it: in the
transaction that forgets its VMM, so that it is never started a second time. What it owns goes
with it. A start that fails before the guest runs is no end, and is tried again like any other.
"""

from __future__ import annotations

import msgspec

from chv.agent.cascade import marked_deleting
from chv.agent.context import Context
from chv.agent.operations import SYSTEM
from chv.agent.records import (
    Change,
    Ending,
    EndKind,
    PutObject,
    PutOperation,
    StoredObject,
    VmFacts,
    WorkerRow,
)
from chv.common.wire.agent import OperationState
from chv.common.wire.resources import VirtualMachine

# Of these the VM goes on by itself.
CONTINUED = frozenset({EndKind.RESTART, EndKind.RESTORE, EndKind.REBUILD})
ENDED_AS_ASKED = frozenset({"stop", "drain", "reconcile"})
_replace = msgspec.structs.replace


def vanishes(stored: StoredObject, row: WorkerRow, ending: Ending) -> bool:
    """Tell whether this end is the end of the VM."""
    assert isinstance(stored.resource, VirtualMachine)
    if not stored.resource.spec.ephemeral or stored.deleting:
        return False
    return row.booted and ending.kind not in CONTINUED


def vanishing(context: Context, stored: StoredObject, facts: VmFacts) -> list[Change]:
    """Return what deletes the VM after its end: an operation of the node, with the reason."""
    marked = marked_deleting(
        _replace(stored, facts=facts), context.now(), context.ledger.next_revision()
    )
    why = f"it is ephemeral, and has ended: {facts.last_stop}"
    operation = context.operations.new("delete", marked, SYSTEM, why[:256])
    current = context.operations.current(stored.uid)
    as_asked = current is not None and current.verb in ENDED_AS_ASKED
    state = OperationState.SUCCEEDED if as_asked else OperationState.FAILED
    message = f"{facts.last_stop}; it is ephemeral, so it is deleted"
    return [
        *context.operations.ending_open(current, state, message),
        PutObject(object=marked),
        PutOperation(operation=operation),
    ]
