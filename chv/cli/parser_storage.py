"""The grammar of `chv volume`, `snapshot`, `key` and `storage`. Data only."""

from __future__ import annotations

import argparse
from collections.abc import Callable

Sub = argparse._SubParsersAction  # argparse has no public name for it
Add = Callable[["Sub[argparse.ArgumentParser]", str, str, str], argparse.ArgumentParser]


def add_storage(commands: Sub[argparse.ArgumentParser], add: Add) -> None:
    """Add the commands; `add` makes one of them with its handler."""
    _volume(commands, add)
    _backup(commands, add)
    _snapshot(commands, add)
    _key(commands, add)
    _storage(commands, add)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--namespace", default="default", help="tenant (default: default)")


def _acting(parser: argparse.ArgumentParser, timeout: str = "5m") -> None:
    _common(parser)
    parser.add_argument("--reason", default="", help="recorded with the operation")
    parser.add_argument("--no-wait", action="store_true", help="return as soon as it is accepted")
    parser.add_argument("--timeout", default=timeout, help=f"how long to wait (default: {timeout})")


def _listing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-A", "--all-namespaces", action="store_true")
    _common(parser)
    _output(parser)


def _output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", choices=("json", "yaml"), help="machine-readable output")


def _volume(commands: Sub[argparse.ArgumentParser], add: Add) -> None:
    volume = commands.add_parser("volume", help="Volumes: list, change, check, back up, move.")
    actions = volume.add_subparsers(metavar="ACTION", required=True)
    _listing(add(actions, "ls", "volume:ls", "List volumes."))
    show = add(actions, "show", "volume:show", "Show one volume with snapshots and conditions.")
    show.add_argument("name")
    _common(show)
    _output(show)
    _volume_verbs(actions, add)
    _volume_changes(actions, add)


def _volume_verbs(actions: Sub[argparse.ArgumentParser], add: Add) -> None:
    texts = {
        "check": "Check a volume that no VM runs on.",
        "repair": "Check a volume that no VM runs on, and repair it.",
        "backup": "Copy a volume to a directory of the node or an NBD server.",
        "restore": "Bring a volume back to a snapshot; no VM runs on it.",
    }
    for verb, text in texts.items():
        parser = add(actions, verb, "volume:act", text)
        parser.set_defaults(verb=verb)
        parser.add_argument("name")
        if verb == "backup":
            parser.add_argument(
                "--target",
                required=True,
                help="a directory below storage.backup_paths, or nbd://HOST:PORT/EXPORT",
            )
            _backup_options(parser)
        if verb == "restore":
            parser.add_argument("--snapshot", required=True, help="a VolumeSnapshot that has it")
        _acting(parser, "1h")


def _backup(commands: Sub[argparse.ArgumentParser], add: Add) -> None:
    text = "Back up all disks of a VM, as they were in one instant."
    backup = add(commands, "backup", "backup:backup", text)
    backup.add_argument("name", metavar="vm")
    backup.add_argument(
        "--to",
        dest="target",
        required=True,
        help="as --target of `chv volume backup`; each volume goes below it, by its name",
    )
    _backup_options(backup)
    _acting(backup, "1h")


def _backup_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--incremental", action="store_true", help="what changed since the one before"
    )
    parser.add_argument("--rate", default="", help="at most so much a second: 50Mi")


