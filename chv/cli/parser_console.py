"""The grammar of `chv console` and `chv logs`. Data only."""

from __future__ import annotations

import argparse
from collections.abc import Callable

Sub = argparse._SubParsersAction  # argparse has no public name for it
Add = Callable[["Sub[argparse.ArgumentParser]", str, str, str], argparse.ArgumentParser]


def add_console(commands: Sub[argparse.ArgumentParser], add: Add) -> None:
    """Add the commands; `add` makes one of them with its handler."""
    console = add(commands, "console", "console:console", "Attach to a VM's serial console.")
    console.add_argument("name")
    pen = console.add_mutually_exclusive_group()
    pen.add_argument("--read-only", action="store_true", help="look and never type")
    pen.add_argument("--take", action="store_true", help="type, though another viewer does")
    console.add_argument(
        "--escape", default="^]", metavar="KEY", help="key that leaves: ^X, or none (default: ^])"
    )
    logs = add(commands, "logs", "logs:logs", "Show a serial console or a daemon's log.")
    logs.add_argument("target", help="vm/NAME or daemon/agent|stord|nwd|console")
    logs.add_argument("-f", "--follow", action="store_true")
    logs.add_argument("--tail", type=int, metavar="LINES", help="default 200; with --since all")
    logs.add_argument("--operation", default="", metavar="ID", help="lines of this operation")
    logs.add_argument("--since", default="", help="10m, 2h, or a time as 2026-01-31T12:00:00Z")
    logs.add_argument(
        "--timestamps",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="of a VM's lines (a daemon's carry theirs)",
    )
    for parser in (console, logs):
        parser.add_argument("-n", "--namespace", default="default")
