"""How answers look: aligned tables for people, JSON or YAML for machines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

GAP = "   "
WIDTH_MIN = 24


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under upper-case headers, each column as wide as it needs.

    The last one may have several lines, and is broken where it would leave the terminal.
    """
    lines = [list(headers), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(line[index]) for line in lines) for index in range(len(headers) - 1)]
    indent = sum(widths) + len(GAP) * len(widths)
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        first, *more = _broken(line[-1], _terminal_columns() - indent)
        print(GAP.join([*cells, first]).rstrip())
        for each in more:
            print(" " * indent + each)


def _terminal_columns() -> int:
    """Return the width of the terminal; 0 where it goes elsewhere: a line is then a line."""
    if not sys.stdout.isatty():
        return 0
    import shutil

    return shutil.get_terminal_size().columns


def _broken(text: str, width: int) -> list[str]:
    """Return a cell in lines that fit; a width that is too small for words leaves it whole."""
    lines = text.split("\n")
    if width < WIDTH_MIN or max(map(len, lines)) <= width:
        return lines
    import textwrap

    broken = (
        textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]
        for line in lines
    )
    return [part for parts in broken for part in parts]


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
