"""The grammar of `chv history`, `diff`, `rollback` and `why`. Data only."""

from __future__ import annotations

import argparse
from collections.abc import Callable

Sub = argparse._SubParsersAction  # argparse has no public name for it
Add = Callable[["Sub[argparse.ArgumentParser]", str, str, str], argparse.ArgumentParser]


def add_history(commands: Sub[argparse.ArgumentParser], add: Add) -> None:
    """Add the commands; `add` makes one of them with its handler."""
    history = add(commands, "history", "history:history", "Who changed an object, when and why.")
    history.add_argument("object", help="KIND/NAME, or KIND/NAME@N for that generation itself")
    history.add_argument("--uid", default="", help="an earlier object of that name")
    diff = add(commands, "diff", "history:diff", "Compare two generations; exit code 1: differ.")
    diff.add_argument("first", metavar="KIND/NAME@N")
    diff.add_argument("second", metavar="KIND/NAME@N", nargs="?", help="default: as it is now")
    rollback = add(
        commands, "rollback", "history:rollback", "Apply an earlier generation as a new one."
    )
    rollback.add_argument("object", metavar="KIND/NAME")
    rollback.add_argument("--to", type=int, required=True, metavar="N", help="the generation")
    rollback.add_argument("--dry-run", action="store_true", help="check it, change nothing")
    rollback.add_argument("--reason", default="", help="recorded with the operation")
    rollback.add_argument("--no-wait", action="store_true", help="return once it is accepted")
    rollback.add_argument("--timeout", default="5m", help="how long to wait (default: 5m)")
    why = add(commands, "why", "why:why", "Say what keeps an object from being as wanted.")
    why.add_argument("object", metavar="KIND/NAME", help="or a VM's name")
    for parser in (history, diff, rollback, why):
        parser.add_argument(
            "-n", "--namespace", default="default", help="tenant (default: default)"
        )
        parser.add_argument(
            "-o", "--output", choices=("json", "yaml"), help="machine-readable output"
        )
