"""The grammar of `chv clone`. Data only."""

from __future__ import annotations

import argparse
from collections.abc import Callable

Sub = argparse._SubParsersAction  # argparse has no public name for it
Add = Callable[["Sub[argparse.ArgumentParser]", str, str, str], argparse.ArgumentParser]


def add_clone(commands: Sub[argparse.ArgumentParser], add: Add) -> None:
    """Add the command; `add` makes it with its handler."""
    text = "Make a VM like another, with its disks as they are in one instant."
    clone = add(commands, "clone", "clone:clone", text)
    clone.add_argument("name", metavar="vm")
    clone.add_argument("new_name", metavar="new")
    start = clone.add_mutually_exclusive_group()
    start.add_argument("--start", action="store_true", default=None, help="it runs")
    start.add_argument(
        "--no-start", dest="start", action="store_false", help="it does not (default: as the vm)"
    )
    mode = clone.add_mutually_exclusive_group()
    mode.add_argument(
        "--linked",
        dest="mode",
        action="store_const",
        const="Linked",
        default="Linked",
        help="at once; the vm's volumes are needed as long as the clone's (default)",
    )
    mode.add_argument(
        "--full", dest="mode", action="store_const", const="Full", help="copy the disks"
    )
    clone.add_argument(
        "--freeze", default="", metavar="TIME", help="freeze the vm's guest for at most 1s to 60s"
    )
    clone.add_argument("-n", "--namespace", default="default", help="tenant (default: default)")
    clone.add_argument("--reason", default="", help="recorded with the operation")
    clone.add_argument("--no-wait", action="store_true", help="return once it is accepted")
    clone.add_argument("--timeout", default="5m", help="how long to wait (default: 5m)")
