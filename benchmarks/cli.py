"""`cli.get_wall`: how long `chv get vm` takes, start of the interpreter included."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.node import fake_node

RUNS = 15
BUDGET_MS = 150.0


def run() -> list[dict[str, Any]]:
    """Measure against an idle node; the baseline is a Python that does nothing."""
    with fake_node() as node:
        argv = [sys.executable, "-m", "chv.cli", "--socket", str(node.socket), "get", "vm"]
        walls = [_wall_ms(argv) for _ in range(RUNS)]
        bare = [_wall_ms([sys.executable, "-c", "pass"]) for _ in range(RUNS)]
    value = statistics.median(walls)
    return [
        {
            "id": "cli.get_wall",
            "value": round(value, 1),
            "unit": "ms",
            "budget": BUDGET_MS,
            "ok": value <= BUDGET_MS,
            "baseline": f"python -c pass: {statistics.median(bare):.1f} ms",
            "runs": RUNS,
        }
    ]


def _wall_ms(argv: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(argv, check=True, capture_output=True)
    return (time.perf_counter() - begun) * 1000
