"""Waiting for a condition of the node, part of the agent's local API."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from chv.common.rpc import Method
from chv.common.wire.agent import WAIT_S_MAX, NodeCondition
from chv.common.wire.types import Message, Reply


class WaitNode(Message, frozen=True, kw_only=True):
    """Answer when `condition` (a type of the node, or `state=NAME`) holds.

    Fails early with FAILED_PRECONDITION when the node does not get there by itself.
    """

    condition: Annotated[str, Meta(min_length=1, max_length=128)]
    status: Annotated[str, Meta(pattern=r"^(True|False)\Z")] = "True"
    timeout_s: Annotated[float, Meta(gt=0, le=WAIT_S_MAX)] = 60.0


class WaitNodeReply(Reply, frozen=True, kw_only=True):
    """The node once it was so."""

    state: str
    conditions: list[NodeCondition] = []


WAIT_NODE = Method("WaitNode", WaitNode, WaitNodeReply, 3610.0, mutating=False)

WAITING_METHODS = (WAIT_NODE,)
