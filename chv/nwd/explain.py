"""Follows one real packet from a guest: sends it in the guest's name and watches where it goes.

The packet arrives in the bridge as if the guest had sent it, with the NIC's own MAC and address,
so what it shows is what the guest would meet. A table of ours switches tracing on for this packet
alone; it belongs to a socket, so the kernel removes it however we end, and the links that put the
packet in are removed by the next pass. The network's lock is held, and the noted generation of
its rules is carried on, so that no repair is set off. Fails with FailedPrecondition while nobody
holds the tap.
"""

from __future__ import annotations

import random
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address

import anyio
import anyio.to_thread
import msgspec

from chv.common.errors import FailedPrecondition, InvalidArgument
from chv.common.failpoint import failpoint
from chv.common.wire.nwd import L2Mode
from chv.common.wire.nwd_policy import ExplainPath, IpProtocol, PathReply
from chv.nwd import path_story, runfiles
from chv.nwd.blueprint import has_uplink
from chv.nwd.capture import attached
from chv.nwd.crowd import alias
from chv.nwd.deciding import Groups
from chv.nwd.keeper import Keeper
from chv.nwd.kernel import (
    injection,
    links,
    netns,
    nft_generation,
    nft_trace,
    packet_socket,
    packets,
    route_lookup,
)
from chv.nwd.kernel.errors import translated
from chv.nwd.kernel.packets import Packet
from chv.nwd.nft import text
from chv.nwd.nft.ruleset import Applied
from chv.nwd.path_story import Scene, Trail
from chv.nwd.plan import BRIDGE, UPLINK
from chv.nwd.records import Nic, Wanted

VERB = "explain"
SEEN_WITHIN_S = 1.5
GRACE_S = 0.03
CLEANUP_S = 5.0
RULES_READ_MAX = 32
_IDENTIFIER = re.compile(r"^[A-Za-z_][A-Za-z0-9_./-]{0,127}\Z")
_HANDLE = re.compile(r"^\s*(.*?)\s*# handle (\d+)\Z")
_PORTS_FROM, _PORTS_TO = 49152, 65535


@dataclass
class Watch:
    """The eyes in one namespace."""

    path: str
    trail: Trail
    tracer: socket.socket
    watcher: socket.socket

    async def trace(self, changed: Callable[[], None]) -> None:
        """Gather events for ever."""
        while True:
            await anyio.wait_readable(self.tracer)
            self.trail.events += nft_trace.receive(self.tracer)
            changed()

    async def sight(self, changed: Callable[[], None]) -> None:
        """Gather sightings for ever."""
        while True:
            await anyio.wait_readable(self.watcher)
            self.trail.sightings += packet_socket.receive(self.watcher)
            changed()


