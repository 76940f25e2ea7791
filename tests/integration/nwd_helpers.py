"""What the tests of nwd share: a sandbox with a pretend uplink, a real nwd in it, fake guests.

Nothing touches the machine's own namespace. A guest is a namespace of its own with a tap whose
frames a thread carries to and from the descriptor that OpenVmNic gave; or, for frames that no
kernel would send, the bare descriptor.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
import pytest

from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import FoundWorker, choose_provider, scan, wait_gone
from chv.common.rpc import Client, connect
from chv.common.wire import nwd as wire
from chv.common.wire import nwd_policy as policy
from chv.common.wire.types import CENSUS, CallMeta, CensusItem, Done, Empty, ListPage
from chv.nwd.kernel import netns, tap
from tests.integration import nwd_frames as frames
from tests.integration.nwd_frames import VNET_HEADER, checksum
from tests.integration.stord_helpers import short_root

IDS = Ids()
T = TypeVar("T")
HOST_ADDRESS, WAN_ADDRESS = "198.18.7.2", "198.18.7.1"
HOST_ADDRESS6, WAN_ADDRESS6 = "fd99:7::2", "fd99:7::1"
SUBNET6 = "fd00:7::/64"
ECHO_REQUEST6, ECHO_REPLY6 = 128, 129
DISCOVERS_MAX = 10
FOREIGN_TABLE = "table inet foreign { chain c { type filter hook input priority 5; }; }"
needs_nwd = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("dnsmasq") is None or not Path("/dev/net/tun").exists(),
    reason="needs root, dnsmasq and /dev/net/tun",
)


def ip(*arguments: str, check: bool = True) -> str:
    completed = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert not check or completed.returncode == 0, (arguments, completed.stderr)
    return completed.stdout


def nft_in(name: str, command: str) -> str:
    """Run nft in a namespace."""
    completed = subprocess.run(
        ["nsenter", f"--net=/run/netns/{name}", "nft", command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def inside(name: str, function: Callable[[], T]) -> T:
    return netns.call_in(f"/run/netns/{name}", function)


def meta(generation: int = 1) -> CallMeta:
    return CallMeta(operation_id=IDS.operation(), generation=generation)


def _write_sysctl(name: str, value: str) -> None:
    Path(f"/proc/sys/net/{name}").write_text(value)


class Sandbox:
    """A pretend host with an uplink to a pretend world."""

    def __init__(self, instance: str) -> None:
        self.host, self.wan = f"nwdt-{instance}-host", f"nwdt-{instance}-wan"

    def make(self) -> None:
        for name in (self.host, self.wan):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self.host, "link", "add", "wan0", "type", "veth",
           "peer", "name", "eth0", "netns", self.wan)  # fmt: skip
        ip("-n", self.host, "address", "add", f"{HOST_ADDRESS}/24", "dev", "wan0")
        ip("-n", self.wan, "address", "add", f"{WAN_ADDRESS}/24", "dev", "eth0")
        for name, address, link in (
            (self.host, HOST_ADDRESS6, "wan0"),
            (self.wan, WAN_ADDRESS6, "eth0"),
        ):
            ip("-n", name, "address", "add", f"{address}/64", "dev", link, "nodad")
            # A real host has been up for longer than a link-local address needs to settle.
            inside(name, partial(_write_sysctl, f"ipv6/conf/{link}/accept_dad", "0"))
        ip("-n", self.host, "link", "set", "wan0", "up")
        ip("-n", self.wan, "link", "set", "eth0", "up")
        ip("-n", self.host, "route", "add", "default", "via", WAN_ADDRESS)
        ip("-n", self.host, "-6", "route", "add", "default", "via", WAN_ADDRESS6)
        nft_in(self.host, FOREIGN_TABLE)

    def remove(self) -> None:
        for name in (self.host, self.wan):
            ip("netns", "delete", name, check=False)


class Node:
    """One instance: its directories, its nwd process in the sandbox, shorthand for its calls."""

    def __init__(self, root: Path, *, network: str = "", limits: str = "") -> None:
        self.layout = Layout(IDS.instance(), root / "run", root / "state")
        self.sandbox = Sandbox(self.layout.instance)
        self.config = root / "chv.toml"
        self.config.write_text(
            f'[node]\ninstance = "{self.layout.instance}"\n'
            f'run_dir = "{self.layout.run_root}"\nstate_dir = "{self.layout.state_root}"\n'
            f'log_level = "debug"\n[network]\n{network}\n[limits]\n{limits}\n'
        )
        self.log = root / "nwd.log"
        self.points = root / "failpoints"
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self, failpoints: str = "") -> None:
        """Start nwd and wait until it is ready, or has ended."""
        await anyio.to_thread.run_sync(self._start, failpoints)

    def _start(self, failpoints: str) -> None:
        reader, writer = os.pipe()
        environment = {**os.environ, "CHV_READY_FD": str(writer), "CHV_TEST_BUILD": "1"}
        environment |= {"CHV_FAILPOINTS": failpoints, "CHV_FAILPOINTS_LOG": str(self.points)}
        command = [sys.executable, "-m", "chv.nwd", "--config", str(self.config)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self.sandbox.host}", *command],
                env=environment,
                pass_fds=[writer],
                stderr=log,
            )
        os.close(writer)
        with os.fdopen(reader, "rb") as ready:
            assert ready.read() == b"ready\n" or failpoints, self.log.read_text()[-3000:]

    async def end(self, number: int = signal.SIGKILL) -> int:
        """Signal nwd and return its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        """Wait until nwd has ended by itself."""
        assert self.process is not None
        return await anyio.to_thread.run_sync(self.process.wait, 20)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with connect(self.layout.socket("nwd")) as client:
            yield client

    async def call(self, method: Any, params: Any) -> Any:
        async with self.client() as client:
            return await client.call(method, params)

    # --- calls
    def topology(self, network_id: str, **changes: Any) -> wire.Topology:
        fields: dict[str, Any] = {
            "network_id": network_id,
            "name": "net",
            "tenant": "default",
            "subnet": "10.7.0.0/24",
            "dns_domain": "net.test",
        }
        return wire.Topology(**(fields | changes))

    async def ensure(
        self, network_id: str, generation: int = 1, **changes: Any
    ) -> wire.NetworkInfo:
        request = wire.EnsureNetworkTopology(
            meta=meta(generation), topology=self.topology(network_id, **changes)
        )
        info: wire.NetworkInfo = await self.call(wire.ENSURE_NETWORK, request)
        return info

    async def attach(
        self, network_id: str, nic_id: str = "", generation: int = 1, **changes: Any
    ) -> wire.NicInfo:
        nic_id = nic_id or IDS.uid()
        fields: dict[str, Any] = {
            "meta": meta(generation),
            "nic_id": nic_id,
            "vm_id": IDS.uid(),
            "network_id": network_id,
            "hostname": f"vm-{nic_id[:8]}",
            "owner_uid": self.layout.vmm_uid(0),
            "guest_ports": [22],
        }
        info: wire.NicInfo = await self.call(
            wire.ATTACH_NIC, wire.AttachVmNic(**(fields | changes))
        )
        return info

    async def allow_all(self, tenant: str = "default") -> str:
        """Make a group that allows everything both ways; return its id."""
        group_id = IDS.uid()
        allowed = [
            policy.SecurityRule(
                direction=direction,
                protocol=policy.IpProtocol.ANY,
                cidrs=["0.0.0.0/0", "::/0"],
            )
            for direction in policy.Direction
        ]
        group = policy.SecurityGroup(
            group_id=group_id, name=f"all-{group_id[:8]}", tenant=tenant, rules=allowed
        )
        request = policy.SetSecurityGroup(meta=meta(), group=group)
        await self.call(policy.SET_GROUP, request)
        return group_id

    async def detach(self, nic_id: str, generation: int = 1) -> Done:
        done: Done = await self.call(
            wire.DETACH_NIC, wire.NicRef(meta=meta(generation), nic_id=nic_id)
        )
        return done

    async def delete(self, network_id: str, generation: int = 1) -> Done:
        done: Done = await self.call(
            wire.DELETE_NETWORK, wire.NetworkRef(meta=meta(generation), network_id=network_id)
        )
        return done

    async def network(self, network_id: str) -> wire.NetworkInfo:
        info: wire.NetworkInfo = await self.call(
            wire.GET_NETWORK, wire.GetNetwork(network_id=network_id)
        )
        return info

    async def nics(self) -> list[wire.NicInfo]:
        reply: wire.ListNicsReply = await self.call(wire.LIST_NICS, ListPage())
        return reply.nics

    async def nic(self, nic_id: str) -> wire.NicInfo:
        info: wire.NicInfo = await self.call(wire.GET_NIC, wire.GetNic(nic_id=nic_id))
        return info

    async def health(self) -> wire.NwdHealth:
        reply: wire.NwdHealth = await self.call(wire.NWD_HEALTH, Empty())
        return reply

    async def census(self) -> list[CensusItem]:
        items: list[CensusItem] = (await self.call(CENSUS, Empty())).items
        return items

    async def open(self, nic_id: str) -> int:
        async with self.client() as client:
            _, fds = await client.call_fds(wire.OPEN_NIC, wire.OpenVmNic(nic_id=nic_id))
        return fds[0]

    async def connect_guest(self, nic_id: str, port: int, timeout_s: float = 2.0) -> socket.socket:
        request = wire.OpenGuestConnection(nic_id=nic_id, port=port, timeout_s=timeout_s)
        async with self.client() as client:
            _, fds = await client.call_fds(wire.OPEN_GUEST_CONNECTION, request)
        return socket.socket(fileno=fds[0])

    # --- what the machine shows
    def workers(self) -> list[FoundWorker]:
        return scan(self.layout.worker_prefix)

    def namespaces(self) -> list[str]:
        return netns.names(self.layout.netns_prefix)

    def host_links(self) -> list[str]:
        lines = ip("-n", self.sandbox.host, "-br", "link").splitlines()
        return sorted(line.split()[0].partition("@")[0] for line in lines)

    def host_forwarding(self) -> dict[str, str]:
        """What of the host's settings a network may switch while it is there."""

        def read() -> dict[str, str]:
            found = {}
            for version in (4, 6):
                base = Path(f"/proc/sys/net/ipv{version}/conf")
                for path in [*base.glob("*/forwarding"), *base.glob("*/accept_redirects")]:
                    if path.parent.name in ("all", "default", "lo", "wan0"):
                        found[f"{version} {path.parent.name} {path.name}"] = path.read_text()
            return found

        return inside(self.sandbox.host, read)

    def host_routes(self) -> list[str]:
        return sorted(
            line
            for family in ("-4", "-6")
            for line in ip("-n", self.sandbox.host, family, "route").splitlines()
        )

    def host_rules(self) -> str:
        return nft_in(self.sandbox.host, "list ruleset")

    def run_files(self) -> list[str]:
        base = self.layout.run / "net"
        return sorted(str(path.relative_to(base)) for path in base.rglob("*"))

    def cgroups(self) -> list[str]:
        found = []
        for root in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
            base = root / self.layout.cgroup
            found += [path.name for path in base.glob("*/")] if base.is_dir() else []
        return sorted(found)

    def snapshot(self) -> dict[str, Any]:
        """Everything that a deleted network must not leave behind."""
        return {
            "namespaces": self.namespaces(),
            "links": self.host_links(),
            "rules": self.host_rules(),
            "routes": self.host_routes(),
            "forwarding": self.host_forwarding(),
            "files": self.run_files(),
            "cgroups": self.cgroups(),
            "workers": [worker.worker_id for worker in self.workers()],
        }

    def applied(self) -> list[str]:
        """The steps that nwd says it has applied since `forget_log`."""
        lines = (msgspec.json.decode(line) for line in self.log.read_bytes().splitlines())
        return [step for line in lines if line["event"] == "applied" for step in line["steps"]]

    def forget_log(self) -> None:
        os.truncate(self.log, 0)

    async def cleanup(self) -> None:
        """Leave nothing of this instance on the machine."""
        if self.process is not None and self.process.poll() is None:
            await self.end()
        provider = choose_provider(self.layout)
        for worker in self.workers():
            await provider.kill(worker.record(), signal.SIGKILL)
            await wait_gone(worker.record())
        await provider.retire()
        for name in self.namespaces():
            netns.remove(name)
        self.sandbox.remove()


