"""`python -m benchmarks [--json FILE] [--only AREA]`: measure and compare with the budgets.

Each area is a module with `run() -> list[Result]`; where the machine's speed enters, a result is a
ratio taken within one run. Exit code 1 when a budget is missed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

AREAS = ("rpc", "cli", "agent", "storage", "network", "guest_io", "vmm", "overhead")


def main() -> int:
    """Run the chosen areas; print a table, write the JSON file."""
    parser = argparse.ArgumentParser(prog="benchmarks")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--only", choices=AREAS, action="append", help="area; may be repeated")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    for area in arguments.only or AREAS:
        results += importlib.import_module(f"benchmarks.{area}").run()
    for result in results:
        verdict = "ok" if result["ok"] else "MISSED"
        print(
            f"{result['id']:32} {result['value']:10.3f} {result['unit']:8} "
            f"budget {result['budget']:<8} {verdict:7} {result['baseline']}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"results": results}, indent=1) + "\n")
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
