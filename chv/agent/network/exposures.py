"""One pass over an Exposure: make it so in nwd, show how its targets are, withdraw it.

Targets change their state without anybody's doing: nwd is asked now and then, and the one answer
serves all exposures.
"""

from __future__ import annotations

from contextlib import suppress

from chv.agent.actors import Done, Outcome, Waiting
from chv.agent.conditions import condition
from chv.agent.network.common import phase_of_seen
from chv.agent.network.policy import (
    EXISTING,
    PolicyReconciler,
    deletion_generation,
    exposure_of,
    target_nics,
    wanted_exposure,
)
from chv.agent.records import StoredObject
from chv.agent.vm.observe import SILENT
from chv.common.wire import nwd_policy as policy
from chv.common.wire.network_resources import HealthCheckProtocol
from chv.common.wire.resources import ExposureStatus, ExposureTargetStatus
from chv.common.wire.types import CallMeta

FAILPOINTS = (
    "agent.exposure.set.before",
    "agent.exposure.set.recorded",
    "agent.exposure.set.after",
    "agent.exposure.delete.before",
    "agent.exposure.delete.after",
)
DEGRADED = Waiting(10.0)
NO_NETWORK = Waiting(10.0)


class ExposureReconciler(PolicyReconciler):
    """The reconciler of one exposure."""

    name = "exposure"
    _seen: policy.ExposureInfo | None = None  # as of the last pass

    @property
    def monitored(self) -> bool:
        """Its targets may come and go while nothing is wanted anew."""
        return self._seen is not None

    async def glance(self) -> bool:
        """Ask nwd alone; True where its answer differs from the last. Silence says nothing."""
        with suppress(*SILENT):
            return await self._look() != self._seen
        return False

    async def _look(self) -> policy.ExposureInfo | None:
        listed = (await self._context.exposures.fresh()).exposures
        return next((each for each in listed if each.exposure_id == self._uid), None)

    async def look_and_act(self, stored: StoredObject) -> Outcome:
        """Make one pass."""
        seen = self._seen = await self._look()
        self._context.looked_at(self._uid)
        if stored.deleting:
            return await self._delete(stored, seen)
        wanted = wanted_exposure(self._context.ledger.tables, stored)
        if wanted is None or not await self._network_is_ready(wanted.network_id):
            return await self._without_network(stored, seen)

        async def send(meta: CallMeta) -> object:
            existing = EXISTING[exposure_of(stored).spec.existing]
            request = policy.SetExposure(meta=meta, exposure=wanted, existing=existing)
            return await self._context.nwd.call(policy.SET_EXPOSURE, request)

        outcome = await self.bring(stored, wanted, seen, send)
        if outcome is not None or seen is None:
            return outcome or DEGRADED
        return await self._show(stored, seen)

    async def _network_is_ready(self, network_id: str) -> bool:
        """Tell whether nwd has the network, in the form that the store has."""
        stored = self._context.stored(network_id)
        listed = (await self._context.networks.fresh()).networks
        seen = next((each for each in listed if each.network_id == network_id), None)
        if stored is None or seen is None or seen.status == "absent":
            return False
        return seen.generation >= stored.resource.metadata.generation

    async def _without_network(
        self, stored: StoredObject, seen: policy.ExposureInfo | None
    ) -> Outcome:
        message = f"network {exposure_of(stored).spec.network} is not ready"
        await self.wait(message)
        await self.show(
            stored, self._status(stored, seen), condition("Ready", False, "NoNetwork", message)
        )
        return NO_NETWORK

    async def _show(self, stored: StoredObject, seen: policy.ExposureInfo) -> Outcome:
        status = self._status(stored, seen)
        taking, words = _taking(stored, status)
        evidence = f"{taking} of {len(status.targets)} targets {words}"
        if seen.status == "ready":
            await self.show(stored, status, condition("Ready", True, "InKernel", evidence=evidence))
            await self.settle("ready")
            return Done()
        reason = "Degraded" if taking else "NoHealthyTarget"
        await self.show(stored, status, condition("Ready", False, reason, seen.message, evidence))
        if reason == "Degraded":
            await self.wait(f"degraded: {seen.message}")
            return DEGRADED
        # It stands; that its targets answer, or that they boot, is not what was asked of us.
        await self.settle(seen.message)
        return Done()

    async def _delete(self, stored: StoredObject, seen: policy.ExposureInfo | None) -> Outcome:
        if seen is not None:
            existing = EXISTING[exposure_of(stored).spec.existing]

            async def withdraw(meta: CallMeta) -> object:
                request = policy.ExposureRef(meta=meta, exposure_id=self._uid, existing=existing)
                return await self._context.nwd.call(policy.DELETE_EXPOSURE, request)

            await self.drop(stored, deletion_generation(stored, seen), withdraw)
        return await self.finish()

    def _status(self, stored: StoredObject, seen: policy.ExposureInfo | None) -> ExposureStatus:
        known = {each.nic_id: each for each in seen.targets} if seen is not None else {}
        targets = [
            _target(target.virtual_machine, nic, known.get(nic))
            for target, nic in target_nics(self._context.ledger.tables, stored)
        ]
        return ExposureStatus(phase=phase_of_seen(stored, seen), targets=targets)


def _target(vm: str, nic: str, seen: policy.TargetInfo | None) -> ExposureTargetStatus:
    if not nic:
        return ExposureTargetStatus(virtual_machine=vm, state="absent", message="no such NIC")
    if seen is None:
        return ExposureTargetStatus(virtual_machine=vm)
    return ExposureTargetStatus(
        virtual_machine=vm,
        address=seen.address,
        state=seen.state,
        since=seen.since,
        message=seen.message,
    )


def _taking(stored: StoredObject, status: ExposureStatus) -> tuple[int, str]:
    """Return how many targets get connections, and what they are: unchecked ones all do."""
    if exposure_of(stored).spec.health_check.protocol is HealthCheckProtocol.NONE:
        taking = sum(each.state in ("unknown", "healthy") for each in status.targets)
        return taking, "attached, not checked"
    return sum(each.state == "healthy" for each in status.targets), "healthy"
