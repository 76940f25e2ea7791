"""The agent's own part of the census: VMMs and other workers, cgroups, its directories, mounts.

Reads only. Things are looked for first and the records asked afterwards: what is made meanwhile
has its record before it is there. What the daemons see (storage daemons, exports, namespaces) is
theirs; of it only the workers' ids are used, which tell whose a cgroup is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from chv.agent.leak_records import Explained
from chv.agent.ports import WORKER_KIND
from chv.common import evidence
from chv.common.ids import short_uid
from chv.common.layout import Layout
from chv.common.process import CgroupProvider, FoundWorker, Provider
from chv.common.removal import MOUNTINFO, unescaped
from chv.common.wire.types import CensusItem

DAEMONS = ("agent", "stord", "nwd", "console")
THEIRS = ("qsd", "proxy", "dnsmasq")  # kinds of workers that stord and nwd account for
PIDS_SHOWN_MAX = 16


@dataclass(frozen=True, slots=True)
class Seen:
    """What was there, before anybody's records were asked."""

    workers: list[FoundWorker]
    leaves: list[Path]
    places: list[tuple[str, Path]]  # kind of owner, entry
    api: list[Path]
    sockets: list[Path]  # that the drivers name
    mounts: list[CensusItem]


def look(layout: Layout, provider: Provider, driver_files: Iterable[Path]) -> Seen:
    """Look at the processes, cgroups, directories and mounts. Blocks."""
    return Seen(
        workers=provider.find(layout.worker_prefix),
        leaves=_leaves(provider),
        places=[
            *(("run", path) for path in evidence.children(layout.vms)),
            *(("state", path) for path in evidence.children(layout.vm_state("x").parent)),
            *(("snapshot", path) for path in evidence.children(layout.vm_snapshots)),
        ],
        api=evidence.children(layout.api),
        sockets=[path for path in driver_files if evidence.is_socket(path)],
        mounts=list(_mounts(layout)),
    )


def judge(
    seen: Seen, layout: Layout, records: Explained, console_pid: int, known_ids: set[str]
) -> list[CensusItem]:
    """Say of each thing whether a record explains it. `known_ids`: workers of stord and nwd."""
    own_ids = records.worker_ids | _daemon_ids(seen.workers, console_pid)
    return [
        *_processes(seen.workers, own_ids),
        *_places(seen.places, records),
        *_api(seen.api, layout),
        *(CensusItem(kind="socket", name=str(path)) for path in seen.sockets),
        *seen.mounts,
        *_cgroups(seen.leaves, own_ids | known_ids),
    ]


# --- processes
def _daemon_ids(workers: Iterable[FoundWorker], console_pid: int) -> set[str]:
    """Return the ids of this agent and of the console holder that it speaks with."""
    return {each.worker_id for each in workers if each.pid in (os.getpid(), console_pid)}


def _processes(workers: Iterable[FoundWorker], known: frozenset[str]) -> list[CensusItem]:
    return [
        evidence.process_item(
            each, owner=each.worker_id.split(":")[3], known=each.worker_id in known
        )
        for each in workers
        if each.worker_id.split(":")[2] not in THEIRS
    ]


def is_vmm(worker_id: str) -> bool:
    """Tell whether a worker is a VMM, by its id."""
    return worker_id.split(":")[2] == WORKER_KIND


# --- cgroups
def _leaves(provider: Provider) -> list[Path]:
    return evidence.children(provider.base) if isinstance(provider, CgroupProvider) else []


def _cgroups(leaves: Iterable[Path], known_ids: frozenset[str]) -> list[CensusItem]:
    """Leaves end with the nonce of the one worker that they were made for."""
    nonces = {worker_id.rpartition(":")[2] for worker_id in known_ids}
    items = []
    for leaf in leaves:
        if not leaf.is_dir():
            continue  # a file of the kernel's
        if leaf.name.rpartition("-")[2] in nonces:
            items.append(CensusItem(kind="cgroup", name=str(leaf)))
            continue
        pids = cgroup_pids(leaf)
        shown = [f"{pid} ({evidence.command(pid)})" for pid in pids[:PIDS_SHOWN_MAX]]
        items.append(
            CensusItem(
                kind="cgroup",
                name=str(leaf),
                known=False,
                identity=evidence.path_identity(leaf),
                evidence={"path": str(leaf), "processes": ", ".join(shown) or "none"},
            )
        )
    return items


def cgroup_pids(leaf: Path) -> list[int]:
    """Return the processes in a cgroup."""
    try:
        return [int(line) for line in (leaf / "cgroup.procs").read_text().split()]
    except OSError:
        return []  # gone meanwhile


# --- files
def _places(places: Iterable[tuple[str, Path]], records: Explained) -> list[CensusItem]:
    by_short = {short_uid(uid): uid for uid in records.vms}
    known = {"run": by_short.keys(), "state": records.vms, "snapshot": records.snapshots}
    return [
        evidence.path_item(
            "file",
            path,
            owner=by_short.get(path.name, path.name),
            known=path.name in known[place],
            data=place != "run",  # a console's record, a seed, a guest's memory
        )
        for place, path in places
    ]


def _api(entries: Iterable[Path], layout: Layout) -> list[CensusItem]:
    ours = {make(name) for name in DAEMONS for make in (layout.socket, layout.lock)}
    ours.add(layout.socket("metrics"))
    return [
        evidence.path_item(
            "socket" if evidence.is_socket(path) else "file", path, known=path in ours
        )
        for path in entries
    ]


# --- mounts
def _mounts(layout: Layout) -> Iterator[CensusItem]:
    """Nothing of ours mounts anything below the directories of single objects."""
    places = (layout.vms, layout.run / "net", layout.state / "volumes")
    ours = (*places, layout.vm_state("x").parent, layout.vm_snapshots)
    for line in MOUNTINFO.read_text().splitlines():
        front, _, back = line.partition(" - ")
        number, _, device, _, target = front.split()[:5]
        path = unescaped(target)
        if not any(place in path.parents for place in ours):
            continue
        kind, source = back.split()[:2]
        yield CensusItem(
            kind="mount",
            name=str(path),
            known=False,
            identity=f"mount {number} device {device} {kind}",
            evidence={"path": str(path), "source": source, "type": kind, "device": device},
        )


def inside(path: Path, items: Iterable[CensusItem]) -> str:
    """Return something below a directory that a record explains; empty: there is nothing."""
    known = (item.name for item in items if item.known and path in Path(item.name).parents)
    return next(known, "")
