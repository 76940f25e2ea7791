"""Acting on one leak: what is offered, removing it, taking it up.

Fail-closed: the whole census is taken once more, and the thing must be there, be the same, and be
unexplained; a daemon that does not answer ends it. What stord and nwd saw they remove themselves.
"""

from __future__ import annotations

import os
from pathlib import Path

import anyio.to_thread

from chv.agent import census_own
from chv.agent.census import CGROUPS, DAEMONS, Census
from chv.agent.leaks import Sighting, leak_id, unexplained
from chv.common import logs
from chv.common.errors import (
    Conflict,
    FailedPrecondition,
    InUse,
    NotFound,
    Unavailable,
    Unsupported,
)
from chv.common.evidence import process_identity
from chv.common.layout import UID_BLOCK_SIZE, Layout
from chv.common.process import FoundWorker, run, terminate
from chv.common.removal import remove_path
from chv.common.wire.agent_leaks import Leak, LeakRef
from chv.common.wire.types import REAP_UNEXPLAINED, CensusItem, ReapUnexplained

log = logs.get(__name__)
STOP_GRACE_S = 2.0
UMOUNT_TIMEOUT_S = 10.0
NOT_ADOPTED = {
    "process": "only a VMM whose VM is recorded can be taken up",
    "socket": "a socket serves nobody that is recorded; the object makes its own",
    "link": "nwd makes the links of recorded networks and NICs itself",
    "netns": "nwd makes the namespaces of recorded networks itself",
    "nft": "nwd loads the tables of recorded networks itself",
    "mount": "nothing of a node is mounted there",
    "cgroup": "a cgroup serves one incarnation of a worker alone",
    "file": "no object can be made from files alone; a volume's data can be imported as an image",
}


class LeakActions:
    """See the module."""

    def __init__(self, census: Census) -> None:
        self._census = census
        self._parts = census.parts

    # --- what is offered
    def shown(self, sighting: Sighting) -> Leak:
        """Return a leak with its actions."""
        item, records = sighting.item, self._parts.records
        why_not = self._not_adopted(item)
        foreign = _foreign(item, self._parts.layout)
        offered = {"adopt": not why_not, "reap": bool(item.identity) and not foreign}
        return Leak(
            id=sighting.id,
            kind=item.kind,
            name=item.name,
            owner=item.owner,
            title=records.title(item.owner),
            daemon="agent" if sighting.source == CGROUPS else sighting.source,
            since=sighting.since,
            evidence=item.evidence,
            data=item.data,
            actions=[action for action, is_offered in offered.items() if is_offered],
            note=foreign or (why_not if item.kind == "process" else ""),
        )

    def _not_adopted(self, item: CensusItem) -> str:
        if item.kind == "process" and census_own.is_vmm(item.name):
            return self._parts.records.refusal(item.owner)
        return NOT_ADOPTED[item.kind]

    # --- acting
    async def reap(self, request: LeakRef) -> Leak:
        """Remove one; see the module. Unsupported for a process of somebody else's."""
        sighting, items = await self._again(request.id)
        item = sighting.item
        if foreign := _foreign(item, self._parts.layout):
            raise Unsupported(f"not to be removed: {foreign}", resource=item.name)
        if item.data and not request.data:
            raise FailedPrecondition(
                "it may be a tenant's data", resource=item.name, hint="--data says that it is to go"
            )
        log.warning(
            "leak.reap",
            kind=item.kind,
            name=item.name,
            identity=item.identity,
            requester=request.requester,
            reason=request.reason,
        )
        leak = self.shown(sighting)
        await self._remove(sighting, items, data=request.data)
        self._census.leaks.forget(request.id)
        log.warning("leak.reaped", kind=item.kind, name=item.name, requester=request.requester)
        return leak

    async def adopt(self, request: LeakRef) -> Leak:
        """Take one up; Unsupported with the reason where there is nothing to take up."""
        sighting, _ = await self._again(request.id)
        item = sighting.item
        if why := self._not_adopted(item):
            raise Unsupported(
                f"not to be taken up: {why}", resource=item.name, hint="`chv leaks reap` removes it"
            )
        log.warning(
            "leak.adopt", name=item.name, requester=request.requester, reason=request.reason
        )
        leak = self.shown(sighting)
        found = await self._process(item)
        await self._parts.records.adopt(found.record())
        self._census.leaks.forget(request.id)
        return leak

    async def _again(self, key: str) -> tuple[Sighting, list[CensusItem]]:
        """Look again; return the leak, unchanged and unexplained, and all that there is."""
        sighting = self._census.leaks.find(key)
        if sighting is None:
            raise NotFound(f"there is no leak {key}", hint="see `chv leaks`")
        look = await self._census.see()
        if look.unread:
            name, why = next(iter(look.unread.items()))
            raise Unavailable(f"{name} cannot be asked whose it is: {why}", resource=name)
        for source, item in unexplained(look.items):
            if leak_id(source, item) == key and item.owner not in self._parts.records.busy():
                return sighting, [each for _, each in look.items]
        self._census.leaks.forget(key)
        raise Conflict(
            "it is gone, replaced, explained, or part of an operation by now",
            resource=sighting.item.name,
        )

    async def _remove(self, sighting: Sighting, items: list[CensusItem], *, data: bool) -> None:
        item = sighting.item
        if sighting.source in DAEMONS:
            request = ReapUnexplained(
                kind=item.kind, name=item.name, identity=item.identity, data=data
            )
            await self._parts.link(sighting.source).call(REAP_UNEXPLAINED, request)
            return
        match item.kind:
            case "process":
                await self._end(item)
            case "cgroup":
                await anyio.to_thread.run_sync(_remove_cgroup, Path(item.name))
            case "mount":
                await run(("umount", item.name), timeout_s=UMOUNT_TIMEOUT_S)
            case _:
                if kept := census_own.inside(Path(item.name), items):
                    raise InUse(f"{kept} is in it", resource=item.name)
                await anyio.to_thread.run_sync(remove_path, Path(item.name))

    async def _process(self, item: CensusItem) -> FoundWorker:
        for found in await anyio.to_thread.run_sync(self._parts.provider.find, item.name):
            if process_identity(found) == item.identity:
                return found
        raise NotFound("the process has ended", resource=item.name)

    async def _end(self, item: CensusItem) -> None:
        found = await self._process(item)
        await terminate(found.record(), grace_s=STOP_GRACE_S)
        await self._parts.provider.cleanup(found.record())
        if census_own.is_vmm(item.name):
            self._parts.records.forget_stranger(item.name)


def _foreign(item: CensusItem, layout: Layout) -> str:
    """Return why a process is not ours to end: anybody can carry our id in its arguments."""
    if item.kind != "process":
        return ""
    uid = int(item.evidence.get("uid", "-1"))
    ours = range(layout.uid_block, layout.uid_block + UID_BLOCK_SIZE)
    if uid in ours or uid == os.geteuid():
        return ""
    return f"uid {uid} is none of this node's"


def _remove_cgroup(path: Path) -> None:
    if pids := census_own.cgroup_pids(path):
        raise InUse(f"process {pids[0]} is in it", resource=str(path), hint="end it first")
    path.rmdir()
