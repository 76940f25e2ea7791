"""The prefix of a logged packet: group, rule, direction. Built and read here alone. Pure.

`chv:<first 8 of the group's id>:<index of the rule, or drop>:<in|out> `; the blank at the end is
for whoever reads it with other tools. A prefix that is not ours is None, never an error: others
may log to the same group.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from chv.common.names import check_uid
from chv.common.wire.nwd_policy import RULES_MAX, Direction

LOG_GROUP = 0  # the nflog group that rules tell
GROUP_CHARACTERS = 8
_PREFIX = re.compile(r"^chv:([0-9a-f]{8}):(drop|0|[1-9][0-9]{0,2}):(in|out) ?\Z")
_WAYS = {Direction.INGRESS: "in", Direction.EGRESS: "out"}
_DIRECTIONS = {way: direction for direction, way in _WAYS.items()}


@dataclass(frozen=True, slots=True)
class LogPrefix:
    """What a prefix says. `group`: the first 8 of its id; `rule` None: it was dropped."""

    group: str
    rule: int | None
    direction: Direction


def build(group_id: str, rule: int | None, direction: Direction) -> str:
    """Return the prefix for what a rule lets through, or for what a group drops (None)."""
    if rule is not None and not 0 <= rule < RULES_MAX:
        raise ValueError(f"{rule} is not the index of a rule")
    group = check_uid(group_id, field="group_id")[:GROUP_CHARACTERS]
    return f"chv:{group}:{'drop' if rule is None else rule}:{_WAYS[direction]} "


def parse(prefix: str) -> LogPrefix | None:
    """Return what a prefix says; None when it is not one of ours."""
    match = _PREFIX.match(prefix.rstrip("\0"))
    if match is None:
        return None
    group, rule, way = match.groups()
    return LogPrefix(group, None if rule == "drop" else int(rule), _DIRECTIONS[way])
