"""What a network is in the kernel, on disk and in processes. Reads only; decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import anyio.to_thread

from chv.nwd import runfiles
from chv.nwd.blueprint import host_sysctls, inner_sysctls
from chv.nwd.kept import Kept
from chv.nwd.kernel import (
    link_addresses,
    links,
    neighbours,
    netns,
    nft_generation,
    routes,
    sysctl,
    tc,
)
from chv.nwd.kernel.errors import translated
from chv.nwd.kernel.links import Link
from chv.nwd.kernel.routes import DEFAULT_ROUTE, DEFAULT_ROUTE6, Route
from chv.nwd.parts import Parts
from chv.nwd.plan import BRIDGE, TAP, UPLINK, NetnsState, ObservedNetwork, SeenLink
from chv.nwd.shaping import SeenShape

_NO_ADDRESSES: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Look:
    """What one trip off the event loop tells."""

    state: NetnsState
    files: str
    inode: int = 0
    generation: int = 0
    sysctls_right: bool = False
    links: Mapping[str, Link] = field(default_factory=dict)
    addresses: Mapping[int, frozenset[str]] = field(default_factory=dict)
    routes: Sequence[Route] = ()
    proxies: frozenset[str] = frozenset()
    shapes: Mapping[str, SeenShape] = field(default_factory=dict)


def _look(parts: Parts, network_id: str) -> _Look:
    """In a thread: everything that blocks."""
    state = NetnsState(netns.presence(parts.layout.netns(network_id)).value)
    files = runfiles.files_digest(parts.layout.network_run(network_id))
    if state is not NetnsState.PRESENT:
        return _Look(state, files)
    path = parts.netns_path(network_id)
    row = parts.records.networks.get(network_id)
    wanted = inner_sysctls(row.topology) if row is not None else {}

    def visit() -> _Look:
        found = links.read_all()
        bridge = found.get(BRIDGE)
        return _Look(
            state=state,
            files=files,
            generation=nft_generation.read(),
            inode=netns.inode(path),
            sysctls_right=not sysctl.differing(wanted),
            links=found,
            addresses=link_addresses.read(),
            routes=routes.read(),
            proxies=neighbours.proxied_all(bridge.index) if bridge is not None else frozenset(),
            shapes=tc.read(found, _ifbs(parts, found)),
        )

    return netns.visit(path, visit)


def _ifbs(parts: Parts, found: Mapping[str, Link]) -> dict[str, str]:
    """Return the ifb, there or not, of each tap that is there."""
    return {name: parts.layout.ifb_of(name) for name, link in found.items() if link.kind == TAP}


async def observe(parts: Parts, network_id: str) -> tuple[ObservedNetwork, dict[str, Link]]:
    """Return everything about a network, and the links of its namespace."""
    look = await anyio.to_thread.run_sync(_look, parts, network_id)
    around = await _around(parts, network_id, look)
    host = await _host_uplink(parts, network_id)
    around = replace(
        around,
        host_uplink=host.link,
        host_sysctls_right=host.sysctls_right,
        host_routes=host.routes,
    )
    if look.state is not NetnsState.PRESENT:
        return around, {}
    observed = replace(
        around,
        links=seen(look.links, look.addresses),
        shapes=look.shapes,
        bridge=look.links[BRIDGE].index if BRIDGE in look.links else 0,
        proxies=look.proxies,
        default_gateways=_default_gateways(look),
    )
    return observed, dict(look.links)


def _default_gateways(look: _Look) -> frozenset[str]:
    uplink = look.links.get(UPLINK)
    return frozenset(
        route.gateway
        for route in look.routes
        if route.target in (DEFAULT_ROUTE, DEFAULT_ROUTE6)
        and uplink is not None
        and route.link == uplink.index
    )


async def carriers(parts: Parts, taps: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Return which of the taps, given by network, some process holds open."""
    return await anyio.to_thread.run_sync(_carriers, parts, taps)


def _carriers(parts: Parts, taps: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """In a thread: everything that blocks."""
    held: set[str] = set()
    for network_id, names in taps.items():
        with translated("looking at taps"):
            if netns.presence(parts.layout.netns(network_id)) is not netns.Presence.PRESENT:
                continue
            path = parts.netns_path(network_id)
            found = netns.call_in(path, partial(links.read, names))
        held.update(name for name, link in found.items() if link.carrier)
    return frozenset(held)


async def _around(parts: Parts, network_id: str, look: _Look) -> ObservedNetwork:
    """Return what is known without netlink: files, rules, dnsmasq."""
    state = await parts.workers.state(network_id, parts.netns_path(network_id))
    process = parts.workers.process(network_id)
    directory = parts.layout.network_run(network_id)
    return ObservedNetwork(
        netns=look.state,
        sysctls_right=look.sysctls_right,
        rules=standing_rules(parts, network_id, (look.inode, look.generation)),
        files=look.files,
        told=runfiles.told(directory, process.worker_id) if process is not None else "",
        dns=state,
        dns_configuration=parts.workers.configuration(network_id),
        dns_bridge=parts.workers.bridge(network_id),
    )


@dataclass(frozen=True, slots=True)
class _HostSide:
    """The host's end of the uplink and what depends on it."""

    link: SeenLink | None = None
    sysctls_right: bool = False
    routes: frozenset[tuple[str, str]] = frozenset()


async def _host_uplink(parts: Parts, network_id: str) -> _HostSide:
    row = parts.records.networks.get(network_id)
    wanted = host_sysctls(parts.layout, row.topology) if row is not None else {}
    name = parts.layout.uplink(network_id)
    return await anyio.to_thread.run_sync(_look_at_host, name, wanted)


def _look_at_host(name: str, wanted: Mapping[str, str]) -> _HostSide:
    """In a thread of the host's namespace."""
    link = links.read([name]).get(name)
    if link is None:
        return _HostSide()
    return _HostSide(
        link=seen({name: link}, link_addresses.read(link.index))[name],
        sysctls_right=not sysctl.differing(wanted),
        routes=frozenset(
            (route.target, route.gateway)
            for route in routes.read(link.index)
            if not route.is_automatic
        ),
    )


def standing_rules(parts: Parts, network_id: str, now: tuple[int, int]) -> str:
    """Return the digest of the rules that stand, if nobody changed them since we loaded them.

    `now`: the namespace and the generation of its rules.
    """
    loaded = parts.loaded.get(network_id)
    if loaded is not None:
        applied = loaded.applied
    else:
        noted = runfiles.applied_rules(parts.layout.network_run(network_id))
        if noted is None:
            return ""
        applied = noted
    return applied.digest if (applied.inode, applied.generation) == now else ""


def seen(found: Mapping[str, Link], addresses: Mapping[int, frozenset[str]]) -> dict[str, SeenLink]:
    """Return links as the planner sees them: names instead of numbers."""
    names = {link.index: link.name for link in found.values()}
    return {
        name: _SEEN.get(
            name,
            (link, names.get(link.master, ""), addresses.get(link.index, _NO_ADDRESSES)),
            _seen,
        )
        for name, link in found.items()
    }


def _seen(link: Link, master: str, addresses: frozenset[str]) -> SeenLink:
    return SeenLink(
        kind=link.kind,
        mac=link.mac,
        mtu=link.mtu,
        up=link.up,
        alias=link.alias,
        master=master,
        isolated=link.isolated,
        owner_uid=link.owner_uid,
        addresses=addresses,
        multi_queue=link.multi_queue,
    )


_SEEN: Kept[SeenLink] = Kept()  # by name: what is the same link in the same place stays the same
