"""Texts on the way to QEMU's command line: what they may hold, and how they are escaped. Pure.

Fails with InvalidArgument naming the field.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from chv.common.errors import InvalidArgument

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def option(value: str) -> str:
    """Return a value for an option list: commas doubled, QEMU's own escape."""
    return value.replace(",", ",,")


def plain(value: str, field: str) -> str:
    """Refuse control characters."""
    if _CONTROL.search(value):
        raise InvalidArgument(f"{value!r} has a control character", field=field)
    return value


def absolute(value: str, field: str) -> str:
    """Refuse what is not an absolute path."""
    if not value.startswith("/"):
        raise InvalidArgument(f"{value!r} is not an absolute path", field=field)
    return plain(value, field)


def match(pattern: re.Pattern[str], value: str, field: str) -> None:
    """Refuse what is not wholly of a pattern."""
    if not pattern.fullmatch(value):
        raise InvalidArgument(f"{value!r} does not match {pattern.pattern}", field=field)


def distinct(ids: Sequence[str], field: str) -> None:
    """Refuse an id that comes twice."""
    for identifier in ids:
        if ids.count(identifier) > 1:
            raise InvalidArgument(f"id {identifier!r} is used twice", field=field)
