"""What of our tables stands, and how to load a whole ruleset into them as they are. Pure.

Tables that are removed and made again in one transaction never leave a packet without rules, but
the kernel takes the old ones out of use piece by piece: for about a millisecond a new connection
can meet chains whose maps are empty already. So whatever else is in them, tables of ours that have
the same frame keep their chains and sets: rules and elements are exchanged, what is nobody's goes.
Sets that packets fill keep what they have. Where anything looks otherwise, `in_place` gives up, and
the tables are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from chv.nwd.nft.text import ChainKey, Ruleset, SetKey

FRAMES_KEPT_MAX = 256
_TABLE = re.compile(r'^table (\w+) (\w+) \{\n comment "([^"\n]+)"$', re.MULTILINE)
_CHAIN = re.compile(r"^ chain (\w+) \{(\n  type \w+ hook )?", re.MULTILINE)
_SET = re.compile(r"^ (set|map) (\w+) \{", re.MULTILINE)

TableKey = tuple[str, str]  # family, name


@dataclass(frozen=True, slots=True)
class StandingSet:
    """A set or map that stands."""

    is_map: bool
    is_filled: bool  # by packets

    @property
    def kind(self) -> str:
        """Return the word for it."""
        return "map" if self.is_map else "set"


@dataclass(slots=True)
class Standing:
    """One table that stands. `is_plain`: it is in force, and holds nothing but chains and sets."""

    comment: str = ""
    is_plain: bool = True
    chains: dict[str, bool] = field(default_factory=dict)  # whether packets come to it by a hook
    sets: dict[str, StandingSet] = field(default_factory=dict)


@dataclass(slots=True)
class _Declared:
    """What a frame says of one table."""

    comment: str
    chains: dict[str, bool]
    sets: dict[str, bool]  # whether it is a map


def in_place(wanted: Ruleset, standing: Mapping[TableKey, Standing]) -> str:
    """Return one transaction that makes the tables what is wanted; empty where they must go."""
    declared = _declared(wanted.frame)
    if declared.keys() != set(wanted.tables):
        return ""
    for table in wanted.tables:
        now = standing.get(table)
        if now is None or not _fits(now, _with_shared(declared[table], table, wanted)):
            return ""
    lines = [line for each in wanted.tables for line in _emptied(each, standing[each])]
    for each in wanted.tables:
        lines += _superfluous(each, standing[each], _with_shared(declared[each], each, wanted))
    return "".join(f"{line}\n" for line in lines) + wanted.content()


def _fits(now: Standing, wanted: _Declared) -> bool:
    """Tell whether what stands under a wanted name is the kind of thing that is wanted there."""
    return (
        now.is_plain
        and now.comment == wanted.comment
        and all(wanted.chains.get(name, is_base) is is_base for name, is_base in now.chains.items())
        and all(wanted.sets.get(name, one.is_map) is one.is_map for name, one in now.sets.items())
    )


def _with_shared(declared: _Declared, table: TableKey, wanted: Ruleset) -> _Declared:
    chains = {key.name: False for key in wanted.chains if (key.family, key.table) == table}
    sets = {key.name: False for key in wanted.sets if (key.family, key.table) == table}
    return _Declared(declared.comment, declared.chains | chains, declared.sets | sets)


def _emptied(table: TableKey, now: Standing) -> Iterator[str]:
    """Rules leave first: what they refer to is free then."""
    yield f"flush table {' '.join(table)}"
    for name, one in now.sets.items():
        if not one.is_filled:
            yield f"flush {one.kind} {SetKey(*table, name)}"


def _superfluous(table: TableKey, now: Standing, wanted: _Declared) -> Iterator[str]:
    for name, one in now.sets.items():
        if name not in wanted.sets:
            yield f"delete {one.kind} {SetKey(*table, name)}"
    for name in now.chains:
        if name not in wanted.chains:
            yield f"delete chain {ChainKey(*table, name)}"


@lru_cache(FRAMES_KEPT_MAX)
def _declared(frame: str) -> dict[TableKey, _Declared]:
    """Read our own text: what tables it has, and their chains and sets."""
    begins = list(_TABLE.finditer(frame))
    ends = [*(each.start() for each in begins[1:]), len(frame)]
    found = {}
    for begin, end in zip(begins, ends, strict=True):
        body = frame[begin.end() : end]
        found[begin[1], begin[2]] = _Declared(
            begin[3],
            {each[1]: bool(each[2]) for each in _CHAIN.finditer(body)},
            {each[2]: each[1] == "map" for each in _SET.finditer(body)},
        )
    return found
