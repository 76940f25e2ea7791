"""`chv doctor`."""

from __future__ import annotations

import argparse

import msgspec

from chv.cli import output
from chv.host.doctor import Check, run_checks

EXIT_UNFIT = 6


def doctor(arguments: argparse.Namespace) -> int:
    """Print every check; exit code 6 when a node cannot run here."""
    checks = run_checks()
    if arguments.json:
        print(msgspec.json.encode({"checks": checks}).decode())
    else:
        output.table(["STATUS", "CHECK", "FOUND"], [_row(check) for check in checks])
    return EXIT_UNFIT if any(check.status == "error" for check in checks) else 0


def _row(check: Check) -> list[str]:
    """Return a check with its remedy, where it has one, on a line of its own."""
    remedy = f"\nfix: {check.remedy}" if check.remedy else ""
    return [check.status, check.id, check.message + remedy]
