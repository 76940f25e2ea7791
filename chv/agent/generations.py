"""The desired-state history: a row for each generation of each object. Pure types and rules.

A generation is stored in the transaction that makes it, so there is none without its row and no
row without it. A row never changes, but for labels: those are of no generation of their own, so
a row has the last ones of its generation. No I/O here; both stores keep these rules.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from chv.common.wire.types import FrozenMeta

GENERATIONS_MAX = 50  # of each object; the oldest go first
DELETED_GENERATIONS_MAX = 10  # of an object that is gone
DELETED_MAX = 100  # objects that are gone and have a history

_replace = msgspec.structs.replace


class Author(msgspec.Struct, metaclass=FrozenMeta):
    """Who made a generation, where no operation in its transaction says so."""

    requester: str
    reason: str
    verb: str


class GenerationRow(msgspec.Struct, metaclass=FrozenMeta):
    """Who made a generation of an object, when, why, and which fields it changed."""

    uid: str
    kind: str
    namespace: str
    name: str
    generation: int
    at: str = ""
    requester: str = ""
    reason: str = ""
    operation_id: str = ""
    verb: str = ""
    changed: tuple[str, ...] = ()  # fields of the spec by their names in a manifest


class Generation(msgspec.Struct, metaclass=FrozenMeta):
    """A generation whole: `spec` is JSON."""

    row: GenerationRow
    labels: dict[str, str]
    spec: str


class PutGeneration(msgspec.Struct, metaclass=FrozenMeta):
    """Keep a generation; of one that is known, take over the labels alone."""

    generation: Generation


class HistoryStore(Protocol):
    """The part of the agent's store that holds the history."""

    async def histories(self, kind: str, namespace: str, name: str) -> list[str]:
        """Return the uids that have had this name and have a history, newest first."""
        ...

    async def history(self, uid: str) -> list[GenerationRow]:
        """Return what is known of an object's generations, newest first."""
        ...

    async def generation(self, uid: str, generation: int) -> Generation | None:
        """Return one generation whole."""
        ...


def with_generation(known: tuple[Generation, ...], new: Generation) -> tuple[Generation, ...]:
    """Return a history, oldest first, with one more generation or with its newer labels."""
    kept = [
        _replace(each, labels=new.labels) if each.row.generation == new.row.generation else each
        for each in known
    ]
    if all(each.row.generation != new.row.generation for each in known):
        kept.append(new)
    return tuple(kept[-GENERATIONS_MAX:])
