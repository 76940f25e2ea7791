"""One pass over a Network: make it so in nwd, delete it once no VM refers to it."""

from __future__ import annotations

import msgspec

from chv.agent.actors import Again, Done, Gone, Outcome, Waiting
from chv.agent.cascade import finish_delete
from chv.agent.conditions import condition, merge
from chv.agent.records import StoredObject
from chv.agent.references import referrers
from chv.agent.simple import SimpleReconciler
from chv.common.errors import NotFound
from chv.common.failpoint import failpoint
from chv.common.wire import nwd
from chv.common.wire.resources import Condition, Network, NetworkStatus, UplinkModeSpec

FAILPOINTS = tuple(
    f"agent.network.{name}.{moment}"
    for name in ("ensure", "delete")
    for moment in ("before", "after")
)


class NetworkReconciler(SimpleReconciler):
    """The reconciler of one network."""

    async def look_and_act(self, stored: StoredObject) -> Outcome:
        """Make one pass."""
        listed = (await self._context.networks.fresh()).networks
        seen = next((each for each in listed if each.network_id == self._uid), None)
        self._context.looked_at(self._uid)
        if stored.deleting:
            return await self._delete(stored, seen)
        generation = stored.resource.metadata.generation
        if seen is None or seen.generation < generation or seen.status == "absent":
            return await self._ensure(stored)
        if seen.status != "ready":
            return await self._repair(stored, seen)
        await self._show(stored, seen, condition("Ready", True, "InKernel", evidence=seen.netns))
        await self.settle("ready")
        return Done()

    async def _ensure(self, stored: StoredObject) -> Outcome:
        await self.effect(stored, "ensure", lambda operation_id: self._call(stored, operation_id))
        return Again()

    async def _repair(self, stored: StoredObject, seen: nwd.NetworkInfo) -> Outcome:
        """Degraded: try once a resync, and say what is wrong meanwhile."""
        await self.effect(stored, "repair", lambda operation_id: self._call(stored, operation_id))
        again = (await self._context.networks.fresh()).networks
        now = next((each for each in again if each.network_id == self._uid), seen)
        if now.status == "ready":
            return Again()
        await self.wait(f"degraded: {now.message}")
        await self._show(stored, now, condition("Ready", False, "Degraded", now.message))
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
        holders = referrers(self._context.ledger.tables, stored.key)
        if holders or (seen is not None and seen.nics):
            names = (
                ", ".join(holder.title for holder in holders) or f"{seen.nics if seen else 0} NICs"
            )
            await self.wait(f"waits until {names} lets go of it")
            await self._show(
                stored, seen, condition("Ready", False, "Deleting", f"held by {names}")
            )
            return Waiting(10.0)
        if seen is not None:
            await self.effect(
                stored, "delete", lambda operation_id: self._drop(stored, operation_id)
            )
        await finish_delete(self._context, self._uid)
        return Gone()

    async def _drop(self, stored: StoredObject, operation_id: str) -> None:
        await failpoint("agent.network.delete.before")
        meta = self._context.meta(operation_id, stored.resource.metadata.generation)
        try:
            reference = nwd.NetworkRef(meta=meta, network_id=self._uid)
            await self._context.nwd.call(nwd.DELETE_NETWORK, reference)
        except NotFound:
            return
        await failpoint("agent.network.delete.after")

    async def show_error(self, stored: StoredObject, ready: Condition, *, permanent: bool) -> None:
        """Publish a status that shows the error."""
        before = _network(stored).status or NetworkStatus()
        phase = "Failed" if permanent else before.phase
        await self._publish(stored, msgspec.structs.replace(before, phase=phase), ready)

    async def _show(
        self, stored: StoredObject, seen: nwd.NetworkInfo | None, ready: Condition
    ) -> None:
        status = NetworkStatus(phase=_phase(stored, seen))
        if seen is not None:
            status = msgspec.structs.replace(
                status,
                netns=seen.netns,
                gateway=seen.gateway,
                domain=seen.dns_domain,
                nics=seen.nics,
            )
        await self._publish(stored, status, ready)

    async def _publish(self, stored: StoredObject, status: NetworkStatus, ready: Condition) -> None:
        generation = stored.resource.metadata.generation
        before = _network(stored).status
        earlier = before.conditions if before is not None else []
        conditions = merge(earlier, [ready], generation, self._context.now())
        shown = msgspec.structs.replace(
            status, observed_generation=generation, conditions=conditions
        )
        await self._context.publish(stored, shown)


def topology(network: Network) -> nwd.Topology:
    """Return the network as nwd wants it."""
    metadata, spec = network.metadata, network.spec
    modes = {UplinkModeSpec.NAT: nwd.UplinkMode.NAT, UplinkModeSpec.NONE: nwd.UplinkMode.NONE}
    return nwd.Topology(
        network_id=metadata.uid,
        name=metadata.name,
        tenant=metadata.namespace,
        subnet=spec.subnet,
        gateway=spec.gateway,
        mtu=spec.mtu,
        uplink=modes[spec.uplink],
        dns_domain=spec.dns.domain or f"{metadata.name}.{metadata.namespace}.internal",
        forwarders=spec.dns.forwarders,
    )


def _network(stored: StoredObject) -> Network:
    assert isinstance(stored.resource, Network)
    return stored.resource


def _phase(stored: StoredObject, seen: nwd.NetworkInfo | None) -> str:
    if stored.deleting:
        return "Deleting"
    if seen is None or seen.status == "absent":
        return "Pending"
    return "Ready" if seen.status == "ready" else "Degraded"
