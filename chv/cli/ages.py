"""How old what the agent says of an object is. Takes plain JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chv.cli import output

# An agent looks at each object every 30 s; twice that is not normal.
NORMAL_S = 60.0
NAMED_MAX = 10


def put(items: Sequence[dict[str, Any]], ages_s: Sequence[float]) -> None:
    """Add to each status how long ago it was observed; not at all since the agent came: nothing."""
    for item, age_s in zip(items, ages_s, strict=False):
        if isinstance(item.get("status"), dict) and age_s >= 0:
            item["status"]["observedAgeSeconds"] = round(age_s, 1)


def note(items: Sequence[dict[str, Any]], ages_s: Sequence[float]) -> None:
    """Say on standard error which objects were seen longer ago than is normal."""
    late = [
        f"{item['metadata']['name']} ({_words(age_s)})"
        for item, age_s in zip(items, ages_s, strict=False)
        if (age_s > NORMAL_S or age_s < 0) and item.get("status")
    ]
    if late:
        more = f" and {len(late) - NAMED_MAX} more" if len(late) > NAMED_MAX else ""
        output.note(f"not seen lately: {', '.join(late[:NAMED_MAX])}{more}")


def _words(age_s: float) -> str:
    return "not since the agent came" if age_s < 0 else f"{age_s:.0f}s ago"
