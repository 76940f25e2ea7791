"""Waiting for a condition or a state of the node.

Looks at memory now and then: what is waited for changes in more than one place, and seldom.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from chv.agent.node import Node, NodeState, Predicate
from chv.agent.upstream.link import CONDITION as UPSTREAM_CONNECTED
from chv.common.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from chv.common.rpc import Server
from chv.common.wire.agent import NodeCondition
from chv.common.wire.agent_waiting import WAIT_NODE, WaitNode, WaitNodeReply

LOOK_S = 0.2
SCHEDULING = "SchedulingPaused"  # shown while it is so
AMISS = ("ReportsComplete", "UpstreamAgrees")  # shown while they are False
TYPES = (
    NodeState.TENANT_READY.value,
    *(each.value for each in Predicate),
    SCHEDULING,
    UPSTREAM_CONNECTED,
    *AMISS,
)
WAY_OUT = {
    NodeState.FAILED: "chv node reset",
    NodeState.MAINTENANCE: "chv node resume",
    NodeState.DRAINING: "chv node drain --cancel",
}


class NodeWaiting:
    """`paused` tells whether scheduling is; `upstream`: the conditions of the control plane."""

    def __init__(
        self,
        node: Node,
        paused: Callable[[], bool],
        upstream: Callable[[], list[NodeCondition]] = list,
    ) -> None:
        self._node = node
        self._paused = paused
        self._upstream = upstream

    def register(self, server: Server) -> None:
        """Give the method its handler."""
        server.add(WAIT_NODE, self.wait)

    async def wait(self, request: WaitNode) -> WaitNodeReply:
        """Return once it is so; DeadlineExceeded, FailedPrecondition where it cannot be."""
        check(request.condition)
        with anyio.move_on_after(request.timeout_s):
            while not self._holds(request):
                self._refuse_hopeless(request)
                await anyio.sleep(LOOK_S)
            return WaitNodeReply(state=self._node.state, conditions=self._conditions())
        raise DeadlineExceeded(
            f"the node is {self._node.state}, {self._shown(request)} after {request.timeout_s:g} s",
            resource="node",
            hint="chv node status",
        )

    def _conditions(self) -> list[NodeCondition]:
        """Return the predicates, the state as a condition, and whether scheduling is paused."""
        node = self._node
        ready = NodeCondition(
            type=NodeState.TENANT_READY.value,
            status=_word(holds=node.state is NodeState.TENANT_READY),
            reason=node.state.value,
            message=node.why,
            since=node.since,
        )
        paused = NodeCondition(type=SCHEDULING, status=_word(holds=self._paused()), reason="Node")
        found = [ready, *node.conditions(), paused, *self._upstream()]
        shown = {each.type for each in found}
        well = [NodeCondition(type=each, status="True", reason="NothingAmiss") for each in AMISS]
        return found + [each for each in well if each.type not in shown]

    def _holds(self, request: WaitNode) -> bool:
        head, equals, value = request.condition.partition("=")
        if equals and head == "state":
            return self._node.state == value
        found = next(each for each in self._conditions() if each.type == request.condition)
        return found.status == request.status

    def _refuse_hopeless(self, request: WaitNode) -> None:
        way_out = WAY_OUT.get(self._node.state)
        wanted = request.condition in (NodeState.TENANT_READY, "state=TenantReady")
        if way_out is None or not wanted or request.status != "True":
            return
        why = f": {self._node.why}" if self._node.why else ""
        raise FailedPrecondition(
            f"the node is {self._node.state}{why}", resource="node", hint=way_out
        )

    def _shown(self, request: WaitNode) -> str:
        found = [each for each in self._conditions() if each.type == request.condition]
        if not found:
            return f"not {request.condition.removeprefix('state=')}"
        told = ": ".join(filter(None, (found[0].reason, found[0].message)))
        return f"{request.condition} is {found[0].status} ({told})"


def check(condition: str) -> None:
    """Refuse what a node never shows."""
    head, equals, value = condition.partition("=")
    states = [state.value for state in NodeState]
    if equals and head == "state":
        known, asked, what = states, value, "state"
    else:
        known, asked, what = [*TYPES, "state=NAME"], condition, "condition"
    if asked not in known:
        raise InvalidArgument(
            f"{asked!r} is not a {what} of a node",
            field="condition",
            hint=f"one of {', '.join(known)}",
        )


def _word(*, holds: bool) -> str:
    return "True" if holds else "False"
