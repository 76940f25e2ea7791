"""`chv net log|explain|capture|stats`: what becomes of packets.

Frames of a capture come from a packet socket that nwd opened: no daemon carries them, and a
restart of one does not end it. What is printed passes `_plain`, for guests choose what they send.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import msgspec

from chv.cli import connect, output, pcap
from chv.common.errors import InvalidArgument, NotFound
from chv.common.quantity import parse_duration_s
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire import agent_watch as api
from chv.common.wire.nwd_policy import LogEntry

_TARGET = re.compile(r"(?:\[(?P<six>[^\]]*)\]|(?P<host>[^:]+))(?::(?P<port>\d{1,5}))?\Z")
_PORT_MAX = 65535
_MODE = 0o600
STDOUT = "-"


# --- log
def log(arguments: argparse.Namespace) -> int:
    """Print the end of a network's log and, with -f, what comes."""
    request = api.ReadNetworkLog(
        network=arguments.network,
        namespace=arguments.namespace,
        vm=arguments.vm,
        interface=arguments.interface,
        tail=arguments.tail,
        follow=arguments.follow,
    )
    show = _print_json if arguments.json else _print_chunk
    with connect.client(arguments.socket) as client:
        client.stream(api.READ_NETWORK_LOG, request, show)
    return 0


def _print_chunk(chunk: api.NetworkLogChunk) -> None:
    for entry in chunk.entries:
        print(_plain(log_line(entry, chunk.names)))
    sys.stdout.flush()
    if chunk.lost:
        output.note(f"chv: {chunk.lost} packets were logged and lost")


def _print_json(chunk: api.NetworkLogChunk) -> None:
    for entry in chunk.entries:
        named = {
            **msgspec.to_builtins(entry),
            "group": chunk.names.get(entry.group_id, ""),
            "place": chunk.names.get(api.rule_key(entry), ""),
            "nic": chunk.names.get(entry.nic_id, ""),
        }
        print(msgspec.json.encode(named).decode())
    sys.stdout.flush()


def log_line(entry: LogEntry, names: dict[str, str]) -> str:
    """Return an entry as people read it."""
    group = names.get(entry.group_id, entry.group_id)
    rule = names.get(api.rule_key(entry), str(entry.rule))
    by = f"group {group}" if entry.rule < 0 else f"group {group} {rule}"
    nic = names.get(entry.nic_id, entry.nic_id or "?")
    source = _end(entry.source, entry.source_port)
    destination = _end(entry.destination, entry.destination_port)
    return (
        f"{entry.time} {entry.verdict:<7} {entry.direction:<7} {nic}"
        f" {entry.protocol or '?'} {source} -> {destination} ({by})"
    )


def _end(address: str, port: int) -> str:
    if not port:
        return address or "?"
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


# --- explain
def explain(arguments: argparse.Namespace) -> int:
    """Follow one packet; print the verdict first, then the steps."""
    host, port = parse_target(arguments.target)
    request = api.ExplainVm(
        name=arguments.vm,
        namespace=arguments.namespace,
        interface=arguments.interface,
        host=host,
        protocol=arguments.proto,
        port=0 if arguments.proto == "icmp" else port,
    )
    with connect.client(arguments.socket) as client:
        reply = client.call(api.EXPLAIN_VM, request)
    if arguments.output:
        output.document(reply, arguments.output)
        return 0
    print(_plain(f"{reply.verdict}: {reply.decided_by}"))
    if reply.resolved:
        print(_plain(f"{host} is {reply.destination}, says {reply.resolved}"))
    print()
    rows = [[_plain(each) for each in (step.place, step.what, step.detail)] for step in reply.steps]
    output.table(("PLACE", "WHAT", "DETAIL"), rows)
    return 0


