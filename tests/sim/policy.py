"""Groups and exposures of the simulated nwd: what they hold, and what no correct agent asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chv.common.errors import InUse, InvalidArgument, NotFound, StaleGeneration
from chv.common.wire import nwd_policy as policy
from chv.common.wire.types import Done, Empty

NODE_ADDRESSES = ("192.0.2.1", "192.0.2.7", "192.0.2.8", "2001:db8::7")

if TYPE_CHECKING:
    from tests.sim.daemons import SimNetwork, SimNic


@dataclass
class SimGroup:
    """A group as it was set last."""

    generation: int
    group: policy.SecurityGroup


@dataclass
class SimExposure:
    """An exposure as it was set last."""

    generation: int
    exposure: policy.Exposure


class SimPolicy:
    """The part of nwd that is about groups and exposures."""

    violate: Callable[[str], None]
    vmm_alive: Callable[[str], bool]
    groups: dict[str, SimGroup]
    exposures: dict[str, SimExposure]
    nics: dict[str, SimNic]
    networks: dict[str, SimNetwork]

    def _ListSecurityGroups(self, _: Empty) -> policy.SecurityGroupsReply:
        return policy.SecurityGroupsReply(groups=[self._group(uid) for uid in self.groups])

    def _SetSecurityGroup(self, params: policy.SetSecurityGroup) -> policy.SecurityGroupInfo:
        group, generation = params.group, params.meta.generation
        known = self.groups.get(group.group_id)
        if known is not None and generation < known.generation:
            raise StaleGeneration(f"{generation} < {known.generation}")
        if known is not None and generation == known.generation and group != known.group:
            self.violate(f"group {group.name}: generation {generation} with another content")
        unknown = self._peers(group) - self.groups.keys() - {group.group_id}
        if unknown:
            raise NotFound(f"no such groups: {unknown}")
        self.groups[group.group_id] = SimGroup(generation, group)
        return self._group(group.group_id)

    def _DeleteSecurityGroup(self, params: policy.GroupRef) -> Done:
        known = self.groups.get(params.group_id)
        if known is None:
            raise NotFound("no such group")
        if params.meta.generation < known.generation:
            raise StaleGeneration(f"{params.meta.generation} < {known.generation}")
        members = [uid for uid, nic in self.nics.items() if params.group_id in nic.groups]
        if members:
            raise InUse(f"its members are {members}")
        naming = [
            each.group.name
            for uid, each in self.groups.items()
            if uid != params.group_id and params.group_id in self._peers(each.group)
        ]
        if naming:
            raise InUse(f"it is named by {naming}")
        del self.groups[params.group_id]
        return Done()

    @staticmethod
    def _peers(group: policy.SecurityGroup) -> set[str]:
        return {uid for rule in group.rules for uid in rule.groups}

    def _group(self, uid: str) -> policy.SecurityGroupInfo:
        members = [nic for nic in self.nics.values() if uid in nic.groups]
        return policy.SecurityGroupInfo(
            group_id=uid,
            generation=self.groups[uid].generation,
            members=len(members),
            networks=sorted({nic.network_id for nic in members}),
        )

    def _ListExposures(self, _: Empty) -> policy.ExposuresReply:
        return policy.ExposuresReply(exposures=[self._exposure(uid) for uid in self.exposures])

    def _CheckExposure(self, params: policy.CheckExposure) -> Done:
        for index, text in enumerate(params.exposure.addresses):
            if text not in NODE_ADDRESSES:
                raise InvalidArgument(
                    f"{text} is not the node's", field=f"exposure.addresses[{index}]"
                )
        return Done()

    def _SetExposure(self, params: policy.SetExposure) -> policy.ExposureInfo:
        exposure, generation = params.exposure, params.meta.generation
        known = self.exposures.get(exposure.exposure_id)
        if known is not None and generation < known.generation:
            raise StaleGeneration(f"{generation} < {known.generation}")
        if known is not None and generation == known.generation and exposure != known.exposure:
            self.violate(f"exposure {exposure.name}: generation {generation} with another content")
        if exposure.network_id not in self.networks:
            raise NotFound("no such network")
        if known is not None and known.exposure.network_id != exposure.network_id:
            raise InvalidArgument("it is of another network")
        self.exposures[exposure.exposure_id] = SimExposure(generation, exposure)
        return self._exposure(exposure.exposure_id)

    def _DeleteExposure(self, params: policy.ExposureRef) -> Done:
        known = self.exposures.get(params.exposure_id)
        if known is None:
            raise NotFound("no such exposure")
        if params.meta.generation < known.generation:
            raise StaleGeneration(f"{params.meta.generation} < {known.generation}")
        del self.exposures[params.exposure_id]
        return Done()

    def _exposure(self, uid: str) -> policy.ExposureInfo:
        known = self.exposures[uid]
        return policy.ExposureInfo(
            exposure_id=uid,
            generation=known.generation,
            network_id=known.exposure.network_id,
            targets=[self._exposed(nic) for nic in known.exposure.targets],
        )

    def _exposed(self, nic_id: str) -> policy.TargetInfo:
        nic = self.nics.get(nic_id)
        if nic is None:
            return policy.TargetInfo(nic_id=nic_id, state="absent")
        state = "healthy" if self.vmm_alive(nic.vm_id) else "unhealthy"
        return policy.TargetInfo(nic_id=nic_id, address=nic.address, state=state)
