"""A tenant without nwd: bridge, uplink, guests, and the rules that the renderer makes for them.

Guests are namespaces behind isolated ports; the outside is one more, with several addresses and
routes to the tenant's public ones. Servers are sockets of this process in the guests' namespaces,
which say who they are and whom they see. Every change of rules is loaded as nwd would load it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from chv.common.ids import Ids
from chv.common.wire.nwd import L2Mode
from chv.nwd.kernel import netns
from chv.nwd.nft import rules
from chv.nwd.nft.model import NetworkRules, NicRules
from chv.nwd.nft.ruleset import Loaded, Nft
from tests.integration.nwd_frames import checksum

T = TypeVar("T")
IDS = Ids()
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("nft") is None or shutil.which("ip") is None,
    reason="needs root, nft and ip",
)
BRIDGE, UPLINK = "br0", "up0"
SUBNET, GATEWAY, SUBNET6, GATEWAY6 = "10.7.0.0/24", "10.7.0.1", "fd07::/64", "fd07::1"
UP, UP6 = "169.254.64.1", "fd63:6876::1"  # the tenant's end of the uplink
OUT, OUT6 = "169.254.64.0", "fd63:6876::"  # the outside's
CLIENTS = ("198.51.100.2", "198.51.100.3", "198.51.100.66")
CLIENTS6 = ("2001:db8:ff::2", "2001:db8:ff::3", "2001:db8:ff::66")
PUBLIC, PUBLIC6 = "198.51.100.100", "2001:db8:ff::100"
PUBLIC2 = "198.51.100.101"
GROUP_FORWARDED = 0x4000  # LLDP too, so that its control can be seen
DENIED_S, ALLOWED_S = 0.25, 2.0
_SYSCTLS = {
    "net/ipv4/ip_forward": "1",
    "net/ipv6/conf/all/forwarding": "1",
    "net/bridge/bridge-nf-call-iptables": "0",
    "net/bridge/bridge-nf-call-ip6tables": "0",
    "net/bridge/bridge-nf-call-arptables": "0",
    f"net/ipv4/conf/{BRIDGE}/proxy_arp_pvlan": "1",
    f"net/ipv4/conf/{BRIDGE}/rp_filter": "0",
    f"net/ipv6/conf/{BRIDGE}/proxy_ndp": "1",
    f"net/ipv6/neigh/{BRIDGE}/proxy_delay": "0",
    f"net/ipv4/neigh/{BRIDGE}/proxy_delay": "0",
}


@dataclass(frozen=True, slots=True)
class Guest:
    """A namespace that plays a VM."""

    namespace: str
    nic: NicRules

    @property
    def address(self) -> str:
        return self.nic.addresses[0]

    @property
    def address6(self) -> str:
        return self.nic.addresses[1]

    @property
    def link_local(self) -> str:
        """Its own; it sends from it whenever it likes."""
        return f"fe80::{self.address6.rpartition(':')[2]}"

    def at(self, family: int) -> str:
        return self.address6 if family == 6 else self.address


class Servers:
    """Listening sockets of any namespaces, served by one thread: a line to whoever asks."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._reader, self._writer = os.pipe()
        self._selector.register(self._reader, selectors.EVENT_READ, None)
        self._kept: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def tcp(self, namespace: str, label: str, port: int, *, keep: bool = False) -> None:
        listener = inside(namespace, lambda: _listener(port))
        self._selector.register(listener, selectors.EVENT_READ, (label, keep))
        os.write(self._writer, b"x")

    def udp(self, namespace: str, label: str, port: int) -> None:
        server = inside(namespace, lambda: _datagrams(port))
        self._selector.register(server, selectors.EVENT_READ, (label, False))
        os.write(self._writer, b"x")

    def say(self, words: bytes) -> None:
        """Send this to everybody whose connection is kept."""
        for connection in self._kept:
            connection.sendall(words)

    def close(self) -> None:
        os.write(self._writer, b"q")
        self._thread.join()
        for each in [*self._kept, *(key.fileobj for key in self._sockets())]:
            each.close()  # type: ignore[union-attr]
        self._selector.close()
        os.close(self._reader)
        os.close(self._writer)

    def _sockets(self) -> list[selectors.SelectorKey]:
        return [key for key in self._selector.get_map().values() if key.data is not None]

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    if b"q" in os.read(self._reader, 64):
                        return
                else:
                    with contextlib.suppress(OSError):
                        self._answer(key.fileobj, *key.data)  # type: ignore[arg-type]

    def _answer(self, server: socket.socket, label: str, keep: bool) -> None:
        if server.type == socket.SOCK_DGRAM:
            _, peer = server.recvfrom(2048)
            server.sendto(f"{label} {_plain(peer[0])}".encode(), peer)
            return
        connection, peer = server.accept()
        connection.sendall(f"{label} {_plain(peer[0])}\n".encode())
        if keep:
            self._kept.append(connection)
        else:
            connection.close()


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:")


