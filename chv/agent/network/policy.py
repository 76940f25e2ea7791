"""Groups and exposures as nwd wants them, and how they are brought to it.

Names become uids here. What is sent is recorded as a digest with a generation of its own before
it is sent: another content is another generation, however it came about, and a crash between the
two ends in the same call again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable

import msgspec

from chv.agent.actors import Again, Outcome
from chv.agent.network.common import NwdReconciler, Seen
from chv.agent.records import PutFacts, SentFacts, StoredObject
from chv.agent.tables import Tables
from chv.agent.vm.desired import nic_id
from chv.common.failpoint import failpoint
from chv.common.quantity import parse_duration_s
from chv.common.wire import nwd_policy as policy
from chv.common.wire.resources import (
    BalancingAlgorithm,
    ExistingConnections,
    Exposure,
    ExposureProtocol,
    ExposureTarget,
    HealthCheckProtocol,
    HealthCheckSpec,
    RuleProtocol,
    SecurityGroup,
    SecurityGroupRule,
    VirtualMachine,
)
from chv.common.wire.types import CallMeta

EXISTING = {
    ExistingConnections.KEEP: policy.Existing.KEEP,
    ExistingConnections.DROP: policy.Existing.DROP,
}
PROTOCOLS = {
    RuleProtocol.TCP: policy.IpProtocol.TCP,
    RuleProtocol.UDP: policy.IpProtocol.UDP,
    RuleProtocol.ICMP: policy.IpProtocol.ICMP,
    RuleProtocol.ICMPV6: policy.IpProtocol.ICMPV6,
    RuleProtocol.ANY: policy.IpProtocol.ANY,
}
EXPOSED = {
    ExposureProtocol.TCP: policy.IpProtocol.TCP,
    ExposureProtocol.UDP: policy.IpProtocol.UDP,
}
ALGORITHMS = {
    BalancingAlgorithm.ROUND_ROBIN: policy.Algorithm.ROUND_ROBIN,
    BalancingAlgorithm.SOURCE: policy.Algorithm.SOURCE,
    BalancingAlgorithm.RANDOM: policy.Algorithm.RANDOM,
}
CHECKS = {
    HealthCheckProtocol.NONE: policy.HealthProtocol.NONE,
    HealthCheckProtocol.TCP: policy.HealthProtocol.TCP,
    HealthCheckProtocol.HTTP: policy.HealthProtocol.HTTP,
}
DIRECTIONS = (
    ("ingress", policy.Direction.INGRESS),
    ("egress", policy.Direction.EGRESS),
)

Send = Callable[[CallMeta], Awaitable[object]]


class PolicyReconciler(NwdReconciler):
    """Base of the reconcilers of groups and exposures."""

    async def bring(
        self, stored: StoredObject, wanted: msgspec.Struct, seen: Seen | None, send: Send
    ) -> Outcome | None:
        """Let nwd make it so where it is not; None where it is."""
        sent = stored.sent_facts or SentFacts()
        digest = hashlib.sha256(msgspec.json.encode(wanted)).hexdigest()
        there = seen.generation if seen is not None else 0
        if digest == sent.digest and seen is not None and there == sent.generation:
            return None
        if digest != sent.digest or there > sent.generation:
            # Never below the object's own, nor what nwd has from a store that was lost.
            own = stored.resource.metadata.generation
            sent = SentFacts(generation=max(sent.generation + 1, own, there + 1), digest=digest)
        await self.effect(stored, "set", lambda opid: self._send(opid, stored, sent, send))
        return Again()

    async def _send(
        self, operation_id: str, stored: StoredObject, sent: SentFacts, send: Send
    ) -> None:
        await failpoint(f"agent.{self.name}.set.before")
        if sent != stored.sent_facts:
            await self._context.ledger.commit(PutFacts(uid=self._uid, facts=sent))
        await failpoint(f"agent.{self.name}.set.recorded")
        await send(self._context.meta(operation_id, sent.generation))
        await failpoint(f"agent.{self.name}.set.after")


def deletion_generation(stored: StoredObject, seen: Seen | None) -> int:
    """Return a generation that nwd takes for the deletion of what it has."""
    sent = stored.sent_facts.generation if stored.sent_facts is not None else 0
    return max(sent, stored.resource.metadata.generation, seen.generation if seen else 0)


# --- groups


def group_of(stored: StoredObject) -> SecurityGroup:
    """Return the stored object as the group that it is."""
    assert isinstance(stored.resource, SecurityGroup)
    return stored.resource


def wanted_group(
    tables: Tables, stored: StoredObject, known: frozenset[str] | None = None
) -> policy.SecurityGroup:
    """Return the group as nwd wants it, with those peers alone that it knows by now.

    Groups may name each other: the first of them is made without the second, and again with it.
    """
    group = group_of(stored)
    rules = [
        _rule(tables, group.metadata.namespace, direction, rule)
        for field, direction in DIRECTIONS
        for rule in getattr(group.spec, field)
    ]
    if known is not None:
        rules = [_among(rule, known | {stored.uid}) for rule in rules]
    return policy.SecurityGroup(
        group_id=stored.uid,
        name=group.metadata.name,
        tenant=group.metadata.namespace,
        # A rule whose peers are all gone allows nothing.
        rules=[rule for rule in rules if rule.cidrs or rule.groups],
        log_dropped=group.spec.log_dropped,
    )


def rule_places(tables: Tables, stored: StoredObject) -> list[str]:
    """Return where each rule of `wanted_group` stands in the manifest: `egress[0]`."""
    group = group_of(stored)
    return [
        f"{field}[{index}]"
        for field, direction in DIRECTIONS
        for index, rule in enumerate(getattr(group.spec, field))
        if rule.cidrs or _rule(tables, group.metadata.namespace, direction, rule).groups
    ]


def _among(rule: policy.SecurityRule, known: frozenset[str]) -> policy.SecurityRule:
    return msgspec.structs.replace(rule, groups=[uid for uid in rule.groups if uid in known])


def missing_peers(tables: Tables, stored: StoredObject) -> list[str]:
    """Return the names of groups that its rules name and that are not there."""
    group = group_of(stored)
    named = {
        name
        for field, _ in DIRECTIONS
        for rule in getattr(group.spec, field)
        for name in rule.security_groups
    }
    return sorted(n for n in named if not _group_uid(tables, group.metadata.namespace, n))


def _rule(
    tables: Tables, namespace: str, direction: policy.Direction, rule: SecurityGroupRule
) -> policy.SecurityRule:
    peers = (_group_uid(tables, namespace, name) for name in rule.security_groups)
    return policy.SecurityRule(
        direction=direction,
        protocol=PROTOCOLS[rule.protocol],
        ports=rule.ports,
        cidrs=rule.cidrs,
        groups=[uid for uid in peers if uid],
        rate=rule.new_connections_per_second,
        connections_max=rule.max_connections,
        log=rule.log,
    )


def _group_uid(tables: Tables, namespace: str, name: str) -> str:
    """Return the uid of a group that stays; one that is going is no peer any more."""
    found = tables.find("SecurityGroup", namespace, name)
    return found.uid if found is not None and not found.deleting else ""


# --- exposures


def exposure_of(stored: StoredObject) -> Exposure:
    """Return the stored object as the exposure that it is."""
    assert isinstance(stored.resource, Exposure)
    return stored.resource


def wanted_exposure(tables: Tables, stored: StoredObject) -> policy.Exposure | None:
    """Return the exposure as nwd wants it; None where its network is not there."""
    exposure = exposure_of(stored)
    metadata, spec = exposure.metadata, exposure.spec
    network = tables.find("Network", metadata.namespace, spec.network)
    if network is None:
        return None
    nics = target_nics(tables, stored)
    return policy.Exposure(
        exposure_id=stored.uid,
        name=metadata.name,
        network_id=network.uid,
        protocol=EXPOSED[spec.protocol],
        addresses=spec.addresses,
        port=spec.port,
        port_end=spec.end_port,
        target_port=spec.target_port,
        targets=list(dict.fromkeys(nic for _, nic in nics if nic)),
        sources=spec.sources,
        algorithm=ALGORITHMS[spec.algorithm],
        health=_health(spec.health_check),
        drain_s=parse_duration_s(spec.drain, field="spec.drain"),
    )


def target_nics(tables: Tables, stored: StoredObject) -> list[tuple[ExposureTarget, str]]:
    """Return each target with the uid of its NIC, '' where VM or interface are not there."""
    exposure = exposure_of(stored)
    return [(target, _target(tables, exposure, target)) for target in exposure.spec.targets]


def _target(tables: Tables, exposure: Exposure, target: ExposureTarget) -> str:
    namespace, network_name = exposure.metadata.namespace, exposure.spec.network
    network = tables.find("Network", namespace, network_name)
    vm = tables.find("VirtualMachine", namespace, target.virtual_machine)
    if network is None or vm is None:
        return ""
    assert isinstance(vm.resource, VirtualMachine)
    for interface in vm.resource.spec.interfaces:
        if interface.network == network_name and target.interface in ("", interface.name):
            return nic_id(vm.uid, interface, network.uid)
    return ""


def _health(spec: HealthCheckSpec) -> policy.HealthCheck:
    return policy.HealthCheck(
        protocol=CHECKS[spec.protocol],
        port=spec.port,
        path=spec.path,
        interval_s=parse_duration_s(spec.interval, field="spec.healthCheck.interval"),
        timeout_s=parse_duration_s(spec.timeout, field="spec.healthCheck.timeout"),
        rise=spec.rise,
        fall=spec.fall,
    )
