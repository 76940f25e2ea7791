"""The engine's `Gate` on the node's state machine and its table of verbs."""

from __future__ import annotations

from collections.abc import Callable

from chv.agent.node import Node, NodeEvent, NodeState
from chv.agent.node_record import Hold, NodeRecord
from chv.agent.node_rules import Asked, Standing, refusal, shown
from chv.common.errors import FailedPrecondition

_WORDS = {NodeEvent.DRAIN_CANCELLED: "drain --cancel"}
_HINTS = {
    NodeState.DRAINING: "chv node drain --cancel",
    NodeState.MAINTENANCE: "chv node resume",
    NodeState.FAILED: "chv node reset",
}


class NodeGate:
    """See the module. `connected`: whether the control plane is seen; the embedded one always."""

    def __init__(self, node: Node, connected: Callable[[], bool] = lambda: True) -> None:
        self._node = node
        self._connected = connected
        self._paused: Hold | None = None

    def check(self, verb: str, *, desired: bool = False, forced_by: str = "") -> None:
        """Raise FailedPrecondition where the node's state or its being cut off forbids the verb."""
        node = self._node
        standing = Standing(node.state, node.why, self._paused, self._connected())
        refused = refusal(Asked(verb, desired, forced_by), standing)
        if refused is not None:
            raise refused

    def starts_allowed(self) -> bool:
        """Whether VMs may be started now."""
        return self._node.serves

    def allow(self, event: NodeEvent) -> None:
        """Raise FailedPrecondition where an operator's wish leads nowhere from this state."""
        node = self._node
        if not node.allows(event):
            why = f" ({node.why})" if node.why else ""
            raise FailedPrecondition(
                f"{_WORDS.get(event, event.value)} refused: the node is {shown(node.state)}{why}",
                hint=_HINTS.get(node.state, "see `chv node status`"),
            )

    def follow(self, record: NodeRecord) -> None:
        """Do what is recorded of the node by now."""
        self._paused = record.paused
        self._node.follow(record.intent, record.who)
