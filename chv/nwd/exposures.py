"""Exposures as calls see them: set, delete, list. Records first, then the host's and the network's
rules.

What an exposure may take is decided in `exposure_rules`. A target that is taken out gets no new
connection and keeps its own for `drain_s`, which is recorded with its end. Generations work as for
networks; what a change has to end is recorded with it, as what the exposure took in before.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import anyio.to_thread
import msgspec

from chv.common.errors import (
    Conflict,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    StaleGeneration,
)
from chv.common.failpoint import failpoint
from chv.common.wire.nwd_policy import (
    Existing,
    Exposure,
    ExposureInfo,
    HealthProtocol,
    IpProtocol,
    SetExposure,
    TargetInfo,
)
from chv.nwd import node_addresses, policy
from chv.nwd.exposure_rules import Checks, refuse_listened, takes_more
from chv.nwd.keeper import Keeper
from chv.nwd.kernel import listeners, own_addresses
from chv.nwd.networks import refuse_stale
from chv.nwd.records import Drain, ExposureRow, Footprint, Health, Network, Wanted

SET, DELETE = "set_exposure", "delete_exposure"
EXPOSURES_MAX = 1024
SWEEPS_MAX = 16
HEALTHY, UNHEALTHY, UNKNOWN, DRAINING, ABSENT = (
    "healthy",
    "unhealthy",
    "unknown",
    "draining",
    "absent",
)


class Exposures:
    """The exposures of this node."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._parts = keeper.parts
        self._records = keeper.parts.records
        self._checks = Checks(self._parts)

    async def set(self, request: SetExposure) -> ExposureInfo:
        """Make an exposure so."""
        network_id = request.exposure.network_id
        async with self._keeper.locks.hold(network_id):
            network = self._due_network(network_id)
            await self._finish_removal(request)
            node = await self._own_addresses(request.exposure, network)
            before = self._records.exposures.get(request.exposure.exposure_id)
            async with self._parts.registry:
                await self._record(request, network, node)
            await failpoint(f"nwd.{SET}.recorded")
            await self._converge(network, SET, request.exposure, before)
        return self.info(request.exposure.exposure_id)

    async def delete(self, exposure_id: str, generation: int, existing: Existing) -> None:
        """Leave nothing of an exposure."""
        row = self._records.exposures.get(exposure_id)
        if row is None:
            await self._records.bury(exposure_id, generation)
            return
        network_id = row.exposure.network_id
        async with self._keeper.locks.hold(network_id):
            row = self._records.exposures.get(exposure_id)
            if row is None:
                return
            refuse_stale(exposure_id, generation, row.generation, {})
            gone = msgspec.structs.replace(
                row,
                generation=generation,
                wanted=Wanted.REMOVED,
                sweeps=self._sweeps(row, row, existing),
            )
            await self._records.put_exposure(gone)
            await failpoint(f"nwd.{DELETE}.recorded")
            network = self._records.networks[network_id]
            if self._parts.is_due(network):
                await self._converge(network, DELETE, row.exposure, None)
            else:
                await self._records.drop_exposure(gone)  # nothing of it is in the kernel

    async def _finish_removal(self, request: SetExposure) -> None:
        """A deletion that was cut short comes first; the tombstone then decides."""
        row = self._records.exposures.get(request.exposure.exposure_id)
        if row is None or row.wanted is not Wanted.REMOVED:
            return
        same = row.exposure.network_id == request.exposure.network_id
        if same and request.meta.generation > row.generation:
            await self._keeper.converge(row.exposure.network_id, DELETE)

    async def _converge(
        self, network: Network, verb: str, exposure: Exposure, before: ExposureRow | None
    ) -> None:
        """Addresses of the subnet are also the bridge's: those take a look at the network."""
        texts = (network.topology.subnet, network.topology.subnet6)
        subnets = [ip_network(text) for text in texts if text]
        known = before.exposure.addresses if before is not None else []
        addresses = [ip_address(text) for text in (*exposure.addresses, *known)]
        if any(address in net for address in addresses for net in subnets):
            await self._keeper.converge(network.network_id, verb)
        else:
            await self._keeper.converge_rules(network.network_id, verb)

    # --- recording; the network's lock and the registry are held
    async def _record(self, request: SetExposure, network: Network, node: frozenset[str]) -> None:
        exposure, generation = request.exposure, request.meta.generation
        old = self._records.exposures.get(exposure.exposure_id)
        known = old.generation if old is not None else -1
        refuse_stale(exposure.exposure_id, generation, known, self._records.tombstones)
        self._refuse_change(exposure, generation, old)
        if old is not None and old.generation == generation:
            return
        host_addresses = self._checks.check(exposure, network, node)
        if takes_more(exposure, host_addresses, old):
            listening = await anyio.to_thread.run_sync(listeners.read)
            refuse_listened(exposure, host_addresses, old, listening)
        row = ExposureRow(
            exposure=exposure,
            generation=generation,
            host_addresses=host_addresses,
            draining=self._draining(exposure, old),
            health=_kept_health(exposure, old),
        )
        sweeps = self._sweeps(row, old, _ending(row, old, request.existing))
        await self._records.put_exposure(msgspec.structs.replace(row, sweeps=sweeps))

    def _refuse_change(self, exposure: Exposure, generation: int, old: ExposureRow | None) -> None:
        if old is None:
            if len(self._records.exposures) >= EXPOSURES_MAX:
                raise ResourceExhausted(f"there are {EXPOSURES_MAX} exposures on this node")
            return
        if old.exposure.network_id != exposure.network_id:
            raise Conflict(
                f"the exposure belongs to network {old.exposure.network_id}",
                field="exposure.network_id",
                resource=exposure.exposure_id,
                hint="delete it first",
            )
        if old.wanted is Wanted.REMOVED:
            raise StaleGeneration(
                f"generation {old.generation} is being deleted", resource=exposure.exposure_id
            )
        if old.generation == generation and old.exposure != exposure:
            raise Conflict(
                f"generation {generation} is known with another content",
                resource=exposure.exposure_id,
                hint="a change needs a newer generation",
            )

    def _draining(self, exposure: Exposure, old: ExposureRow | None) -> list[Drain]:
        """Return the targets that drain: those taken out now, and those that still did."""
        if old is None:
            return []
        known = {drain.nic_id: drain for drain in old.draining}
        end_s = self._keeper.clock.monotonic() + exposure.drain_s
        for nic_id in old.exposure.targets:
            nic = self._parts.nic_due(nic_id)
            if nic is not None and nic_id not in exposure.targets:
                addresses = list(nic.addresses)
                known[nic_id] = Drain(
                    nic_id=nic_id, addresses=addresses, boot_id=self._parts.boot_id, end_s=end_s
                )
        return [drain for nic_id, drain in known.items() if nic_id not in exposure.targets]

    def _sweeps(
        self, row: ExposureRow, old: ExposureRow | None, existing: Existing
    ) -> list[Footprint]:
        """Return what is to be looked at once the rules stand."""
        drop = existing is Existing.DROP
        found = list(old.sweeps) if old is not None else []
        if old is not None and (drop or old.exposure.protocol is IpProtocol.UDP):
            found.append(self._footprint(old, Existing.DROP if drop else Existing.KEEP))
        if row.exposure.protocol is IpProtocol.UDP:
            found.append(self._footprint(row, Existing.KEEP))
        unique = [each for index, each in enumerate(found) if each not in found[:index]]
        if len(unique) > SWEEPS_MAX:
            raise FailedPrecondition(
                f"{len(unique)} changes of the exposure wait for its network",
                resource=row.exposure.exposure_id,
                hint="the network's state says what holds them up",
            )
        return unique

    def _footprint(self, row: ExposureRow, existing: Existing) -> Footprint:
        network = self._records.networks[row.exposure.network_id]
        exposure = row.exposure
        return Footprint(
            protocol=exposure.protocol,
            addresses=list(policy.inner_addresses(row, self._parts.uplinks(network))),
            host_addresses=list(row.host_addresses),
            first=exposure.port,
            last=exposure.port_end or exposure.port,
            drop=existing is Existing.DROP,
        )

    async def _own_addresses(self, exposure: Exposure, network: Network) -> frozenset[str]:
        """Return which of its addresses are the node's, those that only we use left out."""
        asked = [
            text for text in exposure.addresses if text not in network.topology.public_addresses
        ]
        if all(map(own_addresses.is_here, asked)):
            found = frozenset(asked)  # no need to list a host's thousand others
        else:
            view = await self._keeper.host.view()
            found = frozenset(text.partition("/")[0] for text in view.addresses)
        settings = self._parts.settings
        pools = [ip_network(text) for text in (settings.uplink_pool, settings.uplink_pool6)]
        return frozenset(
            text
            for text in found
            if not any(ip_address(text) in pool for pool in pools)
            and not (ip_address(text).is_loopback or ip_address(text).is_link_local)
        )

    def _due_network(self, network_id: str) -> Network:
        network = self._records.networks.get(network_id)
        if network is None:
            raise NotFound(
                "there is no such network", resource=network_id, field="exposure.network_id"
            )
        if not self._parts.is_due(network):
            raise FailedPrecondition(
                "the network is absent", resource=network_id, hint="ensure it first"
            )
        return network

    # --- describing
    def infos(self) -> list[ExposureInfo]:
        """Describe every exposure."""
        return [self.info(exposure_id) for exposure_id in sorted(self._records.exposures)]

    def info(self, exposure_id: str) -> ExposureInfo:
        """Describe an exposure."""
        row = self._records.exposures.get(exposure_id)
        if row is None:
            raise NotFound("there is no such exposure", resource=exposure_id)
        status, message = self._status(row)
        targets = [self._target(row, nic_id) for nic_id in row.exposure.targets]
        return ExposureInfo(
            exposure_id=exposure_id,
            generation=row.generation,
            network_id=row.exposure.network_id,
            targets=[*targets, *(_drained(drain) for drain in row.draining)],
            status=status,
            message=message,
        )

    def _status(self, row: ExposureRow) -> tuple[str, str]:
        network_id = row.exposure.network_id
        if not self._parts.is_due(self._records.networks[network_id]):
            return ABSENT, "the network is absent"
        if row.wanted is Wanted.REMOVED:
            return "degraded", "it is being deleted"
        problem = self._keeper.problems.get(network_id)
        if problem is not None:
            return "degraded", problem
        lost = node_addresses.lost(row, self._keeper.host.addresses)
        if lost:
            return "degraded", lost
        if not any(self._takes_new(row, nic_id) for nic_id in row.exposure.targets):
            return "degraded", "no target takes connections: they are refused"
        return "ready", ""

    def _takes_new(self, row: ExposureRow, nic_id: str) -> bool:
        nic = self._records.nics.get(nic_id)
        return nic is not None and self._parts.is_due(nic) and policy.takes_new(row, nic_id)

    def _target(self, row: ExposureRow, nic_id: str) -> TargetInfo:
        nic = self._records.nics.get(nic_id)
        if nic is None or not self._parts.is_due(nic):
            return TargetInfo(nic_id=nic_id, state=ABSENT, message="the NIC is not attached")
        address = policy.checked_address(row.exposure, nic)
        if row.exposure.health.protocol is HealthProtocol.NONE:
            return TargetInfo(nic_id=nic_id, address=address, message="not checked")
        health = row.health.get(nic_id)
        if health is None:
            return TargetInfo(nic_id=nic_id, address=address, message="being checked")
        return TargetInfo(
            nic_id=nic_id,
            address=address,
            state=HEALTHY if health.healthy else UNHEALTHY,
            since=health.since,
            message=health.message,
        )


def _drained(drain: Drain) -> TargetInfo:
    return TargetInfo(nic_id=drain.nic_id, address=drain.addresses[0], state=DRAINING)


def _kept_health(exposure: Exposure, old: ExposureRow | None) -> dict[str, Health]:
    """Return what is known of targets that stay, unless they are asked something else now."""
    if old is None or exposure.health.protocol is not old.exposure.health.protocol:
        return {}
    return {uid: each for uid, each in old.health.items() if uid in exposure.targets}


def _ending(row: ExposureRow, old: ExposureRow | None, existing: Existing) -> Existing:
    """Return what becomes of connections: none ends by a change that takes in all that it did."""
    return Existing.KEEP if old is not None and _takes_all_of(row, old) else existing


def _takes_all_of(row: ExposureRow, old: ExposureRow) -> bool:
    """Targets that are taken out are no matter of this: they drain."""
    new, before = row.exposure, old.exposure
    return (
        new.protocol is before.protocol
        and set(before.addresses) <= set(new.addresses)
        and set(old.host_addresses) <= set(row.host_addresses)
        and new.port <= before.port
        and (before.port_end or before.port) <= (new.port_end or new.port)
        and set(before.sources) <= set(new.sources)
        and set(before.targets) <= set(new.targets)
    )
