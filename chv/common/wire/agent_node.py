"""The operator's verbs on the node, part of the agent's local API."""

from __future__ import annotations

from enum import StrEnum

from chv.common.rpc import Method
from chv.common.wire.types import Message, Reply, ShortText


class NodeVerb(StrEnum):
    """`drain` stops every VM and ends in Maintenance, as does `maintenance`, which wants a reason.

    `cancel_drain` and `resume` let the VMs run that are wanted. `pause_scheduling` keeps new VMs
    away and no others.
    """

    DRAIN = "drain"
    CANCEL_DRAIN = "cancel_drain"
    MAINTENANCE = "maintenance"
    RESUME = "resume"
    PAUSE_SCHEDULING = "pause_scheduling"
    RESUME_SCHEDULING = "resume_scheduling"


class ActOnNode(Message, frozen=True, kw_only=True):
    """A verb on the node. Durable when it is answered.

    `until_boot`, of `drain` and `maintenance`: after the next boot of the host it serves again.
    """

    verb: NodeVerb
    requester: ShortText
    reason: ShortText = ""
    idempotency_key: ShortText = ""
    until_boot: bool = False


class NodeVerbReply(Reply, frozen=True, kw_only=True):
    """`operation_id`: what it is recorded as; a drain is waited for by it.

    `joined`: it was so already, and stays as it was recorded first.
    """

    state: str
    operation_id: str = ""
    joined: bool = False


class NodeHold(Reply, frozen=True, kw_only=True):
    """Who asked for it, why, and since when."""

    requester: str
    reason: str = ""
    since: str = ""
    operation_id: str = ""


class DrainedVm(Reply, frozen=True, kw_only=True):
    """A VM that a drain waits for, and why it is still there."""

    namespace: str
    name: str
    phase: str = ""
    why: str = ""


class DrainProgress(Reply, frozen=True, kw_only=True):
    """How far a drain is. `blocking`: the first of the VMs that are left."""

    total: int
    left: int
    blocking: list[DrainedVm] = []


ACT_ON_NODE = Method("ActOnNode", ActOnNode, NodeVerbReply)

NODE_METHODS = (ACT_ON_NODE,)