def _listener(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.bind(("::", port))
    listener.listen(64)
    return listener


def _datagrams(port: int) -> socket.socket:
    server = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    server.bind(("::", port))
    return server


class Rig:
    """One tenant and its outside. Make it by `open_rig`."""

    def __init__(self, mark: str) -> None:
        self.tenant, self.outside = f"nwdp-{mark}-t", f"nwdp-{mark}-o"
        self._mark = mark
        self.guests: list[Guest] = []
        self.servers = Servers()
        self.nft = Nft()
        self.loaded: Loaded | None = None
        self.network = NetworkRules(
            identity=f"chv:1:abc123:{IDS.uid()}",
            bridge=BRIDGE,
            uplink=UPLINK,
            subnet=SUBNET,
            gateway=GATEWAY,
            subnet6=SUBNET6,
            gateway6=GATEWAY6,
        )

    # --- building
    def build(self, guests: int, l2: L2Mode) -> None:
        for name in (self.tenant, self.outside):
            _ip(["netns", "add", name])
        _batch(self.tenant, _TENANT.format(outside=self.outside, mask=GROUP_FORWARDED))
        _batch(self.outside, _OUTSIDE)
        inside(self.tenant, _set_sysctls)
        for number in range(guests):
            self._add_guest(number, l2)
        self.network = replace(self.network, l2=l2, nics=tuple(g.nic for g in self.guests))

    def _add_guest(self, number: int, l2: L2Mode) -> None:
        tap, name = f"t{number:010x}", f"nwdp-{self._mark}-{number}"
        nic = NicRules(
            IDS.uid(), tap, f"02:00:00:00:0b:{number + 1:02x}",
            (f"10.7.0.{11 + number}", f"fd07::{11 + number}"),
        )  # fmt: skip
        _ip(["netns", "add", name])
        guest = Guest(name, nic)
        self.guests.append(guest)
        isolated = "on" if l2 is L2Mode.ISOLATED else "off"
        _batch(self.tenant, _PORT.format(tap=tap, name=name, nic=nic, isolated=isolated))
        # Link-local addresses that need no second to become usable.
        local, six = guest.link_local, guest.address6
        _batch(name, _GUEST.format(four=guest.address, six=six, local=local))

    def remove(self) -> None:
        self.servers.close()
        self.nft.forget(f"/run/netns/{self.tenant}")
        for name in (self.tenant, self.outside, *(guest.namespace for guest in self.guests)):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    # --- rules
    async def apply(self, **changes: Any) -> None:
        """Load the network's rules with these changes, as nwd would: what differs."""
        self.network = replace(self.network, **changes)
        path = f"/run/netns/{self.tenant}"
        self.loaded = await self.nft.load(path, rules.render(self.network), self.loaded)
        assert self.loaded is not None, "somebody else changes rules of this namespace"

    async def change_nic(self, number: int, **changes: Any) -> None:
        """Change what the rules know of one guest."""
        nics = list(self.network.nics)
        nics[number] = replace(nics[number], **changes)
        await self.apply(nics=tuple(nics))

    def nft_text(self, command: str) -> str:
        """Run nft in the tenant."""
        return nft_in(self.tenant, command)

    # --- packets
    def ask(self, source: Guest | None, address: str, port: int, **options: Any) -> str:
        """Connect from a guest, or from outside; return what the server says, or `refused`, ``."""
        name = self.outside if source is None else source.namespace
        return inside(name, lambda: ask(address, port, **options))

    def ping(self, source: Guest | None, address: str, timeout_s: float = DENIED_S) -> bool:
        name = self.outside if source is None else source.namespace
        return inside(name, lambda: ping(address, timeout_s))


def ping(address: str, timeout_s: float) -> bool:
    """Tell whether an echo request is answered, in this thread's namespace."""
    six = ":" in address
    family, protocol = (socket.AF_INET6, 58) if six else (socket.AF_INET, 1)
    request = struct.pack("!BBHHH", 128 if six else 8, 0, 0, 7, 1)
    if not six:
        request = request[:2] + struct.pack("!H", checksum(request)) + request[4:]
    with socket.socket(family, socket.SOCK_RAW, protocol) as icmp:
        icmp.settimeout(timeout_s)
        icmp.sendto(request, (address, 0))
        try:
            while True:
                reply, sender = icmp.recvfrom(1500)
                kind = reply[0] if six else reply[20]
                if sender[0] == address and kind == (129 if six else 0):
                    return True
        except TimeoutError:
            return False


def ask(
    address: str,
    port: int,
    *,
    bound: str = "",
    udp: bool = False,
    timeout_s: float = ALLOWED_S,
) -> str:
    """Return what a server says; `refused` where it was told no; empty where nothing comes."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    kind = socket.SOCK_DGRAM if udp else socket.SOCK_STREAM
    with socket.socket(family, kind) as client:
        client.settimeout(timeout_s)
        try:
            if bound:
                client.bind((bound, 0))
            client.connect((address, port))
            if udp:
                client.send(b"?")
            return client.recv(2048).decode().strip()
        except TimeoutError:
            return ""
        except ConnectionRefusedError:
            return "refused"
        except OSError as error:
            return f"error {error.errno}"


@asynccontextmanager
async def open_rig(guests: int = 3, l2: L2Mode = L2Mode.ISOLATED) -> AsyncIterator[Rig]:
    """A tenant with guests and the rules of a network without groups."""
    rig = Rig(IDS.instance())
    try:
        rig.build(guests, l2)
        await rig.apply()
        yield rig
    finally:
        rig.remove()


def open_wide(rig: Rig) -> None:
    """Take the decisions out and leave the rest: what comes through now was kept back by them."""
    chains = ("input", "forward_out", "forward_in", "output")
    rig.nft_text(
        "".join(
            f"add chain inet chv {chain} {{ policy accept; }}\nflush chain inet chv {chain}\n"
            for chain in chains
        )
    )
    rig.loaded = None


@contextmanager
def held(rig: Rig, source: Guest | None, address: str, port: int) -> Iterator[bool]:
    """Hold a connection; tell whether it came about."""
    name = rig.outside if source is None else source.namespace
    client = inside(name, lambda: _held(address, port))
    try:
        yield client is not None
    finally:
        if client is not None:
            client.close()


def _held(address: str, port: int) -> socket.socket | None:
    try:
        return socket.create_connection((address, port), DENIED_S)
    except OSError:
        return None


def inside(name: str, function: Callable[[], T]) -> T:
    return netns.call_in(f"/run/netns/{name}", function)


def nft_in(name: str, command: str) -> str:
    completed = subprocess.run(
        ["nsenter", f"--net=/run/netns/{name}", "nft", "-f", "-"],
        input=command, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def _set_sysctls() -> None:
    for path, value in _SYSCTLS.items():
        file = Path("/proc/sys") / path
        if file.exists():  # a kernel without br_netfilter has nothing to switch off
            file.write_text(value)


def _ip(arguments: list[str]) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _batch(name: str, lines: str) -> None:
    completed = subprocess.run(
        ["ip", "-n", name, "-batch", "-"], input=lines, text=True, capture_output=True, check=False
    )
    assert completed.returncode == 0, completed.stderr


_TENANT = f"""link set lo up
link add {BRIDGE} address 02:00:00:00:0a:01 type bridge stp_state 0 mcast_snooping 0 group_fwd_mask {{mask}}
link set {BRIDGE} addrgenmode none up
address add {GATEWAY}/24 dev {BRIDGE}
address add {GATEWAY6}/64 dev {BRIDGE} nodad
address add fe80::1/64 dev {BRIDGE} nodad
address add 169.254.169.254/32 dev {BRIDGE}
address add fd00:ec2::254/128 dev {BRIDGE} nodad
address add {PUBLIC}/32 dev lo
address add {PUBLIC6}/128 dev lo nodad
link add {UPLINK} type veth peer name eth0 netns {{outside}}
link set {UPLINK} addrgenmode none up
address add fe80::b/64 dev {UPLINK} nodad
address add {UP}/31 dev {UPLINK}
address add {UP6}/127 dev {UPLINK} nodad
route add default via {OUT}
route add default via {OUT6}
"""  # noqa: E501
_CLIENTS = "".join(f"address add {each}/32 dev lo\n" for each in CLIENTS)
_CLIENTS += "".join(f"address add {each}/128 dev lo nodad\n" for each in CLIENTS6)
_OUTSIDE = f"""link set lo up
link set eth0 addrgenmode none up
address add fe80::a/64 dev eth0 nodad
address add {OUT}/31 dev eth0
address add {OUT6}/127 dev eth0 nodad
{_CLIENTS}route add 198.51.100.100/30 via {UP} src {CLIENTS[0]}
route add {SUBNET} via {UP} src {CLIENTS[0]}
route add {PUBLIC6}/128 via {UP6} src {CLIENTS6[0]}
route add {SUBNET6} via {UP6} src {CLIENTS6[0]}
"""
_PORT = f"""link add {{tap}} type veth peer name eth0 address {{nic.mac}} netns {{name}}
link set {{tap}} addrgenmode none master {BRIDGE} up
link set {{tap}} type bridge_slave isolated {{isolated}}
neigh add proxy {{nic.addresses[1]}} dev {BRIDGE}
"""
_GUEST = f"""link set lo up
link set eth0 addrgenmode none up
address add {{local}}/64 dev eth0 nodad
address add {{four}}/24 dev eth0
address add {{six}}/64 dev eth0 nodad
route add default via {GATEWAY}
route add default via {GATEWAY6}
"""
