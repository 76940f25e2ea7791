"""What a daemon says of objects, in the words of those who named them. Pure.

stord and nwd know uids alone. An error of theirs that a person reads has names instead.
"""

from __future__ import annotations

import re

import msgspec

from chv.agent.tables import Tables
from chv.common.errors import ChvError, ErrorData

_UID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")


def named(tables: Tables, text: str) -> str:
    """Return the text with the names of all objects that are known."""

    def name(found: re.Match[str]) -> str:
        stored = tables.objects.get(found[0])
        return found[0] if stored is None else f"{stored.key[1]}/{stored.key[2]}"

    return _UID.sub(name, text)


def named_error(tables: Tables, error: ChvError) -> ChvError:
    """Return an error of the same kind that says the same with names; the same where none is."""
    parts = {part: named(tables, getattr(error, part)) for part in ("resource", "field", "hint")}
    message = named(tables, error.message)
    if message == error.message and all(getattr(error, part) == parts[part] for part in parts):
        return error
    return type(error)(message, **parts)


def named_data(tables: Tables, error: ErrorData | None) -> ErrorData | None:
    """Do so for the error of a job."""
    if error is None:
        return None
    return msgspec.structs.replace(
        error,
        message=named(tables, error.message),
        resource=named(tables, error.resource),
        hint=named(tables, error.hint),
    )
