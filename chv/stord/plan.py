"""What has to be done for the storage daemon of one VM. Pure: no I/O, no clock, no state.

`plan(desired, observed)` gives steps in order; each is idempotent, so a crash after any of them
is followed by a new observation and a new plan. Rules that hold in every plan:
a VMM-facing path that the storage daemon listens on exists only while the export behind it lives;
one that a proxy listens on may outlive a storage daemon that is being restarted under its VM;
a published export of a wanted attachment is never touched; a new incarnation starts only where
`may_start` says so and after every other old path is gone; remove comes before add.
"""

from __future__ import annotations

import msgspec

from chv.stord.qsd import graph


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """One attachment that shall be served. `published`: a record says that a VMM may use it."""

    volume_id: str
    read_only: bool = False
    published: bool = False
    # An in-flight proxy stands between the VMM and the storage daemon.
    proxied: bool = False


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """What the records want for one VM."""

    attachments: tuple[Wanted, ...] = ()
    # A dead storage daemon may be followed by a new one: no guest runs that trusts the old one.
    may_start: bool = False
    # The VM keeps running meanwhile: what its proxies listen on stays.
    restarting: bool = False


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What the kernel, the storage daemon and the run directory show."""

    alive: bool = False
    nodes: frozenset[str] = frozenset()
    exports: frozenset[str] = frozenset()
    # Volume ids whose VMM-facing path exists.
    paths: frozenset[str] = frozenset()
    # Those whose proxy lives, those with a socket on its way to its VMM-facing path, and those of
    # which a proxy was meant to live.
    proxies: frozenset[str] = frozenset()
    unplaced: frozenset[str] = frozenset()
    proxy_remains: frozenset[str] = frozenset()
    # Those whose primed export stands where their proxy looks for it.
    primed: frozenset[str] = frozenset()
    # Something of this VM's storage daemon is left in the run directory.
    remains: bool = False


class Unpublish(msgspec.Struct, frozen=True, tag=True):
    """Remove the VMM-facing path, and a socket that was on its way to it."""

    volume_id: str


class RemoveExport(msgspec.Struct, frozen=True, tag=True):
    """Delete the export and wait until it is gone."""

    volume_id: str


class RemoveNodes(msgspec.Struct, frozen=True, tag=True):
    """Delete whatever nodes of the volume there are, from the top down, the lock last."""

    volume_id: str


class StopBackend(msgspec.Struct, frozen=True, tag=True):
    """End the storage daemon and remove its directory and cgroup."""


class StartBackend(msgspec.Struct, frozen=True, tag=True):
    """Start a new incarnation, with all disks that it can have from the start."""


class AddDisk(msgspec.Struct, frozen=True, tag=True):
    """Give the files to the storage uid, take the lock, open the layers, export the disk.

    The export gets a temporary name. No work where the storage daemon was started with the disk.
    """

    volume_id: str
    read_only: bool


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Prime the write cache; put the socket at its VMM-facing path, or where the proxy looks."""

    volume_id: str
    proxied: bool = False


class StopProxy(msgspec.Struct, frozen=True, tag=True):
    """End the proxy and clean up after it."""

    volume_id: str


class StartProxy(msgspec.Struct, frozen=True, tag=True):
    """Start a proxy, then put its listener at the VMM-facing path, over a dead one's."""

    volume_id: str


Step = (
    Unpublish
    | RemoveExport
    | RemoveNodes
    | StopBackend
    | StartBackend
    | AddDisk
    | Publish
    | StopProxy
    | StartProxy
)


def plan(desired: Desired, observed: Observed, known: tuple[str, ...] = ()) -> list[Step]:
    """Return the steps from `observed` to `desired`.

    `known`: volume ids, wanted or not, whose names may show up in `observed`.
    """
    volume_ids = sorted(
        {*known, *observed.paths, *(item.volume_id for item in desired.attachments)}
    )
    kept = _kept(desired, observed)
    fronts = _fronts(desired, observed, kept)
    steps = _removals(volume_ids, kept, fronts, observed)
    if not desired.attachments:
        return steps + ([StopBackend()] if observed.alive or observed.remains else [])
    if not observed.alive:
        if not desired.may_start:
            return steps
        steps.append(StartBackend())
    for item in sorted(desired.attachments, key=lambda wanted: wanted.volume_id):
        # A published export that vanished from a live storage daemon: the guest that used it
        # must be reset before there is a new one, as after a loss.
        if item.volume_id not in kept and item.published and not desired.may_start:
            continue
        if item.proxied and not (item.volume_id in fronts and _is_fronted(item, observed, kept)):
            # Before the export: it takes the longest to start, and a VMM waits at its listener.
            steps.append(StartProxy(item.volume_id))
        if item.volume_id not in kept:
            steps += _serve(item)
    return steps


def _kept(desired: Desired, observed: Observed) -> frozenset[str]:
    """Attachments that are served, or that a VMM may be using although the path was lost."""
    if not observed.alive:
        return frozenset()
    return frozenset(
        item.volume_id
        for item in desired.attachments
        if graph.export_id(item.volume_id) in observed.exports
        and _was_primed(item, desired, observed)
    )


def _was_primed(item: Wanted, desired: Desired, observed: Observed) -> bool:
    """Tell whether a VMM may have met the export, which it does only when that is primed."""
    if not item.proxied:
        return item.published or item.volume_id in observed.paths
    # In a restart `published` speaks of the incarnation before.
    return item.volume_id in observed.primed or (item.published and not desired.restarting)


def _fronts(desired: Desired, observed: Observed, kept: frozenset[str]) -> frozenset[str]:
    """Attachments whose VMM-facing side is not taken away, dead or alive."""
    return frozenset(
        item.volume_id
        for item in desired.attachments
        if item.volume_id in kept or (item.proxied and item.published and desired.restarting)
    )


def _is_fronted(item: Wanted, observed: Observed, kept: frozenset[str]) -> bool:
    """Tell whether a live proxy listens where the VMM looks, or where one may be using it."""
    # With a new export every VMM comes anew, so then the path must be there.
    used = item.published and item.volume_id in kept
    placed = item.volume_id not in observed.unplaced
    return (
        item.volume_id in observed.proxies and placed and (item.volume_id in observed.paths or used)
    )


def _removals(
    volume_ids: list[str], kept: frozenset[str], fronts: frozenset[str], observed: Observed
) -> list[Step]:
    steps: list[Step] = []
    for volume_id in volume_ids:
        if volume_id not in fronts:
            if volume_id in observed.paths | observed.unplaced:
                steps.append(Unpublish(volume_id))
            if volume_id in observed.proxy_remains:
                steps.append(StopProxy(volume_id))
        if volume_id in kept or not observed.alive:
            continue
        if graph.export_id(volume_id) in observed.exports:
            steps.append(RemoveExport(volume_id))
        if any(graph.is_of(node, volume_id) for node in observed.nodes):
            steps.append(RemoveNodes(volume_id))
    return steps


def _serve(item: Wanted) -> list[Step]:
    return [
        AddDisk(item.volume_id, item.read_only),
        Publish(item.volume_id, item.proxied),
    ]
