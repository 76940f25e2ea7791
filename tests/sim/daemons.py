"""A stateful fake of nwd that speaks its wire methods, and how both daemons are called.

They keep the daemons' rules (idempotent by generation, exclusive, refuse what is in use) and
report to `State.violate` what no correct agent would ever ask for.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from chv.common.errors import (
    FailedPrecondition,
    InUse,
    InvalidArgument,
    NotFound,
    StaleGeneration,
    Unavailable,
)
from chv.common.rpc import Method
from chv.common.wire import nwd
from chv.common.wire.types import Done
from tests.sim.chaos import Chaos
from tests.sim.policy import SimExposure, SimGroup, SimPolicy
from tests.sim.stord import SimStord, Violate

__all__ = ["SimCaller", "SimNic", "SimNwd", "SimStord"]


@dataclass
class SimNic:
    """A NIC with its tap."""

    generation: int
    vm_id: str
    network_id: str
    mac: str
    address: str
    hostname: str
    tap_lost: bool = False  # deleted and made again while a VMM had it open
    absent: bool = False  # since a boot of the host
    groups: list[str] = field(default_factory=list)
    metadata: nwd.VmMetadata | None = None
    last: nwd.AttachVmNic | None = None  # as it was asked for last


@dataclass
class SimNetwork:
    """A network in its namespace."""

    generation: int
    topology: nwd.Topology
    absent: bool = False


class SimNwd(SimPolicy):
    """nwd with its namespaces."""

    def __init__(self, violate: Violate) -> None:
        self.violate = violate
        self.networks: dict[str, SimNetwork] = {}
        self.nics: dict[str, SimNic] = {}
        self.groups: dict[str, SimGroup] = {}
        self.exposures: dict[str, SimExposure] = {}
        self.down_until = 0.0
        self.vmm_alive: Callable[[str], bool] = lambda vm: False
        self.guest_has: Callable[[str, str], bool] = lambda vm, nic: False
        self.operation_known: Callable[[str], bool] = lambda operation: True
        self._macs = 0

    def handle(self, method: Method[Any, Any], params: Any) -> Any:
        """Answer one call."""
        if hasattr(params, "meta") and not self.operation_known(params.meta.operation_id):
            self.violate(f"I7: {method.name} under an operation that is not recorded")
        return getattr(self, f"_{method.name}")(params)

    def reboot(self) -> None:
        """Nothing of it is in the kernel any more; the records say what there was."""
        for network in self.networks.values():
            network.absent = True
        for nic in self.nics.values():
            nic.absent = True

    def _ListNamespaceState(self, _: Any) -> nwd.ListNetworksReply:
        return nwd.ListNetworksReply(networks=[self._network(uid) for uid in self.networks])

    def _ListVmNics(self, _: Any) -> nwd.ListNicsReply:
        return nwd.ListNicsReply(nics=[self._nic(uid) for uid in self.nics])

    def _CheckNetworkTopology(self, params: nwd.CheckNetworkTopology) -> Done:
        uplink = ipaddress.IPv4Network("192.0.2.0/24")
        if ipaddress.IPv4Network(params.topology.subnet).overlaps(uplink):
            raise InvalidArgument(
                f"{params.topology.subnet} overlaps with the uplink {uplink}", field="spec.subnet"
            )
        return Done()

    def _EnsureNetworkTopology(self, params: nwd.EnsureNetworkTopology) -> nwd.NetworkInfo:
        uid, generation = params.topology.network_id, params.meta.generation
        known = self.networks.get(uid)
        if known is not None and generation < known.generation:
            raise StaleGeneration(f"{generation} < {known.generation}")
        self.networks[uid] = SimNetwork(generation, params.topology)
        return self._network(uid)

    def _DeleteNetworkTopology(self, params: nwd.NetworkRef) -> Done:
        if params.network_id not in self.networks:
            raise NotFound("no such network")
        nics = [uid for uid, nic in self.nics.items() if nic.network_id == params.network_id]
        if nics:
            raise InUse(f"it has NICs {nics}")
        exposed = [e.exposure.name for e in self.exposures.values()
                   if e.exposure.network_id == params.network_id]  # fmt: skip
        if exposed:
            raise InUse(f"it has exposures {exposed}")
        del self.networks[params.network_id]
        return Done()

    def _AttachVmNic(self, params: nwd.AttachVmNic) -> nwd.NicInfo:
        if params.network_id not in self.networks:
            raise NotFound("no such network")
        if self.networks[params.network_id].absent:
            raise FailedPrecondition("the network is absent")
        unknown = set(params.security_groups) - self.groups.keys()
        if unknown:
            raise NotFound(f"no such groups: {unknown}")
        known = self.nics.get(params.nic_id)
        if known is not None and params.meta.generation < known.generation:
            raise StaleGeneration(f"{params.meta.generation} < {known.generation}")
        if known is None:
            self._macs += 1
            known = SimNic(
                0,
                params.vm_id,
                params.network_id,
                params.mac or f"52:54:00:00:{self._macs >> 8:02x}:{self._macs & 255:02x}",
                params.address or f"10.9.{self._macs + 1 >> 8}.{self._macs + 1 & 255}",
                params.hostname,
            )
            self.nics[params.nic_id] = known
        if known.generation == params.meta.generation:
            told = (known.groups, known.metadata)
            if told != (params.security_groups, params.metadata):
                self.violate(f"NIC {params.nic_id}: one generation with two contents")
        known.generation, known.absent = params.meta.generation, False
        known.groups, known.metadata = params.security_groups, params.metadata
        known.last = params
        return self._nic(params.nic_id)

    def _DetachVmNic(self, params: nwd.NicRef) -> Done:
        nic = self.nics.get(params.nic_id)
        if nic is None:
            raise NotFound("no such NIC")
        if params.meta.generation < nic.generation:
            raise StaleGeneration(f"{params.meta.generation} < {nic.generation}")
        if self.guest_has(nic.vm_id, params.nic_id):
            self.violate(f"NIC {params.nic_id} detached while the VMM has it")
        del self.nics[params.nic_id]
        return Done()

    def _network(self, uid: str) -> nwd.NetworkInfo:
        known = self.networks[uid]
        return nwd.NetworkInfo(
            network_id=uid,
            generation=known.generation,
            netns=f"sim-{uid[:8]}",
            subnet=known.topology.subnet,
            gateway="10.9.0.1",
            status="absent" if known.absent else "ready",
            nics=sum(nic.network_id == uid for nic in self.nics.values()),
        )

    def _nic(self, uid: str) -> nwd.NicInfo:
        nic = self.nics[uid]
        return nwd.NicInfo(
            nic_id=uid,
            vm_id=nic.vm_id,
            network_id=nic.network_id,
            generation=nic.generation,
            tap=f"tap{uid[:6]}",
            netns=f"sim-{nic.network_id[:8]}",
            mac=nic.mac,
            address=nic.address,
            prefix_length=24,
            gateway="10.9.0.1",
            mtu=1450,
            hostname=nic.hostname,
            security_groups=nic.groups,
            state="absent" if nic.absent else "attached",
            carrier=self.guest_has(nic.vm_id, uid) and not nic.tap_lost,
        )


class SimCaller:
    """A daemon as one life of the agent calls it; checks both ways against the wire types."""

    def __init__(self, chaos: Chaos, life: int, name: str, daemon: SimStord | SimNwd) -> None:
        self._chaos = chaos
        self._life = life
        self._name = name
        self._daemon = daemon
        self.now: Callable[[], float] = lambda: 0.0

    async def call(self, method: Method[Any, Any], params: Any) -> Any:
        """Call with the wire's types, the daemon's outages and chaos."""
        wire = msgspec.json.decode(msgspec.json.encode(params), type=method.params)

        def effect() -> Any:
            if self.now() < self._daemon.down_until:
                raise Unavailable(f"sim: {self._name} is down")
            return self._daemon.handle(method, wire)

        name = f"{self._name}.{method.name}"
        return await self._chaos.seam(self._life, name, effect, mutating=method.mutating)
