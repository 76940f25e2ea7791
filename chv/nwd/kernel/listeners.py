"""Who listens on ports of this namespace: what a translation of ours would take away from them.

Reads what the kernel shows of sockets; call it in the namespace. UDP has no listening state: a
socket that is connected to nobody counts, unless its port is one that the kernel hands out.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chv.nwd.kernel import sysctl
from chv.nwd.kernel.errors import translated

_TABLES = (("tcp", "tcp"), ("tcp", "tcp6"), ("udp", "udp"), ("udp", "udp6"))
_LISTENS = {"tcp": "0A", "udp": "07"}
_HANDED_OUT = "net.ipv4.ip_local_port_range"
_WORD = 4


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that waits for clients; `address` is empty where it takes any."""

    protocol: str
    address: str
    port: int

    def takes(self, address: str, first: int, last: int) -> bool:
        """Tell whether clients of an address and one of these ports are its own.

        One for any address of IPv6 is for those of IPv4 as well, unless it said otherwise, which
        cannot be seen.
        """
        return first <= self.port <= last and self.address in ("", address)


def read() -> list[Listener]:
    """Return all of them."""
    low, _, high = sysctl.read(_HANDED_OUT).partition("\t")
    handed_out = range(int(low or 0), int(high or -1) + 1)
    with translated("reading who listens"):
        found = [each for protocol, table in _TABLES for each in _of_table(protocol, table)]
    return [each for each in found if each.protocol == "tcp" or each.port not in handed_out]


def _of_table(protocol: str, table: str) -> Iterator[Listener]:
    path = Path("/proc/thread-self/net") / table
    if not path.exists():
        return
    for line in path.read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTENS[protocol]:
            address, _, port = fields[1].partition(":")
            yield Listener(protocol, _address(address), int(port, 16))


def _address(digits: str) -> str:
    """Return an address from 32-bit words in the machine's order; empty for any."""
    raw = bytes.fromhex(digits)
    words = [raw[index : index + _WORD][::-1] for index in range(0, len(raw), _WORD)]
    packed = b"".join(words)
    if not any(packed):
        return ""
    family = socket.AF_INET if len(packed) == _WORD else socket.AF_INET6
    return socket.inet_ntop(family, packed).removeprefix("::ffff:")
