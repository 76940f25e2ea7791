"""The grammar of `chv node`. Data only."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from chv.cli.parser_fit import add_inventory

Sub = argparse._SubParsersAction  # argparse has no public name for it
Add = Callable[["Sub[argparse.ArgumentParser]", str, str, str], argparse.ArgumentParser]


def add_node(commands: Sub[argparse.ArgumentParser], add: Add) -> None:
    """Add `chv node`; `add` makes one of its actions with its handler."""
    node = commands.add_parser("node", help="The node itself: state, drain, maintenance.")
    actions = node.add_subparsers(metavar="ACTION", required=True)
    status = add(actions, "status", "node:status", "State, daemons, VMMs and conditions.")
    status.add_argument("-o", "--output", choices=("json", "yaml", "wide"))
    status.add_argument(
        "--json", dest="output", action="store_const", const="json", help="the same as -o json"
    )
    add_inventory(actions, add)
    drain = add(
        actions, "drain", "node_verbs:drain", "Stop every VM and start none; ends in Maintenance."
    )
    drain.add_argument("--cancel", action="store_true", help="start again what is wanted")
    maintenance = add(
        actions, "maintenance", "node_verbs:maintenance", "The same, with a reason that is shown."
    )
    resume = add(
        actions, "resume", "node_verbs:resume", "Leave Maintenance; VMs that are wanted start."
    )
    for parser in (drain, maintenance):
        parser.add_argument(
            "--until-boot", action="store_true", help="serve again after the next boot of the host"
        )
    for parser in (drain, maintenance, resume):
        parser.add_argument(
            "--no-wait", action="store_true", help="return as soon as it is recorded"
        )
        parser.add_argument(
            "--timeout", default="10m", help="how long to wait; it goes on (default: 10m)"
        )
    pause = add(
        actions, "pause-scheduling", "node_verbs:pause_scheduling", "Let no new VM come here."
    )
    serve = add(
        actions, "resume-scheduling", "node_verbs:resume_scheduling", "Let new VMs come again."
    )
    for parser in (drain, resume, serve):
        parser.add_argument("--reason", default="", help="recorded, and shown by `node status`")
    for parser in (maintenance, pause):
        parser.add_argument("--reason", required=True, help="recorded, and shown by `node status`")
    reset = add(actions, "reset", "node:reset", "Leave state Failed and try again.")
    reset.add_argument("--reason", default="", help="recorded with the operation")
