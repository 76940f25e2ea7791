"""What a network is in the kernel, on disk and in processes. Reads only; decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

import anyio.to_thread

from chv.nwd import runfiles, settings
from chv.nwd.kernel import netns, nft_generation, sysctl
from chv.nwd.kernel.rtnl import Link, Rtnl, open_rtnl
from chv.nwd.parts import Parts
from chv.nwd.plan import BRIDGE, DnsState, NetnsState, ObservedNetwork, SeenLink


class Sockets:
    """The netlink sockets of one pass: opened when first needed, closed with the pass."""

    def __init__(self, stack: AsyncExitStack, path: str) -> None:
        self._stack = stack
        self._path = path
        self._inner: Rtnl | None = None
        self._host: Rtnl | None = None

    async def inner(self) -> Rtnl:
        """Return the one in the network's namespace, which must exist by now."""
        if self._inner is None:
            self._inner = await self._stack.enter_async_context(open_rtnl(self._path))
        return self._inner

    async def host(self) -> Rtnl:
        """Return the one in nwd's own namespace."""
        if self._host is None:
            self._host = await self._stack.enter_async_context(open_rtnl())
        return self._host


@dataclass(frozen=True, slots=True)
class _Inside:
    """What one visit to the namespace tells."""

    inode: int
    sysctls_right: bool
    generation: int


async def observe(parts: Parts, network_id: str, sockets: Sockets) -> ObservedNetwork:
    """Return everything about a network."""
    path = parts.netns_path(network_id)
    state = await anyio.to_thread.run_sync(_state, parts.layout.netns(network_id))
    host_uplink = await _host_uplink(parts, network_id, sockets)
    if state is not NetnsState.PRESENT:
        files, told, dns = await _dns(parts, network_id)
        return ObservedNetwork(
            netns=state, host_uplink=host_uplink, files=files, told=told, dns=dns
        )
    inside = await anyio.to_thread.run_sync(_look_inside, path)
    rtnl = await sockets.inner()
    raw = await rtnl.links()
    links = seen(raw, await rtnl.addresses())
    routes = await rtnl.routes()
    files, told, dns = await _dns(parts, network_id)
    return ObservedNetwork(
        netns=state,
        sysctls_right=inside.sysctls_right,
        links=links,
        host_uplink=host_uplink,
        bridge=raw[BRIDGE].index if BRIDGE in raw else 0,
        dns_bridge=parts.workers.bridge(network_id),
        default_gateway=routes.get("0.0.0.0/0", ""),
        rules=_rules(parts, network_id, inside),
        files=files,
        told=told,
        dns=dns,
        dns_configuration=parts.workers.configuration(network_id),
    )


async def observe_nic(
    parts: Parts, network_id: str, tap: str, sockets: Sockets
) -> ObservedNetwork | None:
    """Return what concerns one NIC; None where the network around it needs a whole look."""
    path = parts.netns_path(network_id)
    if await anyio.to_thread.run_sync(_state, parts.layout.netns(network_id)) is not (
        NetnsState.PRESENT
    ):
        return None
    rtnl = await sockets.inner()
    bridge = await rtnl.link(BRIDGE)
    if bridge is None or not bridge.up:
        return None
    link = await rtnl.link(tap)
    links = seen({BRIDGE: bridge} | ({tap: link} if link is not None else {}), {})
    inside = await anyio.to_thread.run_sync(_look_inside, path)
    files, told, dns = await _dns(parts, network_id)
    return ObservedNetwork(
        netns=NetnsState.PRESENT,
        sysctls_right=True,
        links=links,
        bridge=bridge.index,
        dns_bridge=parts.workers.bridge(network_id),
        rules=_rules(parts, network_id, inside),
        files=files,
        told=told,
        dns=dns,
        dns_configuration=parts.workers.configuration(network_id),
    )


def _state(name: str) -> NetnsState:
    return NetnsState(netns.presence(name).value)


def _look_inside(path: str) -> _Inside:
    def visit() -> tuple[bool, int]:
        return not sysctl.differing(settings.SYSCTLS), nft_generation.read()

    right, generation = netns.call_in(path, visit)
    return _Inside(netns.inode(path), right, generation)


async def _host_uplink(parts: Parts, network_id: str, sockets: Sockets) -> SeenLink | None:
    rtnl = await sockets.host()
    link = await rtnl.link(parts.layout.uplink(network_id))
    if link is None:
        return None
    return seen({link.name: link}, await rtnl.addresses())[link.name]


async def _dns(parts: Parts, network_id: str) -> tuple[str, str, DnsState]:
    directory = parts.layout.network_run(network_id)
    files = await anyio.to_thread.run_sync(runfiles.files_digest, directory)
    state = await parts.workers.state(network_id, parts.netns_path(network_id))
    process = parts.workers.process(network_id)
    told = runfiles.told(directory, process.worker_id) if process is not None else ""
    return files, told, state


def _rules(parts: Parts, network_id: str, inside: _Inside) -> str:
    """Return the digest of the rules that stand, if nobody changed them since we loaded them."""
    loaded = parts.loaded.get(network_id)
    if loaded is not None:
        applied = loaded.applied
    else:
        noted = runfiles.applied_rules(parts.layout.network_run(network_id))
        if noted is None:
            return ""
        applied = noted
    right = (applied.inode, applied.generation) == (inside.inode, inside.generation)
    return applied.digest if right else ""


def seen(links: Mapping[str, Link], addresses: Mapping[int, frozenset[str]]) -> dict[str, SeenLink]:
    """Return links as the planner sees them: names instead of numbers."""
    names = {link.index: link.name for link in links.values()}
    return {
        link.name: SeenLink(
            kind=link.kind,
            mac=link.mac,
            mtu=link.mtu,
            up=link.up,
            alias=link.alias,
            master=names.get(link.master, ""),
            isolated=link.isolated,
            owner_uid=link.owner_uid,
            addresses=addresses.get(link.index, frozenset()),
        )
        for link in links.values()
    }
