"""The grammar of `chv leaks` and `chv daemon`. Data only."""

from __future__ import annotations

import argparse
from collections.abc import Callable

Sub = argparse._SubParsersAction  # argparse has no public name for it
Add = Callable[["Sub[argparse.ArgumentParser]", str, str, str], argparse.ArgumentParser]


def add_upkeep(commands: Sub[argparse.ArgumentParser], add: Add) -> None:
    """Add the commands; `add` makes one of them with its handler."""
    text = "List what of this node exists and no record explains."
    leaks = add(commands, "leaks", "leaks:list_leaks", text)
    leaks.add_argument("--now", action="store_true", help="look now, not at the last look")
    _output(leaks)
    actions = leaks.add_subparsers(metavar="ACTION")
    reap = add(actions, "reap", "leaks:reap", "Remove one leak, after looking again.")
    reap.add_argument("--data", action="store_true", help="also where it may be a tenant's data")
    adopt = add(actions, "adopt", "leaks:adopt", "Take one up again: a VMM of a recorded VM.")
    for parser in (reap, adopt):
        parser.add_argument("id", metavar="ID", help="as `chv leaks` shows it")
        parser.add_argument("--reason", default="", help="recorded with the operation")
    _daemon(commands, add)


def _daemon(commands: Sub[argparse.ArgumentParser], add: Add) -> None:
    daemon = commands.add_parser("daemon", help="The daemons that the agent supervises.")
    actions = daemon.add_subparsers(metavar="ACTION", required=True)
    listed = add(actions, "list", "daemon:list_daemons", "State, pid and version of each.")
    _output(listed)
    restart = add(
        actions, "restart", "daemon:restart", "Start one anew, as for its upgrade; VMs go on."
    )
    restart.add_argument("name", choices=["stord", "nwd", "console"])
    restart.add_argument("--reason", default="", help="recorded with the operation")


def _output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", choices=("json", "yaml"), help="machine-readable output")
    parser.add_argument(
        "--json", action="store_const", const="json", dest="output", help="the same as -o json"
    )
