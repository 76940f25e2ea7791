"""The part of the agent's API that answers: what was wanted before, by whom, and why is it so now.

Served beside the table in `chv.common.wire.agent`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from chv.common.rpc import Method
from chv.common.wire.agent import ApplyReply, Kind, ObjectRef, Operation
from chv.common.wire.resource_base import Condition
from chv.common.wire.types import Generation, Message, Name, Reply, ShortText

UidOrEmpty = Annotated[str, Meta(max_length=36, pattern=r"^[0-9a-f-]*\Z")]


class ListGenerations(Message, frozen=True, kw_only=True):
    """The history of an object by name; `uid` where an earlier object of that name is meant."""

    kind: Kind
    name: Name
    namespace: Name = "default"
    uid: UidOrEmpty = ""


class GenerationInfo(Reply, frozen=True, kw_only=True):
    """Who made a generation, when and why. `system` is the node itself.

    `changed`: fields of the spec, and `labels`; empty for the first generation and a deletion.
    """

    generation: int
    at: str = ""
    requester: str = ""
    reason: str = ""
    verb: str = ""
    operation_id: str = ""
    changed: list[str] = []


class GenerationsReply(Reply, frozen=True, kw_only=True):
    """Newest first. `others`: uids of other objects that have had this name."""

    uid: str
    deleted: bool = False
    generations: list[GenerationInfo] = []
    others: list[str] = []


class GetGeneration(Message, frozen=True, kw_only=True):
    """One generation; 0 is the newest."""

    kind: Kind
    name: Name
    namespace: Name = "default"
    uid: UidOrEmpty = ""
    generation: Generation = 0


class GenerationReply(Reply, frozen=True, kw_only=True):
    """`object` is a manifest: kind, name, labels, spec."""

    generation: GenerationInfo
    object: msgspec.Raw


class Rollback(Message, frozen=True, kw_only=True):
    """Apply spec and labels of an earlier generation as a new one, through all checks."""

    kind: Kind
    name: Name
    namespace: Name = "default"
    to: Annotated[int, Meta(ge=1, le=2**53)]
    requester: ShortText
    reason: ShortText = ""
    dry_run: bool = False
    idempotency_key: ShortText = ""


class Obstacle(Reply, frozen=True, kw_only=True):
    """Another object that this one waits for. `problem` says how it is."""

    kind: str
    name: str
    problem: str


class Words(Reply, frozen=True, kw_only=True):
    """What somebody else wrote: the last lines of a log."""

    source: str
    lines: list[str] = []


class WhyReply(Reply, frozen=True, kw_only=True):
    """From what is wanted to what blocks it; from memory and files, never from a VMM.

    `as_wanted`: nothing blocks, and all lists are empty. `verdict` says it in one line.
    `operation` is the one under way, else the last one that failed, with its last steps.
    `fixes`: what to type, the likeliest first.
    """

    kind: str
    namespace: str
    name: str
    uid: str
    phase: str
    as_wanted: bool
    verdict: str
    wants: str = ""
    generation: int = 0
    observed_generation: int = 0
    wanted: GenerationInfo | None = None
    operation: Operation | None = None
    conditions: list[Condition] = []
    obstacles: list[Obstacle] = []
    words: list[Words] = []
    serial: list[str] = []
    fixes: list[str] = []
    age_s: float = 0.0


LIST_GENERATIONS = Method("ListGenerations", ListGenerations, GenerationsReply, mutating=False)
GET_GENERATION = Method("GetGeneration", GetGeneration, GenerationReply, mutating=False)
ROLLBACK = Method("Rollback", Rollback, ApplyReply, timeout_s=30.0)
WHY = Method("Why", ObjectRef, WhyReply, timeout_s=5.0, mutating=False)

HISTORY_METHODS = (LIST_GENERATIONS, GET_GENERATION, ROLLBACK, WHY)
