"""Networks as calls see them: ensure, check, delete, describe. Records first, then the world.

Every mutation is by (network, generation): an older one is refused, an equal one with the same
content converges and answers again, a newer one does the work. The generation of a deleted
network is remembered, so that a late call cannot bring it back.
"""

from __future__ import annotations

import anyio
import msgspec

from chv.common.errors import Conflict, InUse, NotFound, StaleGeneration
from chv.common.failpoint import failpoint
from chv.common.wire.nwd import NetworkInfo, Topology
from chv.nwd.addresses import free_slot
from chv.nwd.blueprint import gateway6, has_uplink
from chv.nwd.keeper import DELETE, Keeper
from chv.nwd.records import Network, Wanted
from chv.nwd.topology import check_topology, refuse_overlap, refuse_taken_names
from chv.nwd.uses import refuse_orphans

ENSURE = "ensure"
SHOWN_NICS_MAX = 5


class Networks:
    """The networks of this node."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._parts = keeper.parts
        self._records = keeper.parts.records
        self._allocation = anyio.Lock()

    async def ensure(self, topology: Topology, generation: int) -> NetworkInfo:
        """Make a network so."""
        network_id = topology.network_id
        async with self._keeper.locks.hold(network_id):
            await self._finish_removal(network_id, generation)
            refuse_stale(
                network_id, generation, self._generation(network_id), self._records.tombstones
            )
            topology = await self._checked(topology)
            await self._record(topology, generation)
            await failpoint("nwd.ensure.recorded")
            self._parts.workers.forgive(network_id)
            await self._keeper.converge(network_id, ENSURE)
            return self.info(network_id)

    async def check(self, topology: Topology) -> None:
        """Raise what `ensure` would refuse."""
        self._refuse_conflicts(await self._checked(topology))

    async def delete(self, network_id: str, generation: int) -> None:
        """Leave nothing of a network; it must have no NIC."""
        async with self._keeper.locks.hold(network_id):
            row = self._records.networks.get(network_id)
            if row is None:
                await self._records.bury(network_id, generation)
                return
            refuse_stale(network_id, generation, row.generation, {})
            nics = [nic.nic_id for nic in self._records.nics_of(network_id)]
            if nics:
                raise InUse(
                    f"{len(nics)} NICs are attached: {', '.join(nics[:SHOWN_NICS_MAX])}",
                    resource=network_id,
                    hint="detach them first",
                )
            exposures = [
                each.exposure.exposure_id for each in self._records.exposures_of(network_id)
            ]
            if exposures:
                raise InUse(
                    f"{len(exposures)} exposures lead to it:"
                    f" {', '.join(exposures[:SHOWN_NICS_MAX])}",
                    resource=network_id,
                    hint="delete them first",
                )
            gone = msgspec.structs.replace(row, generation=generation, wanted=Wanted.REMOVED)
            await self._records.put_network(gone)
            await failpoint("nwd.delete.recorded")
            await self._keeper.converge(network_id, DELETE)

    def info(self, network_id: str) -> NetworkInfo:
        """Describe a network."""
        row = self.require(network_id)
        status, message = self._status(row)
        topology = row.topology
        uplink, uplink6 = (*self._parts.uplinks(row), "", "")[:2]
        return NetworkInfo(
            network_id=network_id,
            generation=row.generation,
            netns=self._parts.layout.netns(network_id),
            subnet=topology.subnet,
            gateway=topology.gateway,
            uplink_address=uplink,
            mtu=topology.mtu,
            dns_domain=topology.dns_domain,
            subnet6=topology.subnet6,
            gateway6=gateway6(topology),
            uplink_address6=uplink6,
            public_addresses=list(topology.public_addresses),
            l2=topology.l2.value,
            status=status,
            message=message,
            nics=len(self._records.nics_of(network_id)),
        )

    def require(self, network_id: str) -> Network:
        """Return the record of a network."""
        row = self._records.networks.get(network_id)
        if row is None:
            raise NotFound("there is no such network", resource=network_id)
        return row

    def _status(self, row: Network) -> tuple[str, str]:
        if row.wanted is Wanted.REMOVED:
            return "degraded", self._keeper.problems.get(row.network_id, "it is being deleted")
        if not self._parts.is_due(row):
            return "absent", "the host has booted since; ensure it again"
        problem = self._keeper.problems.get(row.network_id)
        if problem is not None:
            return "degraded", problem
        warnings = self._keeper.host.warnings if has_uplink(row) else []
        fight = self._keeper.kernel.fights(row.network_id)
        return "ready", "; ".join([*([fight] if fight else []), *warnings])

    def _generation(self, network_id: str) -> int:
        row = self._records.networks.get(network_id)
        return row.generation if row is not None else -1

    async def _finish_removal(self, network_id: str, generation: int) -> None:
        """A deletion that was cut short comes first; the tombstone then decides."""
        row = self._records.networks.get(network_id)
        if row is not None and row.wanted is Wanted.REMOVED and generation > row.generation:
            await self._keeper.converge(network_id, DELETE)

    async def _checked(self, topology: Topology) -> Topology:
        surroundings = await self._keeper.host.surroundings()
        return check_topology(topology, surroundings)

    async def _record(self, topology: Topology, generation: int) -> None:
        old = self._records.networks.get(topology.network_id)
        if old is not None and old.generation == generation:
            if old.wanted is Wanted.REMOVED:
                raise StaleGeneration(
                    f"generation {generation} is being deleted", resource=topology.network_id
                )
            if old.topology != topology:
                raise Conflict(
                    f"generation {generation} is known with another content",
                    resource=topology.network_id,
                    hint="a change needs a newer generation",
                )
        async with self._allocation:
            self._refuse_conflicts(topology)
            row = Network(
                topology=topology,
                generation=generation,
                boot_id=self._parts.boot_id,
                uplink_slot=await self._slot(topology.network_id, old),
            )
            if row != old:
                await self._records.put_network(row)

    async def _slot(self, network_id: str, old: Network | None) -> int:
        """Return the network's place in the uplink pool; kept for its life, used or not."""
        if old is not None and old.uplink_slot is not None:
            return old.uplink_slot
        view = await self._keeper.host.view()
        occupied = {text.partition("/")[0] for text in view.addresses}
        used = {
            row.uplink_slot
            for row in self._records.networks.values()
            if row.uplink_slot is not None
        }
        return free_slot(self._parts.settings.uplink_pool, network_id, used, occupied)

    def _refuse_conflicts(self, topology: Topology) -> None:
        """Raise what other networks and the NICs of this one stand against."""
        self._refuse_move(topology)
        network_id = topology.network_id
        rows = self._records.networks.values()
        refuse_overlap(topology, [r.topology for r in rows if r.network_id != network_id])
        nics = self._records.nics_of(network_id)
        refuse_taken_names(topology, {nic.hostname: nic.nic_id for nic in nics})
        old = self._records.networks.get(network_id)
        if old is not None:
            exposures = self._records.exposures_of(network_id)
            refuse_orphans(topology, old.topology, nics, exposures)

    def _refuse_move(self, topology: Topology) -> None:
        """Guests hold addresses of the subnet: it cannot change under them."""
        old = self._records.networks.get(topology.network_id)
        nics = self._records.nics_of(topology.network_id)
        if old is None or not nics:
            return
        before = (old.topology.subnet, old.topology.gateway)
        if before != (topology.subnet, topology.gateway):
            raise InUse(
                f"{len(nics)} NICs have addresses of {old.topology.subnet}",
                field="spec.subnet",
                resource=topology.network_id,
                hint="detach them before changing subnet or gateway",
            )
        holders = [nic for nic in nics if nic.address6]
        if holders and old.topology.subnet6 != topology.subnet6:
            raise InUse(
                f"{len(holders)} NICs have addresses of {old.topology.subnet6}",
                field="spec.subnet6",
                resource=topology.network_id,
                hint="detach them before changing subnet6",
            )


def refuse_stale(uid: str, generation: int, known: int, tombstones: dict[str, int]) -> None:
    """Raise StaleGeneration for a generation that is older than what is known, or deleted."""
    if generation < known:
        raise StaleGeneration(f"generation {generation} is older than {known}", resource=uid)
    buried = tombstones.get(uid, -1)
    if known < 0 and generation <= buried:
        raise StaleGeneration(
            f"generation {generation} is not newer than {buried}, which was deleted", resource=uid
        )
