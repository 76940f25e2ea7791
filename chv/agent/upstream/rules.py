"""What the last desired state already allows, for a node that does not see its control plane. Pure.

Of an object that no control plane assigned, the desired state is the node's own: it allows what
it says. Of an assigned one it is what the control plane wanted last, whatever was changed on the
spot since.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from chv.agent.records import StoredObject
from chv.agent.tables import Tables
from chv.agent.upstream.port import Upstream
from chv.common.errors import InvalidArgument, Unsupported
from chv.common.wire.agent import DeleteObject
from chv.common.wire.resources import Resource, RunStrategy

_RUNS = frozenset({"start", "restart"})


class _Spec(msgspec.Struct, rename="camel"):
    run_strategy: RunStrategy = RunStrategy.RERUN_ON_FAILURE


def already_desired(tables: Tables, stored: StoredObject | None, verb: str) -> bool:
    """Tell whether a verb does what is desired already."""
    if stored is None:
        return False
    assignment = tables.assignments.get(stored.uid)
    if assignment is None or verb == "delete":
        return assignment is None or stored.deleting
    if verb in _RUNS:
        wanted = msgspec.json.decode(assignment.spec, type=_Spec)
        return wanted.run_strategy is not RunStrategy.HALTED
    return _same(stored.resource, assignment.spec)


def applies_desired(tables: Tables, before: StoredObject | None, after: Resource) -> bool:
    """Tell whether a file makes an object what is desired of it already."""
    if before is None:
        return False
    assignment = tables.assignments.get(before.uid)
    return assignment is None or _same(after, assignment.spec)


def check_force(upstream: Upstream, request: DeleteObject) -> None:
    """Refuse to force a deletion without a reason, or where there is nothing to force."""
    if not request.force:
        return
    if upstream.embedded:
        raise Unsupported(
            "the node is its own control plane: no deletion has to be forced", field="force"
        )
    if not request.reason:
        raise InvalidArgument("a forced deletion wants a reason", field="reason", hint="--reason")


def not_listed(tables: Tables, listed: Sequence[str]) -> list[str]:
    """Return assigned objects that a list of all lacks. They are kept: absence says nothing."""
    return sorted(tables.assignments.keys() - set(listed))


def _same(resource: Resource, spec: str) -> bool:
    return msgspec.json.encode(resource.spec).decode() == spec
