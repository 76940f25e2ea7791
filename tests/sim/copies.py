"""Clones, rebuilds and ephemeral VMs in a schedule: what users ask for, and what must hold."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from chv.agent.engine import Engine
from chv.agent.records import Change, PutObject, RemoveWorker
from chv.agent.references import referrers
from chv.agent.tables import Tables
from chv.agent.vm.cloning import HELPER
from chv.agent.vm.desired import facts_of, vm_of, wants_to_run
from chv.agent.vm.ephemeral import CONTINUED
from chv.agent.vm.rebuild_rules import FORMER, NEW
from chv.common.errors import NotFound
from chv.common.wire.agent import ObjectRef, Operation
from chv.common.wire.agent_clone import CloneVm
from chv.common.wire.agent_rebuild import RebuildVm
from chv.common.wire.resources import CloneModeName

Request = dict[str, Any]
EPHEMERAL = "vm2"


def ask_for_copies(requests: list[Request], draw: random.Random) -> None:
    """Put them into some of the schedules; the first request makes what the others are about."""
    if draw.random() < 0.3:
        make_ephemeral(requests)
    if draw.random() < 0.5:
        return
    for number in range(draw.choice((1, 2, 3))):
        at = draw.randrange(1, len(requests) + 1)
        vm = draw.randrange(2)
        if draw.random() < 0.6:
            wish = {"image": "tiny", "keep_old": draw.random() < 0.3, "force": draw.random() < 0.3}
            requests.insert(at, {"rebuild": f"vm{vm}", **wish})
            continue
        name = f"copy{number}"
        mode = draw.choice(list(CloneModeName))
        freeze = draw.choice(("", "", "5s"))
        requests.insert(at, {"clone": f"vm{vm}", "new_name": name, "mode": mode, "freeze": freeze})
        if draw.random() < 0.6:
            later = draw.randrange(at + 1, len(requests) + 1)
            gone = [("VirtualMachine", name), *(("Volume", f"{name}-d{n}") for n in (vm, 3))]
            requests[later:later] = [{"delete": each} for each in gone]


def make_ephemeral(requests: list[Request]) -> None:
    """One of the VMs is for one run in all that is asked for."""
    for request in requests:
        for each in request.get("apply", ()):
            if (each["kind"], each["metadata"]["name"]) == ("VirtualMachine", EPHEMERAL):
                each["spec"]["ephemeral"] = True
                if each["spec"]["runStrategy"] == "Always":
                    each["spec"]["runStrategy"] = "RerunOnFailure"


async def ask(engine: Engine, request: Request, key: str) -> Operation:
    """Send a clone or a rebuild."""
    wish = {"requester": "sim", "idempotency_key": key, **request}
    if "rebuild" in request:
        name = wish.pop("rebuild")
        return (await engine.rebuild(RebuildVm(name=name, **wish))).operation
    name = wish.pop("clone")
    return (await engine.clone(CloneVm(name=name, **wish))).operation


def with_sources(engine: Engine, objects: list[Request]) -> list[Request]:
    """Return the objects with what a volume was made from as it is: a rebuild has changed it."""
    return [_with_source(engine, each) if each["kind"] == "Volume" else each for each in objects]


def _with_source(engine: Engine, volume: Request) -> Request:
    if "source" in volume["spec"]:
        return volume
    try:
        found = engine.get(ObjectRef(kind="Volume", name=volume["metadata"]["name"])).object
    except NotFound:
        return volume
    source = msgspec.json.decode(found)["spec"].get("source")
    return {**volume, "spec": {**volume["spec"], "source": source}} if source else volume


def leftovers(tables: Tables) -> list[str]:
    """I4: no snapshot of a clone that nothing needs, no disk of a rebuild that is over."""
    found = [
        f"I4: {each.title} is left of a clone"
        for each in tables.of_kind("VolumeSnapshot")
        if HELPER in each.resource.metadata.annotations and not referrers(tables, each.key)
    ]
    kept = set()
    for stored in tables.of_kind("VirtualMachine"):
        wish = facts_of(stored).rebuild
        if wish is not None and (not wish.swapped or wants_to_run(vm_of(stored), facts_of(stored))):
            found.append(f"I3: {stored.title} is still being rebuilt")
        kept |= {wish.old_uid} if wish is not None else set()
    for stored in tables.of_kind("Volume"):
        name, owners = stored.key[2], stored.resource.metadata.owner_references
        former = name.endswith(FORMER)
        if (former and owners and stored.uid not in kept) or (name.endswith(NEW) and not former):
            found.append(f"I4: {stored.title} is left of a rebuild")
    return found


def second_life(tables: Tables, changes: tuple[Change, ...]) -> str:
    """Say which ephemeral VM outlives its end; called before the changes are made."""
    deleted = {c.object.uid for c in changes if isinstance(c, PutObject) and c.object.deleting}
    for change in changes:
        if not isinstance(change, RemoveWorker):
            continue
        stored, row = tables.objects[change.vm_uid], tables.workers[change.vm_uid]
        kind = row.ending.kind if row.ending is not None else None
        ends = vm_of(stored).spec.ephemeral and row.booted and kind not in CONTINUED
        if ends and not stored.deleting and stored.uid not in deleted:
            return f"{stored.title} is ephemeral, has ended, and stays"
    return ""
