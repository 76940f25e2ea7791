"""Removes one thing of nwd's kinds that no record explains, having looked again.

Nobody calls this but on an operator's word. Links and tables are told from others of their name by
their number in the kernel; a namespace with processes in it stays. Errors as in
`chv.common.evidence.require_unexplained`, and InUse.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio.to_thread

from chv.common import logs
from chv.common.errors import Conflict, InUse
from chv.common.evidence import process_identity, require_unexplained
from chv.common.process import terminate
from chv.common.removal import remove_path
from chv.common.wire.types import CensusItem, Done, ReapUnexplained
from chv.nwd.census import census
from chv.nwd.kernel import link_changes, links, netlink, netns
from chv.nwd.parts import Parts

log = logs.get(__name__)
STOP_GRACE_S = 2.0


async def reap(parts: Parts, request: ReapUnexplained) -> Done:
    """Remove it; see the module."""
    item = require_unexplained(await census(parts), request)
    log.info("unexplained_removed", kind=item.kind, name=item.name, evidence=item.evidence)
    match item.kind:
        case "process":
            await _end(parts, item)
        case "netns":
            await _remove_netns(parts, item)
        case "link":
            await _at(item, partial(_delete_link, item))
        case "nft":
            family, number = item.evidence["table"].split()[0], int(item.evidence["handle"])
            await parts.nft.delete_table(_path(item), family, number)
        case _:
            await anyio.to_thread.run_sync(remove_path, Path(item.name))
    return Done()


def _path(item: CensusItem) -> str:
    namespace = item.evidence["namespace"]
    return netns.OWN if namespace == "host" else netns.path_of(namespace)


async def _at(item: CensusItem, function: partial[None]) -> None:
    """Call in the namespace that a link is in."""
    if _path(item) == netns.OWN:
        await anyio.to_thread.run_sync(function)
    else:
        await netns.inside(_path(item), function)


def _delete_link(item: CensusItem) -> None:
    with netlink.route() as asker:
        for link in links.read_all().values():
            if f"index {link.index} mac {link.mac}" == item.identity:
                link_changes.delete(asker, link)
                return
    raise Conflict("another thing has its name by now", resource=item.name)


async def _remove_netns(parts: Parts, item: CensusItem) -> None:
    path = netns.path_of(item.name)
    if netns.presence(item.name) is netns.Presence.PRESENT:
        inside = await anyio.to_thread.run_sync(netns.processes_in, path)
        if inside:
            raise InUse(f"process {inside[0]} is in it", resource=item.name, hint="end it first")
        parts.nft.forget(path)
    await anyio.to_thread.run_sync(netns.remove, item.name)


async def _end(parts: Parts, item: CensusItem) -> None:
    for found in await anyio.to_thread.run_sync(parts.provider.find, item.name):
        if process_identity(found) == item.identity:
            await terminate(found.record(), grace_s=STOP_GRACE_S)
            await parts.provider.cleanup(found.record())