def _volume_changes(actions: Sub[argparse.ArgumentParser], add: Add) -> None:
    grow = add(actions, "grow", "volume:grow", "Make a volume larger, also under a running VM.")
    grow.add_argument("name")
    grow.add_argument("size", help="the new size: 20Gi")
    grow.add_argument(
        "--now", action="store_true", help="unplug the disk and plug it again where needed"
    )
    _acting(grow)
    move = add(actions, "move", "volume:move", "Bring a volume to another place.")
    move.add_argument("name")
    move.add_argument("--pool", help="class file: a pool of the node, '' for its own")
    move.add_argument("--format", choices=["raw", "qcow2"])
    move.add_argument(
        "--class", dest="class_name", choices=["file", "block", "lvm", "nbd", "iscsi", "rbd"]
    )
    move.add_argument(
        "--place", default="", metavar="KEY=VALUE,…", help="of the class: volumeGroup=vg0"
    )
    _acting(move, "1h")
    rekey = add(actions, "rekey", "volume:rekey", "Rotate the encryption key of a volume.")
    rekey.add_argument("name")
    rekey.add_argument("key", help="a key of `chv key ls`")
    _acting(rekey)
    limit = add(actions, "limit", "volume:limit", "Limit a volume's I/O; applied at once.")
    limit.add_argument("name")
    for kind, example in (("iops", "500:2000:30"), ("bandwidth", "50Mi:200Mi:10")):
        for part in ("total", "read", "write"):
            limit.add_argument(
                f"--{kind}-{part}",
                metavar="LIMIT[:BURST[:SECONDS]]",
                help=f"for instance {example}; 0: none",
            )
    limit.add_argument("--iops-size", metavar="SIZE", help="larger requests count as several")
    limit.add_argument("--none", action="store_true", help="take all limits away first")
    _acting(limit)


def _snapshot(commands: Sub[argparse.ArgumentParser], add: Add) -> None:
    snapshot = commands.add_parser("snapshot", help="Snapshots of volumes and VMs.")
    actions = snapshot.add_subparsers(metavar="ACTION", required=True)
    create = add(actions, "create", "snapshot:create", "Take a snapshot, crash-consistent.")
    create.add_argument("name")
    source = create.add_mutually_exclusive_group(required=True)
    source.add_argument("--volume", default="", help="of one volume")
    source.add_argument("--vm", default="", help="of all disks that a VM writes, in one instant")
    create.add_argument(
        "--memory", action="store_true", help="with --vm: memory and devices too, to go on from"
    )
    create.add_argument(
        "--freeze", default="", metavar="TIME", help="freeze the guest for at most 1s to 60s"
    )
    _acting(create)
    _listing(add(actions, "ls", "snapshot:ls", "List snapshots."))
    remove = add(actions, "rm", "snapshot:rm", "Delete a snapshot: its data is merged.")
    remove.add_argument("name")
    _acting(remove, "1h")
    restore = add(
        actions, "restore", "snapshot:restore", "Bring volumes back to it; no VM runs on them."
    )
    restore.add_argument("name")
    restore.add_argument("--volume", default="", help="only this one")
    _acting(restore)


def _key(commands: Sub[argparse.ArgumentParser], add: Add) -> None:
    key = commands.add_parser("key", help="Encryption keys of this node.")
    actions = key.add_subparsers(metavar="ACTION", required=True)
    create = add(actions, "create", "key:create", "Store a key; made at random unless given.")
    create.add_argument("name")
    create.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        help="its bytes as they are (UTF-8 text, 16 to 4096 bytes); - is standard input",
    )
    _common(create)
    create.add_argument("--reason", default="", help="recorded with the operation")
    _listing(add(actions, "ls", "key:ls", "List keys by name; a key itself is never shown."))
    remove = add(actions, "rm", "key:rm", "Destroy a key that no volume needs.")
    remove.add_argument("name")
    _common(remove)
    remove.add_argument("--reason", default="", help="recorded with the operation")


def _storage(commands: Sub[argparse.ArgumentParser], add: Add) -> None:
    storage = commands.add_parser("storage", help="The node's storage as a whole.")
    actions = storage.add_subparsers(metavar="ACTION", required=True)
    _output(add(actions, "status", "storage:status", "The storage daemon and all volumes."))
    restart = add(
        actions,
        "restart",
        "vm:act",
        "Replace the storage daemon under a running VM, for instance after an upgrade of QEMU.",
    )
    restart.add_argument("name", metavar="vm")
    _acting(restart, "1m")
    restart.set_defaults(verb="restart_storage")
    _output(add(actions, "jobs", "storage:jobs", "Long work of the storage daemon."))
    _output(add(actions, "metrics", "storage:metrics", "What is counted, and what is not."))
