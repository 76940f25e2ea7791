"""The part of the agent's API that tells what has happened: durable events, resumed by number.

An event is stored in the transaction of the change that it tells, so there is none without the
other. `seq` grows by one from event to event and is never used again. Served beside the table in
`chv.common.wire.agent`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from chv.common.rpc import Method
from chv.common.wire.types import GENERATION_MAX, Message, NameOrEmpty, Reply

TAIL_MAX = 100  # what fits into one chunk

SeqOrNone = Annotated[int, Meta(ge=0, le=GENERATION_MAX)] | None


class EventType(StrEnum):
    """Warning: something that nobody has asked for."""

    NORMAL = "Normal"
    WARNING = "Warning"


class Event(Reply, frozen=True, kw_only=True, omit_defaults=True):
    """One change of an object, an operation or the node.

    `reason`: CamelCase, one of a fixed set. `data`: the same for programs, by `reason`: a condition
    has `type`, `from`, `to`, `reason`; a phase `from`, `to`; the end of a VMM `kind`, `rung`.
    `operation_id`: under which it came about, where under one. `node`: its name, of who tells.
    """

    seq: int = 0
    at: str = ""
    type: EventType = EventType.NORMAL
    reason: str = ""
    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""
    message: str = ""
    operation_id: str = ""
    node: str = ""
    data: dict[str, str] = {}


class WatchEvents(Message, frozen=True, kw_only=True):
    """Events after `after_seq` in order, then new ones if `follow`. Empty filters take all.

    `after_seq` none: from the oldest that is kept, or the last `tail` ones that are wanted. `log`:
    the store that the number is of, as a chunk told; another one is refused.
    """

    after_seq: SeqOrNone = None
    log: Annotated[str, Meta(max_length=32, pattern=r"^[0-9a-z]*\Z")] = ""
    kind: Annotated[str, Meta(max_length=32, pattern=r"^[A-Za-z]*\Z")] = ""
    namespace: NameOrEmpty = ""
    name: Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9._-]*\Z")] = ""
    type: Annotated[str, Meta(pattern=r"^(Normal|Warning)?\Z")] = ""
    operation_id: Annotated[str, Meta(max_length=64)] = ""
    since: Annotated[str, Meta(max_length=32, pattern=r"^[0-9TZ:.-]*\Z")] = ""
    tail: Annotated[int, Meta(ge=0, le=TAIL_MAX)] = 0
    follow: bool = False


class EventChunk(Reply, frozen=True, kw_only=True):
    """Some events. `last_seq`: where to go on from, be the last of them wanted or not."""

    last_seq: int
    log: str
    events: list[Event] = []


class EventsEnd(Reply, frozen=True, kw_only=True):
    """All that there was. `oldest_seq`: the oldest that is kept."""

    last_seq: int
    oldest_seq: int
    log: str


# FailedPrecondition: the number is older than what is kept, or of another store.
# ResourceExhausted: the caller did not read.
WATCH_EVENTS = Method(
    "WatchEvents",
    WatchEvents,
    EventsEnd,
    timeout_s=float("inf"),
    mutating=False,
    events=EventChunk,
)

EVENT_METHODS = (WATCH_EVENTS,)
