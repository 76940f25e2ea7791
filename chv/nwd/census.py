"""Everything of nwd's kinds that exists on this machine for this instance. Reads only.

Nothing is taken from records but the question whether something is known.
"""

from __future__ import annotations

import anyio.to_thread

from chv.common.ids import short_uid
from chv.common.wire.types import CensusItem
from chv.nwd import forwarding, runfiles
from chv.nwd.blueprint import alias_prefix
from chv.nwd.host import NOTES
from chv.nwd.kernel import links, netns
from chv.nwd.nft import host_rules
from chv.nwd.parts import Parts


async def census(parts: Parts) -> list[CensusItem]:
    """Return namespaces, links, our host table, dnsmasq processes and run directories."""
    return [
        *await anyio.to_thread.run_sync(_namespaces, parts),
        *await _host_links(parts),
        *await _taps(parts),
        *await _table(parts),
        *await anyio.to_thread.run_sync(_processes, parts),
        *await anyio.to_thread.run_sync(_directories, parts),
    ]


def _owner(parts: Parts, short: str) -> str:
    known = parts.records.networks
    return next((uid for uid in known if short_uid(uid) == short), short)


def _namespaces(parts: Parts) -> list[CensusItem]:
    prefix = parts.layout.netns_prefix
    return [
        CensusItem(
            kind="netns",
            name=name,
            owner=(owner := _owner(parts, name.removeprefix(prefix))),
            known=owner in parts.records.networks,
            detail=netns.presence(name).value,
        )
        for name in netns.names(prefix)
    ]


async def _host_links(parts: Parts) -> list[CensusItem]:
    prefix = alias_prefix(parts.layout)
    found = await anyio.to_thread.run_sync(links.read_all)
    return [
        CensusItem(
            kind="link",
            name=link.name,
            owner=(owner := link.alias.removeprefix(prefix).split(":")[0]),
            known=owner in parts.records.networks,
            detail=link.alias,
        )
        for link in found.values()
        if link.alias.startswith(prefix)
    ]


async def _taps(parts: Parts) -> list[CensusItem]:
    """Taps and what shapes them in our namespaces; `owner` is the NIC."""
    items = []
    for name in await anyio.to_thread.run_sync(netns.names, parts.layout.netns_prefix):
        if await anyio.to_thread.run_sync(netns.presence, name) is not netns.Presence.PRESENT:
            continue
        found = await netns.inside(netns.path_of(name), links.read_all)
        for link in found.values():
            if link.kind in ("tun", "ifb"):
                nic_id = link.alias.rpartition(":")[2]
                known = nic_id in parts.records.nics
                items.append(
                    CensusItem(kind="link", name=link.name, owner=nic_id, known=known, detail=name)
                )
    return items


async def _table(parts: Parts) -> list[CensusItem]:
    name = parts.layout.host_table
    listing = await parts.nft.list(netns.OWN, f"list table {host_rules.FAMILY} {name}")
    known = bool(parts.records.networks)
    return [CensusItem(kind="nft", name=name, known=known)] if listing else []


def _processes(parts: Parts) -> list[CensusItem]:
    known = {row.worker_id for row in parts.records.workers.values()}
    return [
        CensusItem(
            kind="process",
            name=found.worker_id,
            owner=_owner(parts, found.worker_id.split(":")[3]),
            known=found.worker_id in known,
            detail=f"pid {found.pid} uid {found.uid} {found.executable}",
        )
        for found in parts.provider.find(parts.workers.prefix())
    ]


def _directories(parts: Parts) -> list[CensusItem]:
    base = runfiles.base(parts.layout)
    if not base.is_dir():
        return []
    return [
        CensusItem(
            kind="file",
            name=str(path),
            owner=(owner := _owner(parts, path.name)),
            known=owner in parts.records.networks,
        )
        for path in sorted(base.iterdir())
        if path.name not in (NOTES, *forwarding.NOTES.values())
    ]
