"""The grammar of `chv ops`. Data only."""

from __future__ import annotations

import argparse
from collections.abc import Callable

Sub = argparse._SubParsersAction  # argparse has no public name for it
Add = Callable[["Sub[argparse.ArgumentParser]", str, str, str], argparse.ArgumentParser]
STATES = ("Pending", "Running", "Succeeded", "Failed", "Cancelled", "Superseded")


def add_operations(commands: Sub[argparse.ArgumentParser], add: Add) -> None:
    """Add `chv ops`; `add` makes one of its actions with its handler."""
    ops = add(commands, "ops", "ops:ls", "Operations: who did what and why, and how it went.")
    actions = ops.add_subparsers(metavar="ACTION")
    listing = add(actions, "ls", "ops:ls", "List operations, newest first.")
    for parser in (ops, listing):
        _filters(parser)
        _output(parser)
    show = add(actions, "show", "ops:show", "Show one operation with its steps.")
    show.add_argument("id")
    show.add_argument("--logs", action="store_true", help="with the lines of all three daemons")
    _output(show)
    cancel = add(
        actions,
        "cancel",
        "ops:cancel",
        "End an operation early, where that is safe (operations.md).",
    )
    cancel.add_argument("id")
    cancel.add_argument("--reason", default="", help="recorded with the operation")
    cancel.add_argument("--no-wait", action="store_true", help="return as soon as it is accepted")
    cancel.add_argument("--timeout", default="5m", help="how long to wait (default: 5m)")


def _filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--active", action="store_true", help="only those not finished")
    parser.add_argument(
        "--state", action="append", default=[], choices=STATES, help="may be repeated"
    )
    parser.add_argument(
        "--kind", default="", help="of an object (vm, volume, ...) or Node, Leak, ..."
    )
    parser.add_argument("--name", default="", help="of the object")
    parser.add_argument("-n", "--namespace", default="", help="of the object (default: all)")
    parser.add_argument("--verb", default="", help="create, stop, backup, ...")
    parser.add_argument("--since", default="", metavar="10m|TIME", help="begun since then")
    parser.add_argument("--limit", type=int, default=50)


def _output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", choices=("json", "yaml"), help="machine-readable output")
    parser.add_argument(
        "--json", action="store_const", const="json", dest="output", help="the same as -o json"
    )
