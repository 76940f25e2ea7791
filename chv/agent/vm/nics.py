"""A NIC as nwd is asked to make it, from the specs of VM and network. Pure."""

from __future__ import annotations

from chv.agent.tables import Tables
from chv.agent.vm.model import DesiredNic
from chv.common.quantity import parse_bandwidth_bps
from chv.common.wire import nwd
from chv.common.wire.resources import (
    InterfaceBandwidth,
    InterfaceSpec,
    Network,
    VirtualMachine,
)
from chv.common.wire.types import CallMeta


def attach_request(
    tables: Tables, vm: VirtualMachine, nic: DesiredNic, meta: CallMeta, owner_uid: int
) -> nwd.AttachVmNic:
    """Return the request for a NIC that is wanted."""
    spec = next(each for each in vm.spec.interfaces if each.name == nic.name)
    return nwd.AttachVmNic(
        meta=meta,
        nic_id=nic.nic_id,
        vm_id=vm.metadata.uid,
        network_id=nic.network_uid,
        hostname=hostname_of(vm),
        mac=spec.mac,
        address=spec.address,
        address6=spec.address6,
        owner_uid=owner_uid,
        guest_ports=vm.spec.guest_ports,
        queues=spec.queues,
        security_groups=nic.group_uids,
        shape=_shape(spec.bandwidth),
        connections_max=spec.max_connections,
        public_address=spec.public_address,
        metadata=_metadata(vm) if _serves_metadata(tables, vm, spec) else None,
    )


def hostname_of(vm: VirtualMachine) -> str:
    """Return the name that the guest has."""
    return vm.spec.cloud_init.hostname or vm.metadata.name


def _shape(bandwidth: InterfaceBandwidth) -> nwd.Shape:
    rates = {
        name: parse_bandwidth_bps(text, field=f"spec.interfaces.bandwidth.{name}")
        for name, text in (("ingress", bandwidth.ingress), ("egress", bandwidth.egress))
        if text
    }
    return nwd.Shape(ingress_bps=rates.get("ingress", 0), egress_bps=rates.get("egress", 0))


def _serves_metadata(tables: Tables, vm: VirtualMachine, spec: InterfaceSpec) -> bool:
    network = tables.find("Network", vm.metadata.namespace, spec.network)
    return (
        network is not None
        and isinstance(network.resource, Network)
        and network.resource.spec.metadata
    )


def _metadata(vm: VirtualMachine) -> nwd.VmMetadata:
    """What anybody in the guest may read; the host key is on the seed disk alone."""
    return nwd.VmMetadata(
        name=vm.metadata.name,
        namespace=vm.metadata.namespace,
        hostname=hostname_of(vm),
        ssh_authorized_keys=vm.spec.cloud_init.ssh_authorized_keys,
        user_data=vm.spec.cloud_init.user_data,
    )
