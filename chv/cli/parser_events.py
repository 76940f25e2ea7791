"""The grammar of `chv events`. Data only."""

from __future__ import annotations

import argparse
from collections.abc import Callable

Sub = argparse._SubParsersAction  # argparse has no public name for it
Add = Callable[["Sub[argparse.ArgumentParser]", str, str, str], argparse.ArgumentParser]


def add_events(commands: Sub[argparse.ArgumentParser], add: Add) -> None:
    """Add the command; `add` makes it with its handler."""
    events = add(commands, "events", "events:events", "What has happened, in order, by number.")
    events.add_argument(
        "object", metavar="KIND/NAME", nargs="?", default="", help="of this alone; node: the node's"
    )
    events.add_argument(
        "-f", "--follow", action="store_true", help="go on, also over a new start of the agent"
    )
    events.add_argument(
        "--after", type=int, metavar="SEQ", help="only later than this one, none left out"
    )
    events.add_argument("--type", choices=("Normal", "Warning"), default="")
    events.add_argument("--since", default="", help="10m, or an RFC 3339 time")
    events.add_argument("--operation", default="", metavar="ID", help="of this operation")
    events.add_argument("--json", action="store_true", help="one object a line")
    events.add_argument(
        "-n", "--namespace", default="", help="tenant (default: all; of KIND/NAME: default)"
    )
