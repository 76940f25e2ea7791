"""The grammar of `chv net`. Data only."""

from __future__ import annotations

import argparse

from chv.cli.parser_storage import Add, Sub

ALL = "all-namespaces"


def add_net(commands: Sub[argparse.ArgumentParser], add: Add) -> None:
    """Add the commands; `add` makes one of them with its handler."""
    net = commands.add_parser("net", help="Packets: why they pass or not, and what they are.")
    actions = net.add_subparsers(metavar="ACTION", required=True)
    _log(actions, add)
    _explain(actions, add)
    _capture(actions, add)
    _stats(actions, add)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--namespace", default="default", help="tenant (default: default)")


def _interface(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--interface", default="", help="of the VM (default: its first)")


def _output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", choices=("json", "yaml"), help="machine-readable output")


def _log(actions: Sub[argparse.ArgumentParser], add: Add) -> None:
    text = "Show what rules with `log` let through, and what groups with `logDropped` dropped."
    log = add(actions, "log", "net:log", text)
    log.add_argument("network", metavar="NETWORK")
    log.add_argument("--vm", default="", help="of this VM alone")
    log.add_argument("--interface", default="", help="with --vm: of this interface alone")
    log.add_argument("-f", "--follow", action="store_true")
    log.add_argument("--tail", type=int, default=100, metavar="LINES", help="(default: 100)")
    log.add_argument("--json", action="store_true", help="one JSON object a line")
    _common(log)


def _explain(actions: Sub[argparse.ArgumentParser], add: Add) -> None:
    text = "Send one packet in a VM's name, follow it, and say what decides on it."
    explain = add(actions, "explain", "net:explain", text)
    explain.add_argument("vm", metavar="VM")
    explain.add_argument(
        "target", metavar="HOST:PORT", help="an address, a VM or a name; no port with icmp"
    )
    explain.add_argument("--proto", choices=("tcp", "udp", "icmp"), default="tcp")
    _interface(explain)
    _common(explain)
    _output(explain)


def _capture(actions: Sub[argparse.ArgumentParser], add: Add) -> None:
    text = "Write the frames of a VM's interface as pcap to a file or a pipe."
    capture = add(actions, "capture", "net:capture", text)
    capture.add_argument("vm", metavar="VM")
    capture.add_argument("-w", "--write", default="-", metavar="FILE", help="(default: stdout)")
    capture.add_argument("--count", type=int, default=0, help="end after so many frames")
    capture.add_argument("--duration", default="", help="end after this time: 30s, 5m")
    _interface(capture)
    _common(capture)


def _stats(actions: Sub[argparse.ArgumentParser], add: Add) -> None:
    stats = add(actions, "stats", "net:stats", "Show bytes, packets, and drops by their reason.")
    stats.add_argument(
        "target", nargs="?", default="", metavar="VM|NETWORK", help="vm/NAME, network/NAME or NAME"
    )
    stats.add_argument("-A", f"--{ALL}", action="store_true")
    _common(stats)
    _output(stats)
