"""The command line's grammar. Data only: handlers are named, not imported."""

from __future__ import annotations

import argparse

from chv import VERSION
from chv.cli.parser_clone import add_clone
from chv.cli.parser_console import add_console
from chv.cli.parser_events import add_events
from chv.cli.parser_fit import add_fit
from chv.cli.parser_history import add_history
from chv.cli.parser_net import add_net
from chv.cli.parser_node import add_node
from chv.cli.parser_operations import add_operations
from chv.cli.parser_rebuild import add_rebuild
from chv.cli.parser_storage import add_storage
from chv.cli.parser_upkeep import add_upkeep

Sub = argparse._SubParsersAction  # argparse has no public name for it


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; `handler` of the result is `module:function`."""
    parser = argparse.ArgumentParser(
        prog="chv", description="Run VMs on this node.", epilog="See docs/cli.md for exit codes."
    )
    parser.add_argument("--version", action="version", version=f"chv {VERSION}")
    parser.add_argument("--socket", metavar="PATH", help="the agent's socket")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _objects(commands)
    _verbs(commands)
    add_clone(commands, _add)
    add_rebuild(commands, _add)
    _guest(commands)
    add_console(commands, _add)
    add_operations(commands, _add)
    add_events(commands, _add)
    add_history(commands, _add)
    _images(commands)
    add_storage(commands, _add)
    add_net(commands, _add)
    add_upkeep(commands, _add)
    add_fit(commands, _add)
    _node(commands)
    return parser


def _add(
    commands: Sub[argparse.ArgumentParser], name: str, handler: str, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(handler=handler)
    return parser


def _namespace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--namespace", default="default", help="tenant (default: default)")


def _output(parser: argparse.ArgumentParser, choices: tuple[str, ...] = ("json", "yaml")) -> None:
    parser.add_argument("-o", "--output", choices=choices, help="machine-readable output")


def _reason(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reason", default="", help="recorded with the operation")


def _waiting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-wait", action="store_true", help="return as soon as it is accepted")
    parser.add_argument("--timeout", default="5m", help="how long to wait (default: 5m)")


def _objects(commands: Sub[argparse.ArgumentParser]) -> None:
    apply = _add(commands, "apply", "objects:apply", "Create or change objects from manifests.")
    apply.add_argument(
        "-f",
        "--file",
        action="append",
        required=True,
        metavar="FILE",
        help="YAML or JSON manifest, - for standard input; may be repeated",
    )
    apply.add_argument("--dry-run", action="store_true", help="check everything, change nothing")
    apply.add_argument("--wait", action="store_true", help="wait until the operations are done")
    apply.add_argument("--timeout", default="5m", help="with --wait: how long (default: 5m)")
    _reason(apply)
    _output(apply)
    get = _add(commands, "get", "objects:get", "List objects of a kind, or show one.")
    get.add_argument("kind", help="vm, volume, snapshot, vmsnap, network, sg, exposure, image")
    get.add_argument("name", nargs="?")
    get.add_argument("-A", "--all-namespaces", action="store_true")
    _namespace(get)
    _output(get)
    describe = _add(commands, "describe", "objects:describe", "Show one object with conditions.")
    describe.add_argument("kind")
    describe.add_argument("name")
    _namespace(describe)
    delete = _add(
        commands, "delete", "objects:delete", "Delete objects; waits until they are gone."
    )
    delete.add_argument("kind", nargs="?")
    delete.add_argument("name", nargs="?")
    delete.add_argument(
        "-f",
        "--file",
        action="append",
        metavar="FILE",
        help="delete what these manifests name, in reverse order; may be repeated",
    )
    delete.add_argument("--ignore-not-found", action="store_true")
    delete.add_argument(
        "--force",
        action="store_true",
        help="also while the node does not see its control plane; wants --reason",
    )
    _namespace(delete)
    _reason(delete)
    _waiting(delete)


def _verbs(commands: Sub[argparse.ArgumentParser]) -> None:
    texts = {
        "start": "Start a VM (runStrategy becomes what it was before the stop).",
        "stop": "Stop a VM: asks the guest, then kills, under one deadline.",
        "restart": "Stop a VM, then start it.",
        "reset": "Press the reset button of a VM; the VMM stays.",
        "pause": "Let the vCPUs of a VM stand until it is resumed.",
        "resume": "Let a paused VM run on.",
    }
    for verb, text in texts.items():
        parser = _add(commands, verb, "vm:act", text)
        parser.set_defaults(verb=verb)
        parser.add_argument("name")
        if verb in ("stop", "restart"):
            parser.add_argument("--force", action="store_true", help="do not ask the guest")
        _namespace(parser)
        _reason(parser)
        _waiting(parser)
    restore = _add(commands, "restore", "vm:act", "Let a VM go on from a snapshot of all of it.")
    restore.set_defaults(verb="restore")
    restore.add_argument("name")
    restore.add_argument("--snapshot", required=True, help="a VirtualMachineSnapshot of this VM")
    restore.add_argument("--force", action="store_true", help="end the VM where it runs")
    _namespace(restore)
    _reason(restore)
    _waiting(restore)
    wait = _add(commands, "wait", "vm:wait", "Wait for a condition, a phase or a deletion.")
    wait.add_argument("object", help="KIND/NAME, for instance vm/hello; or node")
    wait.add_argument(
        "--for",
        dest="condition",
        required=True,
        help="SSHReady, VMMRunning=False, phase=Stopped, deleted",
    )
    wait.add_argument("--timeout", default="60s")
    _namespace(wait)


def _guest(commands: Sub[argparse.ArgumentParser]) -> None:
    ssh = _add(commands, "ssh", "ssh:ssh", "Open a shell or run a command in a guest.")
    ssh.add_argument("name")
    ssh.add_argument("-l", "--user", default="", help="login name (default: the image's)")
    ssh.add_argument("-i", "--identity", default="", help="private key file")
    ssh.add_argument("-p", "--port", type=int, default=22)
    _namespace(ssh)
    ssh.add_argument("command", nargs="*", help="after --, passed as it is")


def _images(commands: Sub[argparse.ArgumentParser]) -> None:
    image = commands.add_parser("image", help="Images: build, import, list, remove, collect.")
    actions = image.add_subparsers(metavar="ACTION", required=True)
    build = _add(actions, "build", "image:build", "Build the built-in guest and define its Image.")
    build.add_argument("builtin", nargs="?", default="tiny", choices=["tiny", "probe"])
    build.add_argument("--name", default="")
    _namespace(build)
    _reason(build)
    imported = _add(actions, "import", "image:import_", "Import a file or a URL as an image.")
    imported.add_argument(
        "source",
        metavar="SOURCE",
        help="a file, - for standard input, or an https:// (with --sha256 also http://) URL",
    )
    imported.add_argument("--name", required=True)
    imported.add_argument("--artifact", choices=["disk", "kernel", "initramfs"], default="disk")
    imported.add_argument("--format", choices=["raw", "qcow2"], default="raw")
    imported.add_argument("--sha256", default="", help="refuse the file if it differs")
    _namespace(imported)
    _reason(imported)
    listing = _add(actions, "ls", "image:ls", "List images.")
    listing.add_argument("-A", "--all-namespaces", action="store_true")
    _namespace(listing)
    _output(listing)
    remove = _add(actions, "rm", "image:rm", "Remove an image.")
    remove.add_argument("name")
    _namespace(remove)
    _reason(remove)
    collect = _add(
        actions, "gc", "image:gc", "Remove stored files that no image has, and old partial ones."
    )
    collect.add_argument("--dry-run", action="store_true", help="only show what would go")
    _reason(collect)


def _node(commands: Sub[argparse.ArgumentParser]) -> None:
    add_node(commands, _add)
    up = _add(commands, "up", "up:up", "Start a node for development, or find it running.")
    up.add_argument("--foreground", action="store_true", help="stay in front, log to the terminal")
    up.add_argument(
        "--network",
        choices=["sandbox", "host"],
        default="sandbox",
        help="sandbox: own namespace with a pretend uplink (default); host: this machine's network",
    )
    up.add_argument(
        "--dir", default=".chv", help="where the node's pointer is kept (default: .chv)"
    )
    up.add_argument("--timeout", default="60s")
    down = _add(commands, "down", "up:down", "Stop the node's daemons; running VMs go on.")
    down.add_argument(
        "--purge",
        action="store_true",
        help="delete every VM, volume, network and image of the node, then its files",
    )
    down.add_argument("--dir", default=".chv")
    down.add_argument("--timeout", default="2m")
    doctor = _add(commands, "doctor", "doctor:doctor", "Check this machine; say what to mend.")
    doctor.add_argument("--json", action="store_true")
    _verify(commands)
    demo = _add(commands, "demo", "demo:demo", "A whole node with a VM in a sandbox, in seconds.")
    demo.add_argument("--keep", action="store_true", help="leave the node running")
    demo.add_argument("--json", action="store_true", help="one summary object as the last line")
    demo.add_argument("--verbose", action="store_true")


def _verify(commands: Sub[argparse.ArgumentParser]) -> None:
    text = "Prove node, network, volume or VM definition with a guest that tries them."
    verify = _add(commands, "verify", "verify:verify", text)
    verify.add_argument("kind", nargs="?", choices=["node", "network", "volume"])
    verify.add_argument("name", nargs="?")
    verify.add_argument(
        "-f", "--file", action="append", metavar="FILE",
        help="a VM definition: a copy of it with fresh volumes is tried",
    )  # fmt: skip
    verify.add_argument("--vmm", choices=["auto", "qemu", "cloud-hypervisor"], default="auto")
    verify.add_argument("--json", action="store_true", help="one object with all checks")
    _namespace(verify)
