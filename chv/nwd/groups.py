"""Security groups as calls see them: set, delete, list. Records first, then every network.

A group is recorded with the networks in which it does not stand yet; each takes it in one
transaction and is then crossed off. A network that fails stays on the list: the group is degraded
with the reason, and the resync of that network tries again. Generations work as for networks.
"""

from __future__ import annotations

import msgspec

from chv.common import logs
from chv.common.errors import (
    ChvError,
    Conflict,
    InUse,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    StaleGeneration,
)
from chv.common.failpoint import failpoint
from chv.common.wire.nwd_policy import SecurityGroup, SecurityGroupInfo, SetSecurityGroup
from chv.nwd.group_rules import check_rules, is_wider
from chv.nwd.keeper import Keeper
from chv.nwd.networks import refuse_stale
from chv.nwd.policy import peers_of
from chv.nwd.records import GroupRow, Wanted

log = logs.get(__name__)
SET, DELETE = "set_group", "delete_group"
GROUPS_MAX = 4096
SHOWN_MAX = 5


class Groups:
    """The security groups of this node."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._parts = keeper.parts
        self._records = keeper.parts.records

    async def set(self, request: SetSecurityGroup) -> SecurityGroupInfo:
        """Make a group so, everywhere."""
        group = request.group
        check_rules(group)
        async with self._keeper.locks.hold(group.group_id):
            async with self._parts.registry:
                await self._record(request)
            await failpoint(f"nwd.{SET}.recorded")
            for network_id in self._records.groups[group.group_id].pending:
                await self._apply(group.group_id, network_id)
            return self.info(group.group_id)

    async def delete(self, group_id: str, generation: int) -> None:
        """Forget a group that nothing names."""
        async with self._keeper.locks.hold(group_id), self._parts.registry:
            row = self._records.groups.get(group_id)
            if row is None:
                await self._records.bury(group_id, generation)
                return
            refuse_stale(group_id, generation, row.generation, {})
            self._refuse_used(group_id)
            await failpoint(f"nwd.{DELETE}.before_drop")
            await self._records.drop_group(msgspec.structs.replace(row, generation=generation))
            await failpoint(f"nwd.{DELETE}.dropped")

    def infos(self) -> list[SecurityGroupInfo]:
        """Describe every group."""
        return [self.info(group_id) for group_id in sorted(self._records.groups)]

    def info(self, group_id: str) -> SecurityGroupInfo:
        """Describe a group."""
        row = self._records.groups.get(group_id)
        if row is None:
            raise NotFound("there is no such security group", resource=group_id)
        members = self._members(group_id)
        status, message = self._status(row)
        return SecurityGroupInfo(
            group_id=group_id,
            generation=row.generation,
            members=sum(members.values()),
            networks=sorted(members),
            status=status,
            message=message,
        )

    def _status(self, row: GroupRow) -> tuple[str, str]:
        due = [uid for uid in row.pending if self._is_due(uid)]
        if not due:
            return "ready", ""
        reasons = [
            f"network {uid}: {self._keeper.problems.get(uid, 'the rules do not stand yet')}"
            for uid in due[:SHOWN_MAX]
        ]
        return "degraded", "; ".join(reasons)

    def _is_due(self, network_id: str) -> bool:
        network = self._records.networks.get(network_id)
        return network is not None and self._parts.is_due(network)

    def _members(self, group_id: str) -> dict[str, int]:
        """Return how many NICs are in it, of each network that has any."""
        found = {
            uid: self._records.members(uid).groups.get(group_id, 0)
            for uid in self._records.networks
        }
        return {uid: count for uid, count in found.items() if count}

    # --- recording; the registry is held
    async def _record(self, request: SetSecurityGroup) -> None:
        group, generation = request.group, request.meta.generation
        old = self._records.groups.get(group.group_id)
        known = old.generation if old is not None else -1
        refuse_stale(group.group_id, generation, known, self._records.tombstones)
        self._refuse_change(group, generation, old)
        self._check_peers(group)
        if old is not None and old.generation == generation:
            return  # what is pending of it is done now
        row = GroupRow(
            group=group,
            generation=generation,
            existing=request.existing,
            pending=self._networks(group.group_id),
            narrowed=_narrows(old, group),
        )
        await self._records.put_group(row)

    def _refuse_change(self, group: SecurityGroup, generation: int, old: GroupRow | None) -> None:
        if old is None:
            if len(self._records.groups) >= GROUPS_MAX:
                raise ResourceExhausted(f"there are {GROUPS_MAX} security groups on this node")
            return
        if old.wanted is Wanted.REMOVED:
            raise StaleGeneration(
                f"generation {old.generation} is being deleted", resource=group.group_id
            )
        if old.group.tenant != group.tenant:
            raise PermissionDenied(
                f"the group belongs to tenant {old.group.tenant!r}",
                field="group.tenant",
                resource=group.group_id,
            )
        if old.generation == generation and old.group != group:
            raise Conflict(
                f"generation {generation} is known with another content",
                resource=group.group_id,
                hint="a change needs a newer generation",
            )

    def _check_peers(self, group: SecurityGroup) -> None:
        """The groups that it names are there, and of the same tenant."""
        for index, rule in enumerate(group.rules):
            for place, peer in enumerate(rule.groups):
                if peer == group.group_id:
                    continue
                field, row = f"group.rules[{index}].groups[{place}]", self._records.groups.get(peer)
                if row is None or row.wanted is Wanted.REMOVED:
                    raise NotFound(f"there is no security group {peer}", field=field, resource=peer)
                if row.group.tenant != group.tenant:
                    raise PermissionDenied(
                        f"security group {peer} belongs to another tenant",
                        field=field,
                        resource=peer,
                    )

    def _networks(self, group_id: str) -> list[str]:
        """Return the networks that are due and have members of it or of a group that names it."""
        naming = {uid for uid, row in self._records.groups.items() if group_id in peers_of(row)} | {
            group_id
        }
        return sorted(
            uid
            for uid in self._records.networks
            if not naming.isdisjoint(self._records.members(uid).groups) and self._is_due(uid)
        )

    def _refuse_used(self, group_id: str) -> None:
        nics = sorted(
            nic.nic_id
            for uid in self._members(group_id)
            for nic in self._records.nics_of(uid)
            if group_id in nic.groups
        )
        if nics:
            raise InUse(
                f"{len(nics)} NICs are members: {', '.join(nics[:SHOWN_MAX])}",
                resource=group_id,
                hint="take it from them, or detach them, first",
            )
        naming = sorted(
            uid
            for uid, row in self._records.groups.items()
            if uid != group_id and group_id in peers_of(row)
        )
        if naming:
            raise InUse(
                f"{len(naming)} security groups name it: {', '.join(naming[:SHOWN_MAX])}",
                resource=group_id,
                hint="change their rules first",
            )

    # --- applying
    async def _apply(self, group_id: str, network_id: str) -> None:
        """Bring it to one network; what fails there is told by the group's status."""
        async with self._keeper.locks.hold(network_id):
            try:
                await self._keeper.converge_rules(network_id, SET)
            except (ChvError, OSError) as error:
                log.warning(
                    "group_not_applied", group_id=group_id, network_id=network_id, error=error
                )


def _narrows(old: GroupRow | None, group: SecurityGroup) -> bool:
    """Tell whether a change may disallow what stands, or one before it that is not done yet."""
    if old is None:
        return True
    return bool(old.pending and old.narrowed) or not is_wider(group, old.group)
