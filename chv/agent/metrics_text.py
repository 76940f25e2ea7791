"""The text form of metrics: Prometheus exposition 0.0.4. Pure.

Ours rather than a client library's: all values are read from the agent's tables when somebody
asks, so that a registry of long-lived metric objects would only be a second memory of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = Mapping[str, str]


@dataclass(frozen=True)
class Family:
    """A metric and its samples. `kind`: gauge | counter | histogram. Without samples: absent."""

    name: str
    kind: str
    help: str
    samples: list[tuple[str, Labels, float]] = field(default_factory=list)

    def add(self, value: float | None, **labels: str) -> None:
        """Add a sample; what is not known (None) is left out, for 0 would be a claim."""
        if value is not None:
            self.samples.append((self.name, labels, value))


class Histogram:
    """Cumulative buckets for each set of labels. `bounds_s` ascend; +Inf is implied."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds = tuple(bounds_s)
        self._counts: dict[tuple[tuple[str, str], ...], list[int]] = {}
        self._sums: dict[tuple[tuple[str, str], ...], float] = {}

    def observe(self, seconds: float, **labels: str) -> None:
        """Count one duration."""
        key = tuple(labels.items())
        counts = self._counts.setdefault(key, [0] * (len(self._bounds) + 1))
        counts[bisect_left(self._bounds, seconds)] += 1
        self._sums[key] = self._sums.get(key, 0.0) + seconds

    def family(self, name: str, text: str) -> Family:
        """Return all that was counted."""
        family = Family(name, "histogram", text)
        for key, counts in self._counts.items():
            total = 0
            for bound, count in zip((*self._bounds, math.inf), counts, strict=True):
                total += count
                labels = {**dict(key), "le": number(bound)}
                family.samples.append((f"{name}_bucket", labels, total))
            family.samples.append((f"{name}_sum", dict(key), self._sums[key]))
            family.samples.append((f"{name}_count", dict(key), total))
        return family


def render(families: Sequence[Family]) -> str:
    """Return the families that have samples as text."""
    lines: list[str] = []
    for family in families:
        if not family.samples:
            continue
        text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {family.name} {text}", f"# TYPE {family.name} {family.kind}"]
        lines += [
            f"{name}{_labels(labels)} {number(value)}" for name, labels, value in family.samples
        ]
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """Return a value as the format writes it."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
