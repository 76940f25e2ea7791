"""Acting on one leak: what is offered, removing it, taking it up; each is an operation.

Fail-closed: the whole census is taken once more, and the thing must be there, be the same, and be
unexplained; a daemon that does not answer ends it. What stord and nwd saw they remove themselves.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import anyio.to_thread
import msgspec

from chv.agent import census_own
from chv.agent.census import CGROUPS, DAEMONS, Census
from chv.agent.chores import Came, Chores, Task, Way, Wish
from chv.agent.leaks import ID_CHARACTERS, Sighting, leak_id, unexplained
from chv.agent.side_verbs import ADOPT_LEAK, REAP_LEAK
from chv.common import logs
from chv.common.clock import timestamp
from chv.common.errors import (
    Conflict,
    FailedPrecondition,
    InUse,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unsupported,
)
from chv.common.evidence import process_identity
from chv.common.failpoint import failpoint
from chv.common.layout import UID_BLOCK_SIZE, Layout
from chv.common.names import shown
from chv.common.process import FoundWorker, run, terminate
from chv.common.removal import remove_path
from chv.common.wire.agent import Operation
from chv.common.wire.agent_leaks import Leak, LeakRef
from chv.common.wire.types import REAP_UNEXPLAINED, CensusItem, ReapUnexplained

log = logs.get(__name__)
STOP_GRACE_S = 2.0
UMOUNT_TIMEOUT_S = 10.0
LEAK_ID = re.compile(rf"^[0-9a-f]{{{ID_CHARACTERS}}}\Z")
FAILPOINTS = tuple(
    f"agent.leak.{name}.{moment}" for name in ("reap", "adopt") for moment in ("before", "after")
)
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

    def __init__(self, census: Census, chores: Chores) -> None:
        self._census = census
        self._parts = census.parts
        self._chores = chores
        chores.teach(REAP_LEAK, Way(self._reap))
        chores.teach(ADOPT_LEAK, Way(self._adopt))

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
    async def reap(self, request: LeakRef) -> Operation:
        """Have one removed; see the module. Unsupported for a process of somebody else's."""
        return await self._begun(REAP_LEAK, request, self._refuse_reaping)

    async def adopt(self, request: LeakRef) -> Operation:
        """Have one taken up; Unsupported with the reason where there is nothing to take up."""
        return await self._begun(ADOPT_LEAK, request, self._refuse_adopting)

    async def _begun(
        self, verb: str, request: LeakRef, refuse: Callable[[CensusItem, LeakRef], None]
    ) -> Operation:
        check_id(request.id)

        def check() -> None:
            sighting = self._census.leaks.find(request.id)
            if sighting is None:
                raise NotFound(f"there is no leak {request.id}", hint="`chv leaks` lists them")
            refuse(sighting.item, request)

        wish = Wish(
            verb=verb,
            kind="Leak",
            name=request.id,
            requester=request.requester,
            reason=request.reason,
            idempotency_key=request.idempotency_key,
            request={"data": request.data},
        )
        operation, _ = await self._chores.begin(wish, check=check)
        return operation

    def _refuse_reaping(self, item: CensusItem, request: LeakRef) -> None:
        if foreign := _foreign(item, self._parts.layout):
            raise Unsupported(f"not to be removed: {foreign}", resource=item.name)
        if item.data and not request.data:
            raise FailedPrecondition(
                "it may be a tenant's data", resource=item.name, hint="--data says that it is to go"
            )

    def _refuse_adopting(self, item: CensusItem, request: LeakRef) -> None:
        del request
        if why := self._not_adopted(item):
            raise Unsupported(
                f"not to be taken up: {why}", resource=item.name, hint="`chv leaks reap` removes it"
            )

    async def _reap(self, task: Task) -> Came:
        operation, data = task.operation, bool(task.operation.request["data"])
        found = await self._again(task)
        if found is None:
            return Came("removed, before the agent was started anew")
        sighting, items = found
        item, leak = sighting.item, self.shown(sighting)
        self._refuse_reaping(item, LeakRef(id=operation.name, requester="", data=data))
        await self._parts.records.begin_step(operation.id, f"remove {item.kind} {item.name}")
        log.warning(
            "leak.reap",
            kind=item.kind,
            name=item.name,
            identity=item.identity,
            requester=operation.requester,
            reason=operation.reason,
        )
        await failpoint("agent.leak.reap.before")
        await self._remove(sighting, items, data=data)
        await failpoint("agent.leak.reap.after")
        self._census.leaks.forget(operation.name)
        log.warning("leak.reaped", kind=item.kind, name=item.name, requester=operation.requester)
        return Came(f"{item.kind} {item.name} removed", msgspec.to_builtins(leak))

    async def _adopt(self, task: Task) -> Came:
        operation = task.operation
        found = await self._again(task)
        if found is None:
            return Came("taken up, before the agent was started anew")
        item, leak = found[0].item, self.shown(found[0])
        self._refuse_adopting(item, LeakRef(id=operation.name, requester=""))
        log.warning(
            "leak.adopt",
            name=item.name,
            requester=operation.requester,
            reason=operation.reason,
        )
        process = await self._process(item)
        await self._parts.records.begin_step(operation.id, f"record {item.name}")
        await failpoint("agent.leak.adopt.before")
        await self._parts.records.adopt(process.record())
        await failpoint("agent.leak.adopt.after")
        self._census.leaks.forget(operation.name)
        return Came(f"{item.kind} {item.name} taken up", msgspec.to_builtins(leak))

    async def _again(self, task: Task) -> tuple[Sighting, list[CensusItem]] | None:
        """Look again; return the leak, unchanged and unexplained, and all that there is.

        None: an agent before us was at it, and it is no leak any more. A thing that was to go is
        gone; a process that was to be taken up is recorded, which is what explains it.
        """
        key, leaks = task.operation.name, self._census.leaks
        known = leaks.find(key)
        if known is None and not task.again:
            raise NotFound(f"there is no leak {key}", hint="`chv leaks` lists them")
        look = await self._census.see()
        if look.unread:
            name, why = next(iter(look.unread.items()))
            raise Unavailable(f"{name} cannot be asked whose it is: {why}", resource=name)
        for source, item in unexplained(look.items):
            if leak_id(source, item) == key and item.owner not in self._parts.records.busy():
                now_s, stamp = self._parts.clock.monotonic(), timestamp(self._parts.clock.now())
                sighting = known or Sighting(key, source, item, now_s, now_s, stamp)
                return sighting, [each for _, each in look.items]
        leaks.forget(key)
        there = any(leak_id(source, item) == key for source, item in look.items)
        if task.again and (not there or task.operation.verb == ADOPT_LEAK):
            return None
        raise Conflict(
            "it is gone, replaced, explained, or part of an operation by now",
            resource=known.item.name if known is not None else key,
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


def check_id(text: str) -> None:
    """Refuse what no leak is called: InvalidArgument that says how they are."""
    if not LEAK_ID.match(text):
        raise InvalidArgument(
            f"{shown(text)} is not the id of a leak",
            field="id",
            hint=f"{ID_CHARACTERS} characters of 0-9 and a-f, as `chv leaks` lists them",
        )


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