def parse_target(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, `[IPV6]:PORT` or a HOST alone (port 0)."""
    if text.count(":") > 1 and "[" not in text:
        return text, 0  # an IPv6 address alone
    match = _TARGET.match(text)
    if match is None or int(match["port"] or 0) > _PORT_MAX:
        raise InvalidArgument(
            f"{text!r} is not HOST:PORT",
            field="HOST:PORT",
            hint="1.1.1.1:443, [2001:db8::1]:443, name:22; HOST alone with --proto icmp",
        )
    return match["six"] or match["host"] or "", int(match["port"] or 0)


# --- capture
def capture(arguments: argparse.Namespace) -> int:
    """Write frames until an end comes."""
    duration_s = (
        parse_duration_s(arguments.duration, field="--duration") if arguments.duration else 0.0
    )
    if arguments.count < 0:
        raise InvalidArgument("a count is not negative", field="--count")
    request = api.OpenVmCapture(
        name=arguments.vm, namespace=arguments.namespace, interface=arguments.interface
    )
    if arguments.write == STDOUT:
        _refuse_terminal(sys.stdout.buffer)  # before anything is asked of anybody
    with connect.client(arguments.socket) as client:
        reply, fds = client.call_fds(api.OPEN_VM_CAPTURE, request)
    with socket.socket(fileno=fds[0]) as frames, _destination(arguments.write) as out:
        output.note(f"capturing on interface {reply.interface} (network {reply.network})")
        _copy(frames, out, arguments.count, duration_s)
    return 0


def _copy(frames: socket.socket, out: BinaryIO, count_max: int, duration_s: float) -> None:
    counter = pcap.Counter()
    try:
        pcap.write_header(out)
        pcap.copy(frames, out, pcap.Limits(count_max, duration_s), counter)
    except KeyboardInterrupt:
        pass  # the usual end
    finally:
        output.note(f"{counter.frames} frames, {pcap.lost(frames)} lost")


@contextmanager
def _destination(path: str) -> Iterator[BinaryIO]:
    """Open where to write, which is not a terminal."""
    if path == STDOUT:
        yield sys.stdout.buffer
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _MODE)
    except OSError as error:
        raise InvalidArgument(
            f"cannot write {path!r}: {error.strerror}", field="--write"
        ) from error
    with os.fdopen(fd, "wb") as out:
        _refuse_terminal(out)
        yield out


def _refuse_terminal(out: BinaryIO) -> None:
    if pcap.is_terminal(out):
        raise InvalidArgument(
            "frames are not for a terminal",
            field="--write",
            hint="-w FILE, or a pipe: chv net capture VM | tcpdump -r -",
        )


# --- stats
def stats(arguments: argparse.Namespace) -> int:
    """Print a line for each interface."""
    with connect.client(arguments.socket) as client:
        reply = _ask(client, arguments)
    if arguments.output:
        output.document(reply, arguments.output)
        return 0
    headers: tuple[str, ...] = (
        "VM", "INTERFACE", "NETWORK", "RX-BYTES", "RX-PACKETS", "TX-BYTES", "TX-PACKETS",
        "OVERRUN", "DROPPED",
    )  # fmt: skip
    rows = [stats_row(each) for each in reply.nics]
    if arguments.all_namespaces:
        headers = ("NAMESPACE", *headers)
        rows = [[nic.namespace, *row] for nic, row in zip(reply.nics, rows, strict=True)]
    output.table(headers, rows)
    return 0


def stats_row(nic: api.VmNicStats) -> list[str]:
    """Return the cells of an interface; drops by the reason that most were dropped for."""
    counted = nic.stats
    drops = sorted(counted.drops.items(), key=lambda each: (-each[1], each[0]))
    reasons = ", ".join(f"{reason} {number}" for reason, number in drops if number)
    numbers = (counted.rx_bytes, counted.rx_packets, counted.tx_bytes, counted.tx_packets)
    overrun = counted.rx_dropped + counted.tx_dropped
    cells = [nic.vm, nic.interface, nic.network, *map(str, numbers), str(overrun), reasons or "-"]
    return [_plain(cell) for cell in cells]


def _ask(client: BlockingClient, arguments: argparse.Namespace) -> api.NetStatsReply:
    """Ask for a VM, a network or all; a name alone is a VM's before it is a network's."""
    namespace = "" if arguments.all_namespaces else arguments.namespace
    kind, slash, name = arguments.target.partition("/")
    if not slash:
        kind, name = "", kind
    if kind not in ("", "vm", "network") or (slash and not name):
        raise InvalidArgument(
            f"{arguments.target!r} is not vm/NAME, network/NAME or NAME", field="VM|NETWORK"
        )
    if not name:
        return client.call(api.NET_STATS, api.GetNetStats(namespace=namespace))
    if kind != "network":
        with contextlib.suppress(*(() if kind else (NotFound,))):
            return client.call(api.NET_STATS, api.GetNetStats(namespace=namespace, vm=name))
    return client.call(api.NET_STATS, api.GetNetStats(namespace=namespace, network=name))


def _plain(text: str) -> str:
    """Return text without anything that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
