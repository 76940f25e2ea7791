"""What was seen of things that no record explains, look by look. Pure.

A thing is a leak once two looks, `settle_s` apart, have seen it unexplained and the same. Whatever
belongs to an object with an operation under way, is explained, gone or replaced meanwhile begins
anew. Of a source that did not answer nothing is forgotten and nothing becomes a leak.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from chv.common.wire.types import CensusItem

KINDS = ("process", "socket", "link", "netns", "nft", "mount", "cgroup", "file")
ID_CHARACTERS = 10


@dataclass(frozen=True, slots=True)
class Look:
    """One look at everything: (source, thing), which sources answered, and why others did not."""

    items: tuple[tuple[str, CensusItem], ...]
    read: frozenset[str]
    unread: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sighting:
    """A thing that nothing explains. `first_s`, `last_s`: monotonic; `since`: a time stamp."""

    id: str
    source: str
    item: CensusItem
    first_s: float
    last_s: float
    since: str
    looks: int = 1


class LeakBook:
    """The sightings so far. `settle_s`: how long a thing must stand unexplained."""

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._seen: dict[str, Sighting] = {}
        self._leaks: dict[str, Sighting] = {}
        self.unread: dict[str, str] = {}
        self.looked_at = ""

    def note(self, look: Look, busy: Collection[str], now_s: float, stamp: str) -> None:
        """Take in a look; `busy` holds owners with an operation under way."""
        before, self._seen = self._seen, {}
        for each in before.values():
            if each.source not in look.read:
                self._seen[each.id] = each
        for source, item in unexplained(look.items):
            if source in look.read and item.owner not in busy:
                self._see(source, item, before, now_s, stamp)
        self._leaks = {
            each.id: each
            for each in self._seen.values()
            if each.id in self._leaks or self._is_settled(each)
        }
        self.unread, self.looked_at = dict(look.unread), stamp

    def _see(
        self, source: str, item: CensusItem, before: dict[str, Sighting], now_s: float, stamp: str
    ) -> None:
        key = leak_id(source, item)
        earlier = before.get(key)
        if earlier is None:
            self._seen[key] = Sighting(key, source, item, now_s, now_s, stamp)
            return
        self._seen[key] = replace(earlier, item=item, last_s=now_s, looks=earlier.looks + 1)

    def _is_settled(self, each: Sighting) -> bool:
        return each.looks > 1 and each.last_s - each.first_s >= self._settle_s

    def leaks(self) -> list[Sighting]:
        """Return what is certain, by kind and name."""
        return sorted(
            self._leaks.values(), key=lambda each: (KINDS.index(each.item.kind), each.item.name)
        )

    def find(self, key: str) -> Sighting | None:
        """Return a leak by its id."""
        return self._leaks.get(key)

    def sees(self, key: str) -> bool:
        """Tell whether the last look has seen it, be it certain or not."""
        return key in self._seen

    def forget(self, key: str) -> None:
        """It was removed or taken up."""
        self._seen.pop(key, None)
        self._leaks.pop(key, None)

    @property
    def watching(self) -> int:
        """How many things are seen that are not certain yet."""
        return len(self._seen) - len(self._leaks)

    def counts(self) -> dict[str, int]:
        """Return the number of leaks of every kind, 0 included, for the metrics."""
        found = Counter(each.item.kind for each in self._leaks.values())
        return {kind: found[kind] for kind in KINDS}


def unexplained(items: Iterable[tuple[str, CensusItem]]) -> list[tuple[str, CensusItem]]:
    """Return what nobody explains: a thing that one daemon does not know may be another's."""
    found = [(source, item) for source, item in items if item.kind in KINDS]
    known = {(item.kind, item.name) for _, item in found if item.known}
    return [(source, item) for source, item in found if (item.kind, item.name) not in known]


def leak_id(source: str, item: CensusItem) -> str:
    """Return the id of exactly this thing; another under its name has another."""
    text = "\0".join((source, item.kind, item.name, item.identity))
    return hashlib.sha256(text.encode()).hexdigest()[:ID_CHARACTERS]
