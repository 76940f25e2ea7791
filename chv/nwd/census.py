"""Everything of nwd's kinds that exists on this machine for this instance. Reads only.

Nothing is taken from records but the question whether something is known, and that is asked after
the thing was seen: what is made meanwhile has its record before it is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread
import msgspec

from chv.common import evidence
from chv.common.ids import short_uid
from chv.common.wire.types import CensusItem
from chv.nwd import forwarding, runfiles
from chv.nwd.blueprint import alias_prefix
from chv.nwd.host import NOTES
from chv.nwd.kernel import links, netns, nft_generation, nft_tables
from chv.nwd.kernel.links import Link
from chv.nwd.nft import gateway, host_rules, spoof
from chv.nwd.nft.standing import TableKey
from chv.nwd.parts import Parts
from chv.nwd.path_story import TEMPORARY

OUR_TABLES = (spoof.TABLE, gateway.TABLE)
PASSING_TABLE = "chv_"  # in front of those that end with who asked for them
PROCESSES_SHOWN_MAX = 16


@dataclass(frozen=True, slots=True)
class _Inside:
    """What stands in one namespace."""

    links: list[Link]
    tables: list[tuple[TableKey, int]]


async def census(parts: Parts) -> list[CensusItem]:
    """Return namespaces, links, nft tables, dnsmasq processes and run directories."""
    items = await anyio.to_thread.run_sync(_namespaces, parts)
    host = await anyio.to_thread.run_sync(_look)
    items += _host_links(parts, host)
    items += _host_tables(parts, host)
    for name in await anyio.to_thread.run_sync(netns.names, parts.layout.netns_prefix):
        if await anyio.to_thread.run_sync(netns.presence, name) is netns.Presence.PRESENT:
            seen = await netns.inside(netns.path_of(name), _look)
            items += _inner_links(parts, name, seen)
            items += _inner_tables(name, seen)
    items += await anyio.to_thread.run_sync(_processes, parts)
    items += await anyio.to_thread.run_sync(_directories, parts)
    return items


def _look() -> _Inside:
    """Return the links and tables of the namespace that this thread is in. Blocks."""
    with nft_generation.open_socket() as asker:
        return _Inside(list(links.read_all().values()), nft_tables.names(asker))


def _owner(parts: Parts, short: str) -> str:
    known = list(parts.records.networks)
    return next((uid for uid in known if short_uid(uid) == short), short)


def _namespaces(parts: Parts) -> list[CensusItem]:
    prefix = parts.layout.netns_prefix
    return [_namespace(parts, name) for name in netns.names(prefix)]


def _namespace(parts: Parts, name: str) -> CensusItem:
    presence = netns.presence(name)
    owner = _owner(parts, name.removeprefix(parts.layout.netns_prefix))
    known = owner in parts.records.networks
    path = Path(netns.path_of(name))
    if known or presence is not netns.Presence.PRESENT:
        item = evidence.path_item("netns", path, owner=owner, known=known)
        return msgspec.structs.replace(item, name=name, detail=presence.value)
    inside = netns.processes_in(str(path))
    return CensusItem(
        kind="netns",
        name=name,
        owner=owner,
        known=False,
        detail=presence.value,
        identity=f"namespace {netns.inode(str(path))}",
        evidence={
            "inode": str(netns.inode(str(path))),
            "processes": " ".join(map(str, inside[:PROCESSES_SHOWN_MAX])) or "none",
        },
    )


def link_name(namespace: str, link: str) -> str:
    """Return the name of a link in a census: of the host's, its own."""
    return f"{namespace}/{link}" if namespace else link


def _link_item(namespace: str, link: Link, owner: str, *, known: bool, detail: str) -> CensusItem:
    shown = {"namespace": namespace or "host", "type": link.kind, "alias": link.alias}
    return CensusItem(
        kind="link",
        name=link.name if known else link_name(namespace, link.name),
        owner=owner,
        known=known,
        detail=detail,
        identity="" if known else f"index {link.index} mac {link.mac}",
        evidence={} if known else shown | {"index": str(link.index), "mac": link.mac},
    )


def _host_links(parts: Parts, host: _Inside) -> list[CensusItem]:
    """Return links that carry our alias, or a name that only ours have."""
    prefix, start = alias_prefix(parts.layout), f"c{parts.layout.instance}"
    return [
        _link_item("", link, owner, known=owner in parts.records.networks, detail=link.alias)
        for link in host.links
        if link.alias.startswith(prefix) or link.name.startswith(start)
        for owner in (link.alias.removeprefix(prefix).split(":")[0],)
    ]


def _inner_links(parts: Parts, namespace: str, seen: _Inside) -> list[CensusItem]:
    """Return taps and what shapes them; `owner` is the NIC."""
    return [
        _link_item(namespace, link, nic, known=nic in parts.records.nics, detail=namespace)
        for link in seen.links
        if link.kind in ("tun", "ifb")
        for nic in (link.alias.rpartition(":")[2],)
    ]


def _host_tables(parts: Parts, host: _Inside) -> list[CensusItem]:
    """Return our one table, and any other with our name in front."""
    ours = (host_rules.FAMILY, parts.layout.host_table)
    known = {ours} if parts.records.networks else set()
    return [
        _table_item("", key, handle, known=key in known)
        for key, handle in host.tables
        if key[1].startswith(ours[1])
    ]


def _inner_tables(namespace: str, seen: _Inside) -> list[CensusItem]:
    """Return tables that are none of ours; ours are nwd's own to put right.

    Those by which a packet is followed end with who asked for them.
    """
    return [
        _table_item(namespace, key, handle, known=False)
        for key, handle in seen.tables
        if key not in OUR_TABLES and not key[1].startswith(TEMPORARY)
    ]


def _table_item(namespace: str, key: TableKey, handle: int, *, known: bool) -> CensusItem:
    name = " ".join(key)
    return CensusItem(
        kind="nft",
        name=key[1] if known else link_name(namespace, name),
        known=known,
        identity="" if known else f"handle {handle}",
        evidence={}
        if known
        else {"namespace": namespace or "host", "table": name, "handle": str(handle)},
    )


def _processes(parts: Parts) -> list[CensusItem]:
    found = parts.provider.find(parts.workers.prefix())
    known = {row.worker_id for row in list(parts.records.workers.values())}
    return [
        evidence.process_item(
            each,
            owner=_owner(parts, each.worker_id.split(":")[3]),
            known=each.worker_id in known,
        )
        for each in found
    ]


def _directories(parts: Parts) -> list[CensusItem]:
    base = runfiles.base(parts.layout)
    if not base.is_dir():
        return []
    return [
        evidence.path_item("file", path, owner=owner, known=owner in parts.records.networks)
        for path in sorted(base.iterdir())
        if path.name not in (NOTES, *forwarding.NOTES.values())
        for owner in (_owner(parts, path.name),)
    ]
