"""The grammar of `chv rebuild`. Data only."""

from __future__ import annotations

import argparse
from collections.abc import Callable

Sub = argparse._SubParsersAction  # argparse has no public name for it
Add = Callable[["Sub[argparse.ArgumentParser]", str, str, str], argparse.ArgumentParser]


def add_rebuild(commands: Sub[argparse.ArgumentParser], add: Add) -> None:
    """Add the command; `add` makes it with its handler."""
    text = "Give a VM a new root disk from its image; its identity and other disks stay."
    rebuild = add(commands, "rebuild", "rebuild:rebuild", text)
    rebuild.add_argument("name", metavar="vm")
    rebuild.add_argument("--image", default="", help="an Image (default: that of its root disk)")
    rebuild.add_argument(
        "--keep-old", action="store_true", help="keep the present disk as VOLUME-before-rebuild"
    )
    rebuild.add_argument("--force", action="store_true", help="do not ask the guest to end")
    rebuild.add_argument(
        "-y", "--yes", action="store_true", help="do not ask whether the disk's data may go"
    )
    rebuild.add_argument("-n", "--namespace", default="default", help="tenant (default: default)")
    rebuild.add_argument("--reason", default="", help="recorded with the operation")
    rebuild.add_argument("--no-wait", action="store_true", help="return once it is accepted")
    rebuild.add_argument("--timeout", default="5m", help="how long to wait (default: 5m)")
    rebuild.add_argument("--json", action="store_true", help="the operation as JSON")
