"""Sizes for people: whole MiB below 10 GiB, else GiB with one digit. Pure."""

from __future__ import annotations

GIB, MIB = 1 << 30, 1 << 20


def about(size_bytes: int | None) -> str:
    """Return a size in words; `-` where it is not known."""
    if size_bytes is None:
        return "-"
    if size_bytes >= 10 * GIB:
        return f"{size_bytes / GIB:.1f} GiB"
    return f"{-(-size_bytes // MIB)} MiB"
