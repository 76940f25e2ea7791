"""One pass over a Network: make it so in nwd, delete it once nobody refers to it."""

from __future__ import annotations

import msgspec

from chv.agent.actors import Again, Done, Outcome, Waiting
from chv.agent.conditions import condition
from chv.agent.network.common import NwdReconciler, phase_of_seen
from chv.agent.records import StoredObject
from chv.common.failpoint import failpoint
from chv.common.wire import nwd
from chv.common.wire.resources import L2ModeSpec, Network, NetworkStatus, UplinkModeSpec
from chv.common.wire.types import CallMeta

FAILPOINTS = tuple(
    f"agent.network.{name}.{moment}"
    for name in ("ensure", "delete")
    for moment in ("before", "after")
)
UPLINKS = {
    UplinkModeSpec.NAT: nwd.UplinkMode.NAT,
    UplinkModeSpec.ROUTED: nwd.UplinkMode.ROUTED,
    UplinkModeSpec.NONE: nwd.UplinkMode.NONE,
}
L2_MODES = {L2ModeSpec.ISOLATED: nwd.L2Mode.ISOLATED, L2ModeSpec.OPEN: nwd.L2Mode.OPEN}


class NetworkReconciler(NwdReconciler):
    """The reconciler of one network."""

    name = "network"

    async def look_and_act(self, stored: StoredObject) -> Outcome:
        """Make one pass."""
        seen = await self._seen()
        self._context.looked_at(self._uid)
        if stored.deleting:
            return await self._delete(stored, seen)
        generation = stored.resource.metadata.generation
        if seen is None or seen.generation < generation or seen.status == "absent":
            return await self._ensure(stored)
        if seen.status != "ready":
            return await self._repair(stored, seen)
        ready = condition("Ready", True, "InKernel", seen.message, evidence=seen.netns)
        await self.show(stored, _status(stored, seen), ready)
        await self.settle("ready")
        return Done()

    async def _seen(self) -> nwd.NetworkInfo | None:
        listed = (await self._context.networks.fresh()).networks
        return next((each for each in listed if each.network_id == self._uid), None)

    async def _ensure(self, stored: StoredObject) -> Outcome:
        await self.effect(stored, "ensure", lambda operation_id: self._call(stored, operation_id))
        return Again()

    async def _repair(self, stored: StoredObject, seen: nwd.NetworkInfo) -> Outcome:
        """Degraded: try once a resync, and say what is wrong meanwhile."""
        await self.effect(stored, "repair", lambda operation_id: self._call(stored, operation_id))
        now = await self._seen() or seen
        if now.status == "ready":
            return Again()
        await self.wait(f"degraded: {now.message}")
        ready = condition("Ready", False, "Degraded", now.message)
        await self.show(stored, _status(stored, now), ready)
        return Waiting(10.0)

    async def _call(self, stored: StoredObject, operation_id: str) -> None:
        await failpoint("agent.network.ensure.before")
        generation = stored.resource.metadata.generation
        request = nwd.EnsureNetworkTopology(
            meta=self._context.meta(operation_id, generation), topology=topology(_network(stored))
        )
        await self._context.nwd.call(nwd.ENSURE_NETWORK, request)
        await failpoint("agent.network.ensure.after")

    async def _delete(self, stored: StoredObject, seen: nwd.NetworkInfo | None) -> Outcome:
        nics = seen.nics if seen is not None else 0
        held = await self.held(stored, _status(stored, seen), nics)
        if held is not None:
            return held
        if seen is not None:
            generation = stored.resource.metadata.generation
            await self.drop(stored, generation, self._delete_call)
        return await self.finish()

    async def _delete_call(self, meta: CallMeta) -> object:
        request = nwd.NetworkRef(meta=meta, network_id=self._uid)
        return await self._context.nwd.call(nwd.DELETE_NETWORK, request)


def topology(network: Network) -> nwd.Topology:
    """Return the network as nwd wants it."""
    metadata, spec = network.metadata, network.spec
    return nwd.Topology(
        network_id=metadata.uid,
        name=metadata.name,
        tenant=metadata.namespace,
        subnet=spec.subnet,
        gateway=spec.gateway,
        subnet6=spec.subnet6,
        mtu=spec.mtu,
        l2=L2_MODES[spec.l2],
        uplink=UPLINKS[spec.uplink],
        public_addresses=spec.public_addresses,
        metadata=spec.metadata,
        dns_domain=spec.dns.domain or f"{metadata.name}.{metadata.namespace}.internal",
        forwarders=spec.dns.forwarders,
        search=spec.dns.search,
        records=[
            nwd.DnsRecord(name=record.name, addresses=record.addresses)
            for record in spec.dns.records
        ],
    )


def _network(stored: StoredObject) -> Network:
    assert isinstance(stored.resource, Network)
    return stored.resource


def _status(stored: StoredObject, seen: nwd.NetworkInfo | None) -> NetworkStatus:
    status = NetworkStatus(phase=phase_of_seen(stored, seen))
    if seen is None:
        return status
    return msgspec.structs.replace(
        status,
        netns=seen.netns,
        gateway=seen.gateway,
        gateway6=seen.gateway6,
        domain=seen.dns_domain,
        nics=seen.nics,
    )
