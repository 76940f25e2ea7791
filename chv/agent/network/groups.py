"""One pass over a SecurityGroup: make it so in nwd, delete it once no VM is a member."""

from __future__ import annotations

from chv.agent.actors import Done, Outcome, Waiting
from chv.agent.conditions import condition
from chv.agent.network.common import phase_of_seen
from chv.agent.network.policy import (
    EXISTING,
    PolicyReconciler,
    deletion_generation,
    group_of,
    missing_peers,
    wanted_group,
)
from chv.agent.records import StoredObject
from chv.common.wire import nwd_policy as policy
from chv.common.wire.resources import SecurityGroupStatus
from chv.common.wire.types import CallMeta

FAILPOINTS = (
    "agent.group.set.before",
    "agent.group.set.recorded",
    "agent.group.set.after",
    "agent.group.delete.before",
    "agent.group.delete.after",
)
DEGRADED = Waiting(10.0)


class GroupReconciler(PolicyReconciler):
    """The reconciler of one security group."""

    name = "group"

    async def look_and_act(self, stored: StoredObject) -> Outcome:
        """Make one pass."""
        listed = (await self._context.groups.fresh()).groups
        seen = next((each for each in listed if each.group_id == self._uid), None)
        self._context.looked_at(self._uid)
        if stored.deleting:
            return await self._delete(stored, seen)
        there = frozenset(each.group_id for each in listed)
        wanted = wanted_group(self._context.ledger.tables, stored, there)

        async def send(meta: CallMeta) -> object:
            existing = EXISTING[group_of(stored).spec.existing]
            request = policy.SetSecurityGroup(meta=meta, group=wanted, existing=existing)
            return await self._context.nwd.call(policy.SET_GROUP, request)

        outcome = await self.bring(stored, wanted, seen, send)
        if outcome is not None or seen is None:
            return outcome or DEGRADED
        return await self._show(stored, seen, wanted)

    async def _show(
        self, stored: StoredObject, seen: policy.SecurityGroupInfo, wanted: policy.SecurityGroup
    ) -> Outcome:
        status = _status(stored, seen)
        if seen.status != "ready":
            await self.wait(f"degraded: {seen.message}")
            await self.show(stored, status, condition("Ready", False, "Degraded", seen.message))
            return DEGRADED
        if wanted != wanted_group(self._context.ledger.tables, stored):
            await self.wait("waits for groups that its rules name")
            await self.show(stored, status, condition("Ready", False, "PeersNotReady"))
            return Waiting(2.0)
        absent = missing_peers(self._context.ledger.tables, stored)
        message = f"there is no group {', '.join(absent)}: its rules allow less" if absent else ""
        evidence = f"rules: {len(wanted.rules)}, networks: {len(seen.networks)}"
        await self.show(stored, status, condition("Ready", True, "InKernel", message, evidence))
        await self.settle("ready")
        return Done()

    async def _delete(self, stored: StoredObject, seen: policy.SecurityGroupInfo | None) -> Outcome:
        nics = seen.members if seen is not None else 0
        held = await self.held(stored, _status(stored, seen), nics)
        if held is not None:
            return held
        if seen is not None:
            await self.drop(stored, deletion_generation(stored, seen), self._delete_call)
        return await self.finish()

    async def _delete_call(self, meta: CallMeta) -> object:
        request = policy.GroupRef(meta=meta, group_id=self._uid)
        return await self._context.nwd.call(policy.DELETE_GROUP, request)


def _status(stored: StoredObject, seen: policy.SecurityGroupInfo | None) -> SecurityGroupStatus:
    members = seen.members if seen is not None else 0
    return SecurityGroupStatus(phase=phase_of_seen(stored, seen), members=members)
