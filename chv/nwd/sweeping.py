"""What follows when rules stand: connections that they do not allow end, and it is recorded.

What is due is in the records (groups that are pending here, NICs whose groups changed, footprints
of exposures, targets that drained), so a kill before or after is made good by the next pass. The
caller holds the network's lock, and the network's rules are those of the records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import anyio.to_thread
import msgspec

from chv.common import logs
from chv.common.failpoint import failpoint
from chv.common.wire.nwd_policy import Existing, IpProtocol
from chv.nwd import allowing, policy
from chv.nwd.kernel import conntrack, netns
from chv.nwd.kernel.conntrack import Connection, Towards
from chv.nwd.nft.model import Exposed
from chv.nwd.parts import Parts
from chv.nwd.records import Drain, ExposureRow, GroupRow, Network, Nic, Wanted

log = logs.get(__name__)
Unwanted = Callable[[Connection], bool]


@dataclass(frozen=True, slots=True)
class _Due:
    """What is to be done in one network."""

    groups: Sequence[GroupRow]
    nics: Sequence[Nic]
    exposures: Sequence[ExposureRow]


async def settle(
    parts: Parts, network: Network, verb: str, now_s: float, is_busy: bool | None = None
) -> None:
    """Do and record what is due in a network; `is_busy`: whether anything was tracked there just
    now, the rules standing already, where that is known.

    What is recorded waits for no disk: without it all of this is done once more, which ends only
    what the rules do not allow; and whatever takes the record takes the connections as well.
    """
    due = _due(parts, network.network_id, now_s)
    if not (due.groups or due.nics or due.exposures):
        return
    await failpoint(f"nwd.{verb}.before_sweep")
    if is_busy is None:
        is_busy = await netns.inside(parts.netns_path(network.network_id), conntrack.is_any)
    unwanted = _inside(parts, network, due, now_s) if is_busy else []
    await _end(parts, network, due, unwanted)
    await failpoint(f"nwd.{verb}.after_sweep")
    for row in due.nics:
        await parts.records.put_nic(msgspec.structs.replace(row, unswept=False))
    for exposure in due.exposures:
        await _exposure_done(parts, exposure, now_s)
    async with parts.registry:
        for group in due.groups:
            await _group_done(parts, group, network.network_id)


def _due(parts: Parts, network_id: str, now_s: float) -> _Due:
    records = parts.records
    return _Due(
        groups=[row for row in records.groups.values() if network_id in row.pending],
        nics=[
            nic
            for nic_id in records.members(network_id).unswept
            if (nic := parts.nic_due(nic_id)) is not None
        ],
        exposures=[
            row
            for row in records.exposures_of(network_id)
            if row.sweeps or row.wanted is Wanted.REMOVED or over(parts, row, now_s)
        ],
    )


def over(parts: Parts, row: ExposureRow, now_s: float) -> list[Drain]:
    """Return the targets of an exposure whose time is over."""
    return [
        drain for drain in row.draining if drain.end_s <= now_s or drain.boot_id != parts.boot_id
    ]


# --- what ends
async def _end(parts: Parts, network: Network, due: _Due, inner: Sequence[Unwanted]) -> None:
    host = [each for row in due.exposures for each in _on_host(parts, network, row)]
    ended = 0
    if inner:
        towards = _towards_exposures(parts, network, due)
        path = parts.netns_path(network.network_id)
        ended += await netns.inside(path, partial(conntrack.end, _any(inner), towards))
    if host:
        ended += await anyio.to_thread.run_sync(conntrack.end, _any(host), _towards_host(due))
    if ended:
        log.info("connections_ended", network_id=network.network_id, connections=ended)


def _inside(parts: Parts, network: Network, due: _Due, now_s: float) -> list[Unwanted]:
    return [
        *_of_groups(parts, network, due),
        *(each for row in due.exposures for each in _of_exposure(parts, network, row, now_s)),
    ]


def _towards_exposures(parts: Parts, network: Network, due: _Due) -> list[Towards]:
    """Return where all goes that may have to end, when only exposures are concerned."""
    if due.groups or due.nics:
        return []
    found: list[Towards] = []
    for row in due.exposures:
        now = _now(parts, network, row)
        found += _towards(now.protocol, now.addresses, now.ports)
        for each in row.sweeps:
            found += _towards(each.protocol, each.addresses, (each.first, each.last))
    return found


def _towards_host(due: _Due) -> list[Towards]:
    found: list[Towards] = []
    for each in (print_ for row in due.exposures for print_ in row.sweeps):
        found += _towards(each.protocol, each.host_addresses, (each.first, each.last))
    return found


def _towards(
    protocol: IpProtocol, addresses: Iterable[str], ports: tuple[int, int]
) -> list[Towards]:
    first, last = ports
    number = allowing.NUMBERS[protocol]
    return [Towards(number, address, first if first == last else 0) for address in addresses]


def _any(unwanted: Sequence[Unwanted]) -> Unwanted:
    return lambda connection: any(each(connection) for each in unwanted)


def _of_groups(parts: Parts, network: Network, due: _Due) -> list[Unwanted]:
    changed = {
        row.group.group_id for row in due.groups if row.existing is Existing.DROP and row.narrowed
    }
    if not (changed or due.nics):
        return []
    concerned = {
        address
        for nic in parts.nics_due(network.network_id)
        if nic.unswept or changed & set(nic.groups)
        for address in nic.addresses
    }
    if not concerned:
        return []
    network_rules = parts.network_rules(network)

    @cache
    def judge() -> allowing.Judge:
        """Most changes end nothing and need none."""
        return allowing.Judge(network_rules)

    return [lambda each: bool(each.ends & concerned) and not judge().permits(each)]


def _now(parts: Parts, network: Network, row: ExposureRow) -> Exposed:
    nics = {nic.nic_id: nic for nic in _targets(parts, row)}
    return policy.exposed(row, nics, parts.uplinks(network))


def _targets(parts: Parts, row: ExposureRow) -> list[Nic]:
    found = [parts.nic_due(nic_id) for nic_id in row.exposure.targets]
    return [nic for nic in found if nic is not None]


def _of_exposure(parts: Parts, network: Network, row: ExposureRow, now_s: float) -> list[Unwanted]:
    exposed = _now(parts, network, row)
    now = exposed if row.wanted is Wanted.PRESENT else None
    finished = over(parts, row, now_s)
    drained = frozenset(address for drain in finished for address in drain.addresses)
    draining = [drain for drain in row.draining if drain not in finished]
    targets = frozenset(address for nic in _targets(parts, row) for address in nic.addresses).union(
        address for drain in draining for address in drain.addresses
    )
    unwanted: list[Unwanted] = []
    if drained - targets:
        unwanted.append(lambda each: allowing.is_drained(each, exposed, drained - targets))
    if row.sweeps:
        unwanted.append(
            lambda each: any(
                allowing.is_stray(each, footprint, now, targets) for footprint in row.sweeps
            )
        )
    return unwanted


def _on_host(parts: Parts, network: Network, row: ExposureRow) -> list[Unwanted]:
    footprints = [each for each in row.sweeps if each.host_addresses]
    if not footprints:
        return []
    now = _now(parts, network, row) if row.wanted is Wanted.PRESENT else None
    return [
        lambda each: any(
            allowing.is_stray_on_host(each, footprint, row.host_addresses, now)
            for footprint in footprints
        )
    ]


# --- what is recorded
async def _exposure_done(parts: Parts, row: ExposureRow, now_s: float) -> None:
    """Forget what was due; an exposure that is withdrawn goes as a whole."""
    if row.wanted is Wanted.REMOVED:
        await parts.records.drop_exposure(row)
        return
    finished = over(parts, row, now_s)
    draining = [drain for drain in row.draining if drain not in finished]
    done = msgspec.structs.replace(row, sweeps=[], draining=draining)
    await parts.records.note_exposure(done)


async def _group_done(parts: Parts, row: GroupRow, network_id: str) -> None:
    current = parts.records.groups.get(row.group.group_id)
    if current is None or current.generation != row.generation:
        return  # changed meanwhile: its own pass comes
    pending = [each for each in current.pending if each != network_id]
    await parts.records.note_group(msgspec.structs.replace(current, pending=pending))