class Explainer:
    """Answers ExplainPath."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._parts = keeper.parts
        self._random = random.SystemRandom()

    async def explain(self, request: ExplainPath) -> PathReply:
        """See the wire."""
        nic = attached(self._parts, request.nic_id)
        packet = self._packet(nic, request)
        if packet.destination in nic.addresses:
            return path_story.to_itself(packet)
        async with self._keeper.locks.hold(nic.network_id):
            nic = attached(self._parts, request.nic_id)
            await self._keeper.converge(nic.network_id, VERB)
            path = self._parts.netns_path(nic.network_id)
            tap = self._parts.layout.tap(nic.nic_id)
            found = await netns.inside(path, lambda: links.read([tap, BRIDGE]))
            if tap not in found or not found[tap].carrier:
                raise FailedPrecondition(
                    "nobody holds its tap", resource=nic.nic_id, hint="start the VM"
                )
            scene = self._scene(nic, packet)
            return await self._follow(scene, self._frame(scene, found[BRIDGE].mac))

    # --- what is sent
    def _packet(self, nic: Nic, request: ExplainPath) -> Packet:
        target = _target(request)
        own = nic.address if target.version == 4 else nic.address6
        if not own:
            raise FailedPrecondition("the NIC has no IPv6 address", resource=nic.nic_id)
        largest = packets.IPV4_MARK_MAX if target.version == 4 else packets.FLOW_LABEL_MAX
        protocol = request.protocol.value
        if request.protocol in (IpProtocol.ICMP, IpProtocol.ICMPV6):
            protocol = "icmp" if target.version == 4 else "icmpv6"
        return Packet(
            protocol=protocol,
            source=own,
            destination=str(target),
            source_port=self._random.randint(_PORTS_FROM, _PORTS_TO),
            destination_port=0 if protocol.startswith("icmp") else request.port,
            mark=self._random.randint(1, largest),
        )

    def _frame(self, scene: Scene, gateway_mac: str) -> bytes:
        network = self._parts.records.networks[scene.nic.network_id]
        peer = scene.nic_at(scene.packet.destination)
        is_direct = network.topology.l2 is L2Mode.OPEN and peer is not None
        target = peer.mac if is_direct and peer is not None else gateway_mac
        return packets.ethernet(target, scene.nic.mac, packets.build(scene.packet))

    def _scene(self, nic: Nic, packet: Packet) -> Scene:
        parts, network_id = self._parts, nic.network_id
        nics = parts.nics_due(network_id)
        network = parts.records.networks[network_id]
        return Scene(
            nic=nic,
            tap=parts.layout.tap(nic.nic_id),
            uplink=UPLINK if has_uplink(network) else "",
            host_uplink=parts.layout.uplink(network_id),
            host_table=parts.layout.host_table,
            packet=packet,
            groups=Groups.of(parts.records.groups, nics),
            taps={parts.layout.tap(each.nic_id): each for each in nics},
            exposure=self._exposure(network_id, packet),
            public=network.topology.public_addresses,
            uplinks={parts.layout.uplink(each) for each in parts.records.networks},
        )

    def _exposure(self, network_id: str, packet: Packet) -> str:
        """Return the name of the exposure that the packet is for; empty where there is none."""
        for row in self._parts.records.exposures_of(network_id):
            exposure = row.exposure
            last = max(exposure.port, exposure.port_end)
            if (
                row.wanted is Wanted.PRESENT
                and exposure.protocol.value == packet.protocol
                and packet.destination in exposure.addresses
                and exposure.port <= packet.destination_port <= last
            ):
                return exposure.name
        return ""

    # --- following it
    async def _follow(self, scene: Scene, frame: bytes) -> PathReply:
        path = self._parts.netns_path(scene.nic.network_id)
        async with AsyncExitStack() as stack:
            inner = await self._watch(stack, path, scene)
            host = await self._watch(stack, netns.OWN, scene) if scene.uplink else None
            await stack.enter_async_context(self._tracing(scene, with_host=host is not None))
            sender = await stack.enter_async_context(self._way_in(scene, path))
            await failpoint("nwd.explain.ready")
            await self._send_and_wait(scene, inner, host, (sender, frame))
        for watch in (inner, host):
            if watch is not None:
                watch.trail.rules = await self._rules(watch)
        final = inner.trail.last_packet(scene.packet)
        look = partial(route_lookup.lookup, final.source, final.destination, BRIDGE)
        route = await netns.inside(path, look)
        return path_story.tell(scene, inner.trail, host.trail if host is not None else None, route)

    async def _send_and_wait(
        self, scene: Scene, inner: Watch, host: Watch | None, sent: tuple[socket.socket, bytes]
    ) -> None:
        sender, frame = sent
        settled = anyio.Event()

        def changed() -> None:
            if path_story.is_settled(scene, inner.trail, host.trail if host is not None else None):
                settled.set()

        async with anyio.create_task_group() as eyes:
            for watch in (inner, host):
                if watch is not None:
                    eyes.start_soon(watch.trace, changed)
                    eyes.start_soon(watch.sight, changed)
            with translated("sending the packet"):
                sender.send(frame)
            with anyio.move_on_after(SEEN_WITHIN_S):
                await settled.wait()
            await anyio.sleep(GRACE_S)
            eyes.cancel_scope.cancel()

    async def _watch(self, stack: AsyncExitStack, path: str, scene: Scene) -> Watch:
        version = ip_address(scene.packet.source).version
        mark = scene.packet.mark

        def open_both() -> tuple[socket.socket, socket.socket]:
            tracer = nft_trace.open_socket()
            try:
                return tracer, packet_socket.open_sightings(mark, version)
            except BaseException:
                tracer.close()
                raise

        tracer, watcher = await netns.inside(path, open_both)
        stack.enter_context(tracer)
        stack.enter_context(watcher)
        return Watch(path, Trail(hooks=await self._hooks(path)), tracer, watcher)

    @asynccontextmanager
    async def _way_in(self, scene: Scene, path: str) -> AsyncIterator[socket.socket]:
        name = alias(self._parts.layout, scene.nic.network_id, VERB)
        try:
            with await netns.inside(
                path, lambda: injection.make(scene.tap, scene.nic.mac, name)
            ) as sender:
                yield sender
        finally:
            with anyio.move_on_after(CLEANUP_S, shield=True):
                await netns.inside(path, injection.remove)

    # --- rules
    @asynccontextmanager
    async def _tracing(self, scene: Scene, *, with_host: bool) -> AsyncIterator[None]:
        """Have the packet traced in the block; the noted generation is carried on after it."""
        network_id, nft = scene.nic.network_id, self._parts.nft
        path = self._parts.netns_path(network_id)
        before = self._applied(network_id)
        try:
            async with AsyncExitStack() as tables:
                for place, table in _tables(scene, path, with_host=with_host):
                    await tables.enter_async_context(nft.temporary(place, table))
                yield
        finally:
            with anyio.move_on_after(CLEANUP_S, shield=True):
                await self._carry_on(network_id, path, before)

    def _applied(self, network_id: str) -> Applied | None:
        loaded = self._parts.loaded.get(network_id)
        directory = self._parts.layout.network_run(network_id)
        return loaded.applied if loaded is not None else runfiles.applied_rules(directory)

    async def _carry_on(self, network_id: str, path: str, before: Applied | None) -> None:
        """Note the generation that our own table has made; anybody else's is left to a pass."""
        if before is None:
            return

        def look() -> tuple[int, int]:
            return netns.inode(netns.THREAD), nft_generation.read()

        now = await netns.inside(path, look)
        if now != (before.inode, before.generation + 1):
            return
        applied = Applied(before.inode, before.generation + 1, before.digest)
        directory = self._parts.layout.network_run(network_id)
        await anyio.to_thread.run_sync(runfiles.note_rules, directory, applied)
        loaded = self._parts.loaded.get(network_id)
        if loaded is not None:
            self._parts.loaded[network_id] = replace(loaded, applied=applied)

    async def _hooks(self, path: str) -> dict[tuple[str, str], str]:
        listing = await self._parts.nft.list_json(path, "list chains")
        objects = msgspec.json.decode(listing).get("nftables", []) if listing else []
        chains = [item["chain"] for item in objects if "chain" in item]
        return {
            (str(chain["table"]), str(chain["name"])): str(chain["hook"])
            for chain in chains
            if "hook" in chain
        }

    async def _rules(self, watch: Watch) -> dict[path_story.RuleKey, str]:
        """Return the texts of the rules that decided."""
        wanted = {
            (event.family, event.table, event.chain)
            for event in path_story.events_of_rules(watch.trail.events)
            if _IDENTIFIER.match(event.table) and _IDENTIFIER.match(event.chain)
        }
        found: dict[path_story.RuleKey, str] = {}
        for family, table, chain in sorted(wanted)[:RULES_READ_MAX]:
            for each in ("bridge",) if family == "bridge" else ("inet", family):
                listing = await self._parts.nft.list_numbered(
                    watch.path, f"list chain {each} {table} {chain}"
                )
                found |= {
                    (table, chain, number): text for number, text in _numbered(listing).items()
                }
        return found


