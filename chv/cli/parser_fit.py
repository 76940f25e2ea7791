"""The grammar of `chv fit` and `chv node inventory`. Data only."""

from __future__ import annotations

import argparse
from collections.abc import Callable

Sub = argparse._SubParsersAction  # argparse has no public name for it
Add = Callable[["Sub[argparse.ArgumentParser]", str, str, str], argparse.ArgumentParser]


def add_fit(commands: Sub[argparse.ArgumentParser], add: Add) -> None:
    """Add `chv fit`."""
    fit = add(commands, "fit", "fit:fit", "How many VMs fit on this node, and what binds first.")
    fit.add_argument("vms", nargs="*", metavar="VMS", help="such as '20x(2c,4Gi,40Gi)', quoted")
    fit.add_argument("--vm", metavar="FILE", help="a manifest; each of its VMs is asked for")
    fit.add_argument("--count", type=int, default=1, help="with --vm: so many of each")
    fit.add_argument("-n", "--namespace", default="default", help="tenant (default: default)")
    fit.add_argument("--json", action="store_true")


def add_inventory(actions: Sub[argparse.ArgumentParser], add: Add) -> None:
    """Add `chv node inventory`."""
    inventory = add(
        actions, "inventory", "inventory:inventory", "CPUs, memory, disks, versions, features."
    )
    inventory.add_argument("--fresh", action="store_true", help="look again now")
    inventory.add_argument("--json", action="store_true")
