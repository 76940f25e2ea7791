"""`chv doctor`."""

from __future__ import annotations

import argparse

import msgspec

from chv.cli import output
from chv.host.doctor import run_checks

EXIT_UNFIT = 6


def doctor(arguments: argparse.Namespace) -> int:
    """Print every check; exit code 6 when a node cannot run here."""
    checks = run_checks()
    if arguments.json:
        print(msgspec.json.encode({"checks": checks}).decode())
    else:
        rows = [[check.status, check.id, check.message, check.remedy] for check in checks]
        output.table(["STATUS", "CHECK", "FOUND", "REMEDY"], rows)
    return EXIT_UNFIT if any(check.status == "error" for check in checks) else 0
