"""How answers look: aligned tables for people, JSON or YAML for machines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

GAP = "   "


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under upper-case headers, each column as wide as it needs."""
    lines = [list(headers), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(line[index]) for line in lines) for index in range(len(headers))]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print(GAP.join(cells).rstrip())


def document(value: Any, style: str) -> None:
    """Print `value` (built-in types or structs) as `json` or `yaml`."""
    plain = msgspec.to_builtins(value)
    if style == "json":
        print(msgspec.json.format(msgspec.json.encode(plain), indent=2).decode())
        return
    import yaml

    yaml.safe_dump(plain, sys.stdout, sort_keys=False, default_flow_style=False)


def age(stamp: str) -> str:
    """Return how long ago an RFC 3339 time was: `42s`, `7m`, `3h`, `12d`; `-` for none."""
    if not stamp:
        return "-"
    then = datetime.fromisoformat(stamp.replace("Z", "+00:00"))
    seconds = max(0, int((datetime.now(UTC) - then).total_seconds()))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def note(text: str) -> None:
    """Print a line for people on standard error, so that standard output stays clean."""
    print(text, file=sys.stderr)