@asynccontextmanager
async def open_node(*, start: bool = True, **settings: str) -> AsyncIterator[Node]:
    """A node whose nwd runs in a sandbox."""
    with short_root() as root:
        node = Node(root, **settings)
        try:
            node.sandbox.make()
            if start:
                await node.start()
            yield node
        finally:
            with anyio.CancelScope(shield=True):
                await node.cleanup()


class Guest:
    """A namespace that plays a VM behind a NIC. Make it by `open_guest`."""

    def __init__(self, name: str, info: wire.NicInfo) -> None:
        self.name = name
        self.info = info

    def run(self, function: Callable[[], T]) -> T:
        return inside(self.name, function)

    def configure(self) -> None:
        """Take the address that nwd gave, as a DHCP client would."""
        info = self.info
        ip("-n", self.name, "address", "add", f"{info.address}/{info.prefix_length}", "dev", "eth0")
        ip("-n", self.name, "route", "add", "default", "via", info.gateway)

    def configure6(self, prefix_length: int = 64) -> None:
        """Take the IPv6 address that nwd gave, as a guest configured by hand would."""
        cidr = f"{self.info.address6}/{prefix_length}"
        ip("-n", self.name, "address", "add", cidr, "dev", "eth0", "nodad")
        ip("-n", self.name, "-6", "route", "replace", "default", "via", self.info.gateway6)

    def listen(self, port: int, family: int = socket.AF_INET) -> socket.socket:
        return self.run(lambda: _listener(port, family))

    def connects(self, address: str, port: int, timeout_s: float = 1.0) -> bool:
        return self.run(lambda: connects(address, port, timeout_s))

    def pings(self, address: str) -> bool:
        return self.run(lambda: pings(address))


