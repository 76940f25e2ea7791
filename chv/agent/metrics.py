"""The node's metrics: KubeVirt's names and units where there are some, `chv_*` else.

Everything is read from memory: the agent's tables, the supervisor's view of the daemons, the last
census and the last samples (`metrics_sample`). What is not known is absent, never 0.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from chv import VERSION
from chv.agent.census import Census
from chv.agent.context import phase_of
from chv.agent.daemons import Daemons
from chv.agent.engine import Engine
from chv.agent.metrics_sample import Sampler
from chv.agent.metrics_storage import storage_families
from chv.agent.metrics_text import Family, render
from chv.agent.node import Node, NodeState
from chv.agent.resources.commitment import Budget
from chv.agent.resources.room import commitment
from chv.common.config import Config
from chv.common.quantity import parse_bytes
from chv.common.wire.nwd_policy import NicStats
from chv.common.wire.resources import PHASES, ConditionStatus, VirtualMachine

# KubeVirt's name, the field of NicStats, what it says. Both count as the guest sees it.
NIC_METRICS = (
    ("kubevirt_vmi_network_receive_bytes_total", "rx_bytes", "Bytes received."),
    ("kubevirt_vmi_network_receive_packets_total", "rx_packets", "Packets received."),
    ("kubevirt_vmi_network_receive_packets_dropped_total", "rx_dropped", "Not delivered."),
    ("kubevirt_vmi_network_transmit_bytes_total", "tx_bytes", "Bytes sent."),
    ("kubevirt_vmi_network_transmit_packets_total", "tx_packets", "Packets sent."),
    ("kubevirt_vmi_network_transmit_packets_dropped_total", "tx_dropped", "Sent, then dropped."),
)


@dataclass(frozen=True)
class Metrics:
    """What is looked at. `text` is one scrape."""

    config: Config
    node: Node
    daemons: Daemons
    engine: Engine
    census: Census
    sampler: Sampler
    budget: Budget

    def text(self) -> str:
        """Return all metrics; starts nothing and waits for nothing."""
        self.sampler.scraped()
        families = [
            *self._node(),
            *self._resources(),
            *self._daemons(),
            *self._vms(),
            *self._processes(),
            *self._nics(),
            *storage_families(self.engine.tables(), self.sampler.storage()),
            *self.engine.operation_counts.families(),
            *self._upkeep(),
        ]
        return render(families)

    def _node(self) -> list[Family]:
        name = self.config.node.name
        info = Family("chv_info", "gauge", "The node and its version; always 1.")
        info.add(1, node=name, version=VERSION)
        state = Family("chv_node_state", "gauge", "1 for the state that the node is in.")
        for each in NodeState:
            state.add(self.node.state is each, state=each.value)
        conditions = Family("chv_node_condition", "gauge", "1 where the condition is True.")
        for condition in self.node.conditions():
            conditions.add(_truth(condition.status), type=condition.type)
        return [info, state, conditions]

    def _resources(self) -> list[Family]:
        seen = commitment(self.engine.tables(), self.budget)
        memory = Family(
            "chv_node_memory_committed_bytes", "gauge", "Promised to VMs that are wanted running."
        )
        memory.add(seen.memory_bytes)
        vcpus = Family("chv_node_vcpus_committed", "gauge", "vCPUs of the same VMs.")
        vcpus.add(seen.vcpus)
        most = Family(
            "chv_node_memory_capacity_bytes", "gauge", "The most that may be; absent: no limit."
        )
        if seen.capacity_bytes is not None:
            most.add(seen.capacity_bytes)
        return [memory, vcpus, most]

    def _daemons(self) -> list[Family]:
        up = Family("chv_daemon_up", "gauge", "1 while the daemon answers.")
        restarts = Family("chv_daemon_restarts_total", "counter", "Starts after it had ended.")
        for each in self.daemons.statuses():
            up.add(each.state == "ready", daemon=each.name)
            restarts.add(each.restarts, daemon=each.name)
        return [up, restarts]

    def _vms(self) -> list[Family]:
        phases: Counter[str] = Counter()
        conditions = Family("chv_vm_condition", "gauge", "1: True, 0: False; absent: Unknown.")
        restarts = Family("chv_vm_restarts_total", "counter", "Restarts after an end of its own.")
        reboots = Family("chv_vm_guest_reboots_total", "counter", "By the guest, in this VMM.")
        memory = Family("kubevirt_vmi_memory_domain_bytes", "gauge", "Memory given to the VM.")
        for vm in self._all():
            labels = _names(vm)
            phases[phase_of(vm.status)] += 1
            if vm.status is None:
                continue
            restarts.add(vm.status.restarts, **labels)
            if vm.metadata.uid in self.engine.tables().workers:
                memory.add(parse_bytes(vm.spec.memory), **labels)
                reboots.add(vm.status.vmm.guest_reboots, **labels)
            for condition in vm.status.conditions:
                conditions.add(_truth(condition.status), **labels, type=condition.type)
        counted = Family("kubevirt_vmi_phase_count", "gauge", "VMs by phase (CHV's phases).")
        for phase in PHASES["VirtualMachine"]:
            counted.add(phases[phase], node=self.config.node.name, phase=phase)
        return [counted, conditions, restarts, reboots, memory]

    def _processes(self) -> list[Family]:
        prefix = "kubevirt_vmi_cpu"
        whole = Family(f"{prefix}_usage_seconds_total", "counter", "CPU time of the VMM.")
        user = Family(f"{prefix}_user_usage_seconds_total", "counter", "In user and guest mode.")
        system = Family(f"{prefix}_system_usage_seconds_total", "counter", "In system mode.")
        resident = Family("kubevirt_vmi_memory_resident_bytes", "gauge", "Resident, of the VMM.")
        uses = self.sampler.processes()
        for vm in self._all():
            use = uses.get(vm.metadata.uid)
            if use is None:
                continue
            labels = _names(vm)
            whole.add(use.user_s + use.system_s, **labels)
            user.add(use.user_s, **labels)
            system.add(use.system_s, **labels)
            resident.add(use.resident_bytes, **labels)
        return [whole, user, system, resident]

    def _nics(self) -> list[Family]:
        families = {field: Family(name, "counter", text) for name, field, text in NIC_METRICS}
        refused = Family("chv_vm_network_refused_total", "counter", "Packets refused, by reason.")
        counted = self.sampler.nics()
        for nic in self.engine.directory("").nics:
            stats: NicStats | None = counted.get(nic.nic_id)
            if stats is None:
                continue
            labels = {"namespace": nic.namespace, "name": nic.vm, "interface": nic.interface}
            for field, family in families.items():
                family.add(getattr(stats, field), **labels)
            for reason, count in sorted(stats.drops.items()):
                refused.add(count, **labels, reason=reason)
        return [*families.values(), refused]

    def _upkeep(self) -> list[Family]:
        leaked = Family("chv_leaked_objects", "gauge", "Things that no record explains, by kind.")
        if self.census.leaks.looked_at:
            for kind, count in self.census.leaks.counts().items():
                leaked.add(count, kind=kind)
        ages = Family("chv_sample_age_seconds", "gauge", "Since a source of samples answered.")
        for source, age_s in self.sampler.ages_s().items():
            ages.add(age_s, source=source)
        return [leaked, ages]

    def _all(self) -> list[VirtualMachine]:
        found = (each.resource for each in self.engine.tables().of_kind("VirtualMachine"))
        return [each for each in found if isinstance(each, VirtualMachine)]


def _names(vm: VirtualMachine) -> dict[str, str]:
    return {"namespace": vm.metadata.namespace, "name": vm.metadata.name}


def _truth(status: str) -> float | None:
    """Return a condition as a number; Unknown has none."""
    if status == ConditionStatus.TRUE:
        return 1
    return 0 if status == ConditionStatus.FALSE else None
