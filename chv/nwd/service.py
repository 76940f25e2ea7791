"""The methods of nwd's API: networks, NICs, census, health. No logic of its own."""

from __future__ import annotations

from chv.common import pages
from chv.common.errors import ChvError
from chv.common.rpc import CallContext, Server, WithFds
from chv.common.wire import nwd as wire
from chv.common.wire import nwd_policy
from chv.common.wire.types import (
    CENSUS,
    REAP_UNEXPLAINED,
    CensusReply,
    Done,
    Empty,
    Feature,
    ListPage,
    ReapUnexplained,
)
from chv.nwd import node_addresses, stats
from chv.nwd.census import census
from chv.nwd.events import Events, Shown
from chv.nwd.exposures import Exposures
from chv.nwd.groups import Groups
from chv.nwd.keeper import Keeper
from chv.nwd.networks import Networks
from chv.nwd.nics import Nics
from chv.nwd.probe import missing, probe
from chv.nwd.reaping import reap
from chv.nwd.watching import Watching

PROBLEMS_SHOWN_MAX = 256


class Service:
    """Handlers of the method table."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._parts = keeper.parts
        self._networks = Networks(keeper)
        self._nics = Nics(keeper)
        self._groups = Groups(keeper)
        self._exposures = Exposures(keeper)
        self.watching = Watching(keeper)
        self._features: list[Feature] = []
        self.events = Events(self._shown)
        keeper.locks.released = self.events.poke
        keeper.kernel.on_addresses = self.events.addresses_changed

    def register(self, server: Server) -> None:
        """Add every handler but Hello's."""
        server.add(CENSUS, self.census)
        server.add(REAP_UNEXPLAINED, self.reap)
        server.add(wire.ENSURE_NETWORK, self.ensure)
        server.add(wire.CHECK_NETWORK, self.check)
        server.add(wire.DELETE_NETWORK, self.delete)
        server.add(wire.ATTACH_NIC, self.attach)
        server.add(wire.DETACH_NIC, self.detach)
        server.add(wire.OPEN_NIC, self.open_nic)
        server.add(wire.OPEN_GUEST_CONNECTION, self.connect)
        server.add(wire.GET_NETWORK, self.get_network)
        server.add(wire.GET_NIC, self.get_nic)
        server.add(wire.LIST_NETWORKS, self.list_networks)
        server.add(wire.LIST_NICS, self.list_nics)
        server.add(wire.NWD_HEALTH, self.health)
        server.add(nwd_policy.SET_GROUP, self._groups.set)
        server.add(nwd_policy.DELETE_GROUP, self.delete_group)
        server.add(nwd_policy.LIST_GROUPS, self.list_groups)
        server.add(nwd_policy.SET_EXPOSURE, self._exposures.set)
        server.add(nwd_policy.DELETE_EXPOSURE, self.delete_exposure)
        server.add(nwd_policy.LIST_EXPOSURES, self.list_exposures)
        server.add(nwd_policy.CHECK_EXPOSURE, self.check_exposure)
        server.add(nwd_policy.WATCH_NETWORKS, self.watch)
        server.add(nwd_policy.NIC_STATS, self.nic_stats)
        self.watching.register(server)

    async def restore(self) -> None:
        """Re-read the world: what the kernel can, strays, then every network."""
        self._features = self._parts.features = await probe()
        await self._parts.provider.sweep()
        await self._parts.workers.end_strays()
        await self._keeper.resync()

    # --- networks
    async def ensure(self, request: wire.EnsureNetworkTopology) -> wire.NetworkInfo:
        """See the wire."""
        return await self._networks.ensure(request.topology, request.meta.generation)

    async def check(self, request: wire.CheckNetworkTopology) -> Done:
        """See the wire."""
        await self._networks.check(request.topology)
        return Done()

    async def delete(self, request: wire.NetworkRef) -> Done:
        """See the wire."""
        await self._networks.delete(request.network_id, request.meta.generation)
        return Done()

    async def get_network(self, request: wire.GetNetwork) -> wire.NetworkInfo:
        """See the wire."""
        return self._networks.info(request.network_id)

    async def list_networks(self, request: ListPage) -> wire.ListNetworksReply:
        """See the wire."""
        ids = sorted(self._parts.records.networks)
        found, after = pages.page(((uid, self._networks.info(uid)) for uid in ids), request.after)
        return wire.ListNetworksReply(networks=found, next=after)

    # --- NICs
    async def attach(self, request: wire.AttachVmNic) -> wire.NicInfo:
        """See the wire."""
        return await self._nics.attach(request)

    async def detach(self, request: wire.NicRef) -> Done:
        """See the wire."""
        await self._nics.detach(request.nic_id, request.meta.generation)
        return Done()

    async def open_nic(self, request: wire.OpenVmNic) -> WithFds[wire.NicInfo]:
        """See the wire."""
        info, fds = await self._nics.open(request.nic_id)
        return WithFds(info, fds)

    async def connect(self, request: wire.OpenGuestConnection) -> WithFds[wire.GuestConnection]:
        """See the wire."""
        reply, fd = await self._nics.connect(request.nic_id, request.port, request.timeout_s)
        return WithFds(reply, [fd])

    async def get_nic(self, request: wire.GetNic) -> wire.NicInfo:
        """See the wire."""
        return (await self._nics.seen([request.nic_id]))[0]

    async def list_nics(self, request: ListPage) -> wire.ListNicsReply:
        """See the wire."""
        ids = sorted(uid for uid in self._parts.records.nics if uid > request.after)
        seen = await self._nics.seen(ids)
        found, after = pages.page(((each.nic_id, each) for each in seen), request.after)
        return wire.ListNicsReply(nics=found, next=after)

    async def nic_stats(self, request: nwd_policy.GetNicStats) -> nwd_policy.NicStatsReply:
        """See the wire."""
        known = self._parts.records.nics
        asked = request.nic_ids or sorted(known)
        nics = [known[each] for each in asked if each in known]
        return nwd_policy.NicStatsReply(nics=await stats.statistics(self._parts, nics))

    # --- groups and exposures
    async def delete_group(self, request: nwd_policy.GroupRef) -> Done:
        """See the wire."""
        await self._groups.delete(request.group_id, request.meta.generation)
        return Done()

    async def list_groups(self, request: ListPage) -> nwd_policy.SecurityGroupsReply:
        """See the wire."""
        infos = ((each.group_id, each) for each in self._groups.infos())
        found, after = pages.page(infos, request.after)
        return nwd_policy.SecurityGroupsReply(groups=found, next=after)

    async def delete_exposure(self, request: nwd_policy.ExposureRef) -> Done:
        """See the wire."""
        meta = request.meta
        await self._exposures.delete(request.exposure_id, meta.generation, request.existing)
        return Done()

    async def list_exposures(self, request: ListPage) -> nwd_policy.ExposuresReply:
        """See the wire."""
        infos = ((each.exposure_id, each) for each in self._exposures.infos())
        found, after = pages.page(infos, request.after)
        return nwd_policy.ExposuresReply(exposures=found, next=after)

    async def check_exposure(self, request: nwd_policy.CheckExposure) -> Done:
        """See the wire."""
        return await node_addresses.check(self._keeper.host, self._parts.records, request)

    async def watch(self, _request: Empty, context: CallContext) -> Done:
        """See the wire. Ends when the caller is too slow; it then watches again."""
        with self.events.subscribe() as events:
            async for event in events:
                await context.emit(event)
        return Done()

    def _shown(self) -> Shown:
        """Return everything as it is listed."""
        networks = (self._networks.info(uid) for uid in self._parts.records.networks)
        return {
            **{("network", each.network_id): each for each in networks},
            **{("group", each.group_id): each for each in self._groups.infos()},
            **{("exposure", each.exposure_id): each for each in self._exposures.infos()},
        }

    # --- the daemon
    async def census(self, _request: Empty) -> CensusReply:
        """See the wire."""
        return CensusReply(items=await census(self._parts))

    async def reap(self, request: ReapUnexplained) -> Done:
        """See the wire."""
        return await reap(self._parts, request)

    async def health(self, _request: Empty) -> wire.NwdHealth:
        """See the wire."""
        lacking = missing(self._features)
        problems = [f"network {uid}: {text}" for uid, text in self._keeper.problems.items()]
        if lacking:
            problems.insert(0, f"this host lacks {', '.join(lacking)}")
        return wire.NwdHealth(
            status="degraded" if problems else "healthy",
            features=self._features,
            networks=len(self._parts.records.networks),
            nics=len(self._parts.records.nics),
            groups=len(self._parts.records.groups),
            exposures=len(self._parts.records.exposures),
            last_error=problems[0][:PROBLEMS_SHOWN_MAX] if problems else "",
            warnings=await self._warnings(),
        )

    async def _warnings(self) -> list[str]:
        try:
            found = [*await self._keeper.host.check(), *self._keeper.kernel.warnings()]
            return [*found, *await stats.warnings(self._parts)]
        except ChvError as error:
            return [f"the host cannot be checked: {error}"]