def _listener(port: int, family: int) -> socket.socket:
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
    listener.listen()
    return listener


def connects(address: str, port: int, timeout_s: float = 1.0) -> bool:
    """Tell whether a TCP connection comes about, in this thread's namespace."""
    try:
        socket.create_connection((address, port), timeout_s).close()
    except OSError:
        return False
    return True


def pings(address: str, timeout_s: float = 1.0) -> bool:
    """Tell whether an echo request is answered, in this thread's namespace."""
    if ":" in address:
        return _pings6(address, timeout_s)
    request = struct.pack("!BBHHH", 8, 0, 0, 7, 1)
    request = request[:2] + struct.pack("!H", checksum(request)) + request[4:]
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as icmp:
        icmp.settimeout(timeout_s)
        icmp.sendto(request, (address, 0))
        try:
            while True:
                reply, sender = icmp.recvfrom(1500)
                if sender[0] == address and reply[20] == 0:
                    return True
        except TimeoutError:
            return False


def _pings6(address: str, timeout_s: float) -> bool:
    with socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as icmp:
        icmp.settimeout(timeout_s)
        try:
            icmp.sendto(struct.pack("!BBHHH", ECHO_REQUEST6, 0, 0, 7, 1), (address, 0))
            while True:
                reply, sender = icmp.recvfrom(1500)
                if sender[0] == address and reply[0] == ECHO_REPLY6:
                    return True
        except OSError:  # a timeout, or no way there
            return False


