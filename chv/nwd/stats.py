"""What passes the NICs of this node and what does not: read from the kernel, decides nothing.

The tap's counters are the host's: what the tap has received is what the guest has sent. Reasons of
drops come from the rules' counters, and begin anew when rules are loaded as a whole. Limits that
are the whole host's are told as warnings before they are reached. A namespace that is not there
has nothing to tell and is no error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio.to_thread

from chv.common.wire.nwd import Shape
from chv.common.wire.nwd_policy import NicStats
from chv.nwd.kernel import links, netns, sysctl, tc
from chv.nwd.kernel.errors import translated
from chv.nwd.nft import counters
from chv.nwd.parts import Parts
from chv.nwd.records import Nic
from chv.nwd.shaping import SeenShape, shape_of

NEAR = 0.8
T = TypeVar("T")


async def shapes(parts: Parts, nics: Iterable[Nic]) -> dict[str, Shape]:
    """Return what the kernel does of the rates of NICs that should have some, by NIC."""
    limited = [nic for nic in nics if nic.shape != Shape()]
    return await anyio.to_thread.run_sync(_shapes, parts, limited) if limited else {}


def _shapes(parts: Parts, nics: Sequence[Nic]) -> dict[str, Shape]:
    found: dict[str, Shape] = {}
    for network_id, members in _by_network(nics).items():
        ifbs = {parts.layout.tap(nic.nic_id): parts.layout.ifb(nic.nic_id) for nic in members}
        seen = _visit(parts, network_id, partial(_read_shapes, ifbs)) or {}
        for nic in members:
            tap = parts.layout.tap(nic.nic_id)
            found[nic.nic_id] = shape_of(nic.shape, ifbs[tap], seen.get(tap, SeenShape()))
    return found


def _read_shapes(ifbs: Mapping[str, str]) -> dict[str, SeenShape]:
    """In the namespace."""
    return tc.read(links.read(name for pair in ifbs.items() for name in pair), ifbs)


async def statistics(parts: Parts, nics: Sequence[Nic]) -> list[NicStats]:
    """Return the counters of NICs that are there, in the given order."""
    counted = await anyio.to_thread.run_sync(_counters, parts, nics)
    there = [nic for nic in nics if nic.nic_id in counted]
    drops: dict[str, dict[str, int]] = {}
    for network_id, members in _by_network(there).items():
        path = parts.netns_path(network_id)
        found = counters.drops(await parts.nft.list_counters(path, counters.COMMANDS))
        for nic in members:
            tap = parts.layout.tap(nic.nic_id)
            drops[nic.nic_id] = counters.drops_of(found, tap, nic.addresses)
    return [_stats(nic, counted[nic.nic_id], drops[nic.nic_id]) for nic in there]


def _stats(nic: Nic, of_tap: links.Counters, drops: dict[str, int]) -> NicStats:
    return NicStats(
        nic_id=nic.nic_id,
        rx_bytes=of_tap.tx_bytes,
        rx_packets=of_tap.tx_packets,
        rx_dropped=of_tap.tx_dropped,
        tx_bytes=of_tap.rx_bytes,
        tx_packets=of_tap.rx_packets,
        tx_dropped=of_tap.rx_dropped,
        drops=drops,
    )


def _counters(parts: Parts, nics: Sequence[Nic]) -> dict[str, links.Counters]:
    found: dict[str, links.Counters] = {}
    for network_id, members in _by_network(nics).items():
        taps = {parts.layout.tap(nic.nic_id): nic.nic_id for nic in members}
        seen = _visit(parts, network_id, partial(links.counters, list(taps))) or {}
        found |= {taps[tap]: of_tap for tap, of_tap in seen.items()}
    return found


# --- limits that are not a NIC's own
async def warnings(parts: Parts) -> list[str]:
    """Return what will be refused before long: connections of a network or of the host, through
    which those of all networks go, and neighbours of the host.
    """
    return await anyio.to_thread.run_sync(_warnings, parts)


def _warnings(parts: Parts) -> list[str]:
    found = []
    for network_id in parts.records.networks:
        tracked = _visit(parts, network_id, _tracked) or (0, 0)
        found += connection_warnings(f"network {network_id}", *tracked)
    found += connection_warnings("the host", *_tracked())
    found += neighbour_warnings(len(parts.records.nics), _neighbour_limits())
    return found


def connection_warnings(whose: str, count: int, limit: int) -> list[str]:
    """Return the warning of who has nearly as many tracked connections as it may."""
    if not limit or count < limit * NEAR:
        return []
    return [
        f"{whose} has {count} tracked connections, and new ones are refused at "
        f"{limit} (net.netfilter.nf_conntrack_max)"
    ]


def neighbour_warnings(nics: int, limits: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return the warnings for (entries, limit) of each family's table, which all networks share."""
    found = []
    for family, (entries, limit) in limits.items():
        used = max(entries, nics)
        if limit and used >= limit * NEAR:
            found.append(
                f"{used} neighbours are known or expected, and the host's table takes {limit} "
                f"(net.{family}.neigh.default.gc_thresh3)"
            )
    return found


def _tracked() -> tuple[int, int]:
    """In the namespace: tracked connections and how many there may be."""
    count = sysctl.read("net.netfilter.nf_conntrack_count")
    limit = sysctl.read("net.netfilter.nf_conntrack_max")
    return int(count or 0), int(limit or 0)


def _neighbour_limits() -> dict[str, tuple[int, int]]:
    """Entries and limit by family; the kernel shows them in its first namespace alone."""
    found = {}
    for family, name in (("ipv4", "arp_cache"), ("ipv6", "ndisc_cache")):
        limit = int(sysctl.read(f"net.{family}.neigh.default.gc_thresh3") or 0)
        table = Path("/proc/net/stat") / name
        lines = table.read_text().splitlines() if table.exists() else []
        entries = int(lines[1].split()[0], 16) if len(lines) > 1 else 0
        found[family] = (entries, limit)
    return found


def _by_network(nics: Iterable[Nic]) -> dict[str, list[Nic]]:
    found: dict[str, list[Nic]] = {}
    for nic in nics:
        found.setdefault(nic.network_id, []).append(nic)
    return found


def _visit(parts: Parts, network_id: str, function: Callable[[], T]) -> T | None:
    """Call in the network's namespace; None where there is none."""
    with translated("looking into a network"):
        if netns.presence(parts.layout.netns(network_id)) is not netns.Presence.PRESENT:
            return None
        return netns.call_in(parts.netns_path(network_id), function)
