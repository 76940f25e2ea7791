"""What passes between a node and its control plane, whatever carries it.

Wanted objects come as (uid, generation, object or deletion), all of them at once and then one by
one; reports go, each numbered. A control plane may get a report again and takes no notice of a
number that is not above the last one it has seen of the same thing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from chv.common.errors import ErrorData
from chv.common.wire.agent import NodeCondition, Operation
from chv.common.wire.types import GENERATION_MAX, Message, Uid


class Wanted(Message):
    """An object of the control plane that this node is to have, or to let go of.

    `generation` is the control plane's, compared as a number within one uid; a deletion has one,
    too. A deletion stays in the list until the node has reported that the object is gone: that an
    object is not listed says nothing.
    """

    uid: Uid
    generation: Annotated[int, Meta(ge=1, le=GENERATION_MAX)]
    object: msgspec.Raw
    deleting: bool = False
    requester: str = "control plane"
    reason: str = ""


class ReportKind(StrEnum):
    """`status`, `refused`, `node`: the newest takes the place of an older one that waits.

    `operation`: how one has ended. `gone`: nothing of the object is left on the node.
    `lost`: so many outcomes were dropped, since a full outbox had no room.
    """

    STATUS = "status"
    REFUSED = "refused"
    NODE = "node"
    OPERATION = "operation"
    GONE = "gone"
    LOST = "lost"


class NodeView(Message):
    """How the node is."""

    state: str
    since: str = ""
    why: str = ""
    conditions: list[NodeCondition] = []


class Report(Message):
    """One report. `seq` grows for ever on a node.

    `generation`: of the control plane; in a status the one that was observed, in a refusal the
    one that was refused. `override`: who of the node wants it otherwise until a newer generation
    comes. `count`: outcomes that were dropped.
    """

    kind: ReportKind
    seq: int = 0
    uid: str = ""
    generation: int = 0
    status: msgspec.Raw = msgspec.Raw(b"null")
    override: str = ""
    operation: Operation | None = None
    node: NodeView | None = None
    error: ErrorData | None = None
    count: int = 0
    since: str = ""