@contextmanager
def _carried(left: int, right: int) -> Iterator[None]:
    """Carry frames both ways in the block."""
    stop_reader, stop_writer = os.pipe()

    def carry() -> None:
        while True:
            readable, _, _ = select.select([left, right, stop_reader], [], [])
            if stop_reader in readable:
                return
            for source in readable:
                with contextlib.suppress(OSError):
                    os.write(right if source == left else left, os.read(source, 65536))

    thread = threading.Thread(target=carry, daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(stop_writer, b"x")
        thread.join()
        os.close(stop_reader)
        os.close(stop_writer)


@asynccontextmanager
async def open_guest(node: Node, info: wire.NicInfo) -> AsyncIterator[Guest]:
    """A guest on a NIC: a kernel of its own network stack behind the tap."""
    name = f"nwdg-{node.layout.instance}-{info.nic_id[:8]}"
    fd = await node.open(info.nic_id)
    ip("netns", "add", name)
    try:
        ip("-n", name, "link", "set", "lo", "up")
        inside(name, lambda: tap.make("eth0", 0))
        (inner,) = inside(name, lambda: tap.open_for_vmm("eth0"))
        ip("-n", name, "link", "set", "eth0", "address", info.mac, "mtu", str(info.mtu), "up")
        with _carried(fd, inner):
            yield Guest(name, info)
        os.close(inner)
    finally:
        ip("netns", "delete", name, check=False)
        os.close(fd)


class Wire:
    """The bare descriptor of a NIC: frames in, frames out."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def send(self, frame: bytes) -> None:
        os.write(self.fd, VNET_HEADER + frame)

    def receive(self, accept: Callable[[bytes], T | None], timeout_s: float = 2.0) -> T | None:
        """Return the first thing that `accept` makes of a frame, None when none comes."""
        deadline = threading.Event()
        timer = threading.Timer(timeout_s, deadline.set)
        timer.start()
        try:
            while not deadline.is_set():
                readable, _, _ = select.select([self.fd], [], [], 0.02)
                if not readable:
                    continue
                found = accept(os.read(self.fd, 65536)[len(VNET_HEADER) :])
                if found is not None:
                    return found
        finally:
            timer.cancel()
        return None


def lease(guest: Wire, mac: str, *, client_id: bytes = b"") -> tuple[str, dict[int, bytes]]:
    """Go through DISCOVER, OFFER, REQUEST, ACK as a guest does."""
    for _ in range(DISCOVERS_MAX):
        # dnsmasq takes some milliseconds over a SIGHUP; a guest repeats its question as well.
        guest.send(frames.dhcp(frames.DISCOVER, mac, client_id=client_id))
        offer = guest.receive(frames.dhcp_reply, timeout_s=0.3)
        if offer is not None:
            break
    assert offer is not None, "no offer"
    server = socket.inet_ntoa(offer[1][54])
    guest.send(
        frames.dhcp(frames.REQUEST, mac, address=offer[0], server=server, client_id=client_id)
    )
    ack = guest.receive(frames.dhcp_reply)
    assert ack is not None, "no answer to the request"
    assert ack[1][53] == bytes((frames.ACK,))
    return ack


async def leased(node: Node, info: wire.NicInfo) -> str:
    """Return the address that DHCP gives on a NIC now."""
    async with open_wire(node, info.nic_id) as guest:
        return await anyio.to_thread.run_sync(lambda: lease(guest, info.mac)[0])


@asynccontextmanager
async def open_wire(node: Node, nic_id: str) -> AsyncIterator[Wire]:
    fd = await node.open(nic_id)
    try:
        yield Wire(fd)
    finally:
        os.close(fd)