def _target(request: ExplainPath) -> IPv4Address | IPv6Address:
    """Return where to; InvalidArgument for what no guest would send to."""
    try:
        target = ip_address(request.destination)
    except ValueError as error:
        raise InvalidArgument(
            f"{request.destination!r} is not an address", field="destination"
        ) from error
    if (
        target.is_multicast
        or target.is_unspecified
        or target.is_loopback
        or (str(target) == "255.255.255.255")
    ):
        raise InvalidArgument(f"{target} is not the address of one machine", field="destination")
    if request.protocol is IpProtocol.ANY:
        raise InvalidArgument("a packet has one protocol", field="protocol", hint="tcp, udp, icmp")
    if request.protocol in (IpProtocol.TCP, IpProtocol.UDP) and not request.port:
        raise InvalidArgument(f"{request.protocol.value} needs a port", field="port")
    return target


def _tables(scene: Scene, path: str, *, with_host: bool) -> list[tuple[str, str]]:
    """Return the tables that switch tracing on: (namespace, text)."""
    tap, mac = text.link(scene.tap), text.mac(scene.nic.mac)
    mark = f"{_field(scene.packet)} {scene.packet.mark}"
    name = f"{path_story.TEMPORARY}{scene.packet.mark:x}"
    tables = [(path, _table("bridge", name, f"iifname {tap} ether saddr {mac} {mark}"))]
    if with_host:
        uplink = text.link(scene.host_uplink)
        tables.append((netns.OWN, _table("inet", name, f"iifname {uplink} {mark}")))
    return tables


def _field(packet: Packet) -> str:
    return "ip6 flowlabel" if ":" in packet.source else "ip id"


def _table(family: str, name: str, match: str) -> str:
    return f"""table {family} {name} {{
 flags owner
 chain c {{
  type filter hook prerouting priority -350; policy accept;
  {match} meta nftrace set 1
 }}
}}
"""


def _numbered(listing: str) -> dict[int, str]:
    """Return the rules of a listing by handle."""
    found = (_HANDLE.match(line) for line in listing.splitlines())
    return {
        int(match[2]): match[1]
        for match in found
        if match is not None and not match[1].endswith("{")
    }
