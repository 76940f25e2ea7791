"""Rules of Network, SecurityGroup, Exposure and interfaces that span fields. Pure.

What depends on other objects or on the node is decided by the agent and by nwd. Fails with
InvalidArgument naming field, value and fix.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from chv.common.errors import InvalidArgument
from chv.common.names import (
    Network as Subnet,
)
from chv.common.names import (
    check_address,
    check_cidr,
    check_hostname,
    check_mac,
    shown,
)
from chv.common.quantity import parse_bandwidth_bps, parse_duration_s
from chv.common.wire.network_resources import (
    DnsRecordSpec,
    ExposureProtocol,
    ExposureSpec,
    HealthCheckProtocol,
    HealthCheckSpec,
    NetworkSpec,
    RuleProtocol,
    SecurityGroupRule,
    SecurityGroupSpec,
    UplinkModeSpec,
)
from chv.common.wire.resources import InterfaceSpec

SUBNET_PREFIX_MIN = 8
SUBNET_PREFIX_MAX = 29  # gateway and a few guests
SUBNET6_PREFIX_MIN = 64
EXPOSED_PORTS_MAX = 1024
SUBNET6_PREFIX_MAX = 112
MTU6_MIN = 1280  # RFC 8200
INTERVAL_S_MIN, INTERVAL_S_MAX = 0.1, 3600.0
TIMEOUT_S_MIN, TIMEOUT_S_MAX = 0.05, 60.0
DRAIN_S_MAX = 3600.0
PORTED = (RuleProtocol.TCP, RuleProtocol.UDP)
LABEL_MAX = 63

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def refuse_twice(field: str, values: Iterable[str], part: str = "") -> None:
    """Refuse a list in which a value is there a second time."""
    seen: set[str] = set()
    for index, value in enumerate(values):
        if value in seen:
            where = f"{field}[{index}].{part}" if part else f"{field}[{index}]"
            raise InvalidArgument(f"{shown(value)} is there twice", field=where)
        seen.add(value)


# --- Network


def check_network(spec: NetworkSpec) -> None:
    """Check a network by itself."""
    subnet = _check_subnet(spec)
    if spec.subnet6:
        _check_subnet6(spec)
    if spec.gateway:
        _check_gateway(spec.gateway, subnet)
    if spec.dns.domain:
        check_hostname(spec.dns.domain, field="spec.dns.domain")
    for index, forwarder in enumerate(spec.dns.forwarders):
        _canonical(forwarder, f"spec.dns.forwarders[{index}]")
    refuse_twice("spec.dns.forwarders", spec.dns.forwarders)
    for index, domain in enumerate(spec.dns.search):
        _check_dns_name(domain, f"spec.dns.search[{index}]")
    refuse_twice("spec.dns.search", spec.dns.search)
    _check_records(spec.dns.records)
    _check_public(spec, subnet)


def _check_subnet(spec: NetworkSpec) -> ipaddress.IPv4Network:
    subnet = check_cidr(spec.subnet, field="spec.subnet")
    if not isinstance(subnet, ipaddress.IPv4Network):
        raise InvalidArgument(f"{shown(spec.subnet)} is not IPv4", field="spec.subnet")
    if not SUBNET_PREFIX_MIN <= subnet.prefixlen <= SUBNET_PREFIX_MAX:
        raise InvalidArgument(
            f"{shown(spec.subnet)} has a prefix of {subnet.prefixlen}",
            field="spec.subnet",
            hint=f"/{SUBNET_PREFIX_MIN} to /{SUBNET_PREFIX_MAX}",
        )
    if subnet.is_loopback or subnet.is_multicast or subnet.is_link_local:
        raise InvalidArgument(
            f"{shown(spec.subnet)} is for other uses",
            field="spec.subnet",
            hint="a private one such as 10.20.0.0/24",
        )
    return subnet


def _check_subnet6(spec: NetworkSpec) -> None:
    subnet = check_cidr(spec.subnet6, field="spec.subnet6")
    if not isinstance(subnet, ipaddress.IPv6Network):
        raise InvalidArgument(f"{shown(spec.subnet6)} is not IPv6", field="spec.subnet6")
    if not SUBNET6_PREFIX_MIN <= subnet.prefixlen <= SUBNET6_PREFIX_MAX:
        raise InvalidArgument(
            f"{shown(spec.subnet6)} has a prefix of {subnet.prefixlen}",
            field="spec.subnet6",
            hint=f"/{SUBNET6_PREFIX_MIN} to /{SUBNET6_PREFIX_MAX}, such as fd00:20::/64",
        )
    mapped = subnet.network_address.ipv4_mapped is not None
    reserved = subnet.is_loopback or subnet.is_multicast or subnet.is_link_local
    if mapped or reserved or subnet.network_address.is_unspecified:
        raise InvalidArgument(
            f"{shown(spec.subnet6)} is for other uses",
            field="spec.subnet6",
            hint="a local one such as fd00:20::/64",
        )
    if spec.mtu < MTU6_MIN:
        raise InvalidArgument(
            f"{spec.mtu} is too small for IPv6",
            field="spec.mtu",
            hint=f"at least {MTU6_MIN}, or leave spec.subnet6 out",
        )


def _check_gateway(text: str, subnet: ipaddress.IPv4Network) -> None:
    gateway = ipv4(text, "spec.gateway")
    if gateway not in subnet or gateway in (subnet.network_address, subnet.broadcast_address):
        raise InvalidArgument(
            f"{shown(text)} is not a host address of {subnet}",
            field="spec.gateway",
            hint=f"{subnet.network_address + 1}, or leave it empty",
        )


def _check_records(records: Sequence[DnsRecordSpec]) -> None:
    refuse_twice("spec.dns.records", (record.name for record in records), part="name")
    for index, record in enumerate(records):
        where = f"spec.dns.records[{index}]"
        _check_dns_name(record.name, f"{where}.name")
        for number, address in enumerate(record.addresses):
            _canonical(address, f"{where}.addresses[{number}]")
        refuse_twice(f"{where}.addresses", record.addresses)


def _check_dns_name(name: str, field: str) -> None:
    labels = name.split(".")
    if any(not label or len(label) > LABEL_MAX or label.endswith("-") for label in labels):
        raise InvalidArgument(
            f"{shown(name)} is not a name of DNS",
            field=field,
            hint=f"labels of 1 to {LABEL_MAX} of a-z, 0-9, '-' and '_' joined by single dots",
        )


def _check_public(spec: NetworkSpec, subnet: ipaddress.IPv4Network) -> None:
    refuse_twice("spec.publicAddresses", spec.public_addresses)
    for index, text in enumerate(spec.public_addresses):
        field = f"spec.publicAddresses[{index}]"
        if spec.uplink is UplinkModeSpec.NONE:
            raise InvalidArgument(
                f"{shown(text)} on a network without an uplink",
                field=field,
                hint="write uplink: NAT or Routed, or leave it out",
            )
        address = ipv4(text, field)
        if address in subnet:
            raise InvalidArgument(
                f"{shown(text)} is in the network's own subnet {subnet}",
                field=field,
                hint="an address that is routed to the node",
            )
        if _is_special(address):
            raise InvalidArgument(f"{shown(text)} is for other uses", field=field)


# --- SecurityGroup


def check_group(spec: SecurityGroupSpec) -> None:
    """Check a security group by itself."""
    for direction, rules in (("ingress", spec.ingress), ("egress", spec.egress)):
        for index, rule in enumerate(rules):
            _check_rule(rule, f"spec.{direction}[{index}]")


def _check_rule(rule: SecurityGroupRule, where: str) -> None:
    if rule.ports and rule.protocol not in PORTED:
        raise InvalidArgument(
            f"{rule.protocol.value} has no ports",
            field=f"{where}.ports",
            hint="leave ports out, or write protocol: TCP or UDP",
        )
    for index, text in enumerate(rule.ports):
        _check_range(text, f"{where}.ports[{index}]")
    refuse_twice(f"{where}.ports", rule.ports)
    if not rule.cidrs and not rule.security_groups:
        raise InvalidArgument(
            "the rule names no peer, so it would allow nothing",
            field=f"{where}.cidrs",
            hint='cidrs: ["0.0.0.0/0"] for everybody, or securityGroups: [NAME]',
        )
    for index, text in enumerate(rule.cidrs):
        _check_peer(rule.protocol, text, f"{where}.cidrs[{index}]")
    refuse_twice(f"{where}.cidrs", rule.cidrs)
    refuse_twice(f"{where}.securityGroups", rule.security_groups)


def _check_range(text: str, field: str) -> None:
    first, dash, last = text.partition("-")
    low, high = int(first), int(last) if dash else int(first)
    if high > 65535:
        raise InvalidArgument(f"{shown(text)} is beyond 65535", field=field)
    if dash and low >= high:
        fix = str(low) if low == high else f"{high}-{low}"
        raise InvalidArgument(
            f"{shown(text)} is no ascending range", field=field, hint=f'write "{fix}"'
        )


def _check_peer(protocol: RuleProtocol, text: str, field: str) -> None:
    subnet = check_cidr(text, field=field)
    other = {RuleProtocol.ICMP: 6, RuleProtocol.ICMPV6: 4}.get(protocol)
    if subnet.version == other:
        right = "ICMPv6" if other == 6 else "ICMP"
        raise InvalidArgument(
            f"{shown(text)} is IPv{other}, where there is no {protocol.value}",
            field=field,
            hint=f"a rule of its own with protocol: {right}",
        )


# --- Exposure


def check_exposure(spec: ExposureSpec) -> None:
    """Check an exposure by itself."""
    for index, address in enumerate(spec.addresses):
        _check_exposed(address, f"spec.addresses[{index}]")
    refuse_twice("spec.addresses", spec.addresses)
    for index, source in enumerate(spec.sources):
        check_cidr(source, field=f"spec.sources[{index}]")
    refuse_twice("spec.sources", spec.sources)
    _check_ports(spec)
    pairs = (f"{each.virtual_machine}/{each.interface}".rstrip("/") for each in spec.targets)
    refuse_twice("spec.targets", pairs)
    _check_health(spec, spec.health_check)
    drain_s = parse_duration_s(spec.drain, field="spec.drain")
    if drain_s > DRAIN_S_MAX:
        raise InvalidArgument(f"{shown(spec.drain)} is too long", field="spec.drain", hint="to 1h")


def _check_exposed(text: str, field: str) -> None:
    address = _canonical(text, field)
    if _is_special(address):
        raise InvalidArgument(
            f"{shown(text)} is for other uses",
            field=field,
            hint="an address of the node, a public one of the network, or a free one of its subnet",
        )


def _check_ports(spec: ExposureSpec) -> None:
    if not spec.end_port:
        return
    if spec.end_port <= spec.port:
        raise InvalidArgument(
            f"{spec.end_port} is not above spec.port {spec.port}",
            field="spec.endPort",
            hint="leave it out for a single port",
        )
    if spec.end_port - spec.port >= EXPOSED_PORTS_MAX:
        raise InvalidArgument(
            f"{spec.end_port} makes {spec.end_port - spec.port + 1} ports",
            field="spec.endPort",
            hint=f"at most {EXPOSED_PORTS_MAX}; several exposures can have the same targets",
        )
    if spec.target_port not in (0, spec.port):
        raise InvalidArgument(
            f"{spec.target_port} for a range, whose ports are kept",
            field="spec.targetPort",
            hint="leave it out, or leave spec.endPort out",
        )


def _check_health(spec: ExposureSpec, health: HealthCheckSpec) -> None:
    where = "spec.healthCheck"
    interval_s = parse_duration_s(health.interval, field=f"{where}.interval")
    timeout_s = parse_duration_s(health.timeout, field=f"{where}.timeout")
    if not INTERVAL_S_MIN <= interval_s <= INTERVAL_S_MAX:
        raise InvalidArgument(
            f"{shown(health.interval)} is out of range",
            field=f"{where}.interval",
            hint="100ms to 1h",
        )
    if not TIMEOUT_S_MIN <= timeout_s <= TIMEOUT_S_MAX:
        raise InvalidArgument(
            f"{shown(health.timeout)} is out of range", field=f"{where}.timeout", hint="50ms to 1m"
        )
    if health.protocol is HealthCheckProtocol.NONE:
        return
    if timeout_s > interval_s:  # the next question would come before the answer
        raise InvalidArgument(
            f"{shown(health.timeout)} is longer than the interval {health.interval}",
            field=f"{where}.timeout",
            hint="at most the interval",
        )
    # What serves UDP need not serve TCP on the same port.
    if spec.protocol is ExposureProtocol.UDP and not health.port:
        raise InvalidArgument(
            f"{health.protocol.value} cannot be asked of a UDP port",
            field=f"{where}.port",
            hint="name a TCP port of the target, or write protocol: None",
        )


# --- interfaces of a VM


def check_interfaces(interfaces: Sequence[InterfaceSpec]) -> None:
    """Check the interfaces of a VM by themselves."""
    refuse_twice("spec.interfaces", (each.name for each in interfaces), part="name")
    refuse_twice("spec.interfaces", (e.mac for e in interfaces if e.mac), part="mac")
    for part in ("address", "address6", "public_address"):
        pairs = [(i, e.network, getattr(e, part)) for i, e in enumerate(interfaces)]
        _refuse_shared([pair for pair in pairs if pair[2]], _camel(part))
    for index, interface in enumerate(interfaces):
        _check_interface(interface, f"spec.interfaces[{index}]")


def _check_interface(interface: InterfaceSpec, where: str) -> None:
    if interface.mac:
        check_mac(interface.mac, field=f"{where}.mac")
    if interface.address:
        ipv4(interface.address, f"{where}.address")
    if interface.public_address:
        ipv4(interface.public_address, f"{where}.publicAddress")
    if interface.address6:
        _check_address6(interface.address6, f"{where}.address6")
    refuse_twice(f"{where}.securityGroups", interface.security_groups)
    for name in ("ingress", "egress"):
        rate = getattr(interface.bandwidth, name)
        if rate:
            parse_bandwidth_bps(rate, field=f"{where}.bandwidth.{name}")


def _check_address6(text: str, field: str) -> None:
    address = _canonical(text, field)
    if not isinstance(address, ipaddress.IPv6Address) or address.ipv4_mapped is not None:
        raise InvalidArgument(f"{shown(text)} is not an IPv6 address", field=field)


def _refuse_shared(found: list[tuple[int, str, str]], part: str) -> None:
    seen: set[tuple[str, str]] = set()
    for index, network, address in found:
        if (network, address) in seen:
            field = f"spec.interfaces[{index}].{part}"
            raise InvalidArgument(f"{shown(address)} is there twice", field=field)
        seen.add((network, address))


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


# --- addresses


def ipv4(text: str, field: str) -> ipaddress.IPv4Address:
    """Return the IPv4 address that a text is."""
    address = check_address(text, field=field)
    if not isinstance(address, ipaddress.IPv4Address):
        raise InvalidArgument(f"{shown(text)} is not an IPv4 address", field=field)
    return address


def _canonical(text: str, field: str) -> Address:
    """Return an address, refused where it is not written in the one way that is compared."""
    address = check_address(text, field=field)
    if str(address) != text:
        raise InvalidArgument(
            f"{shown(text)} is not written as an address", field=field, hint=f"write {address}"
        )
    return address


def _is_special(address: Address) -> bool:
    special = address.is_loopback or address.is_multicast or address.is_unspecified
    return special or address.is_link_local or str(address) == "255.255.255.255"


def contains(subnet: Subnet, address: Address) -> bool:
    """Tell whether an address of either version is in a subnet."""
    return address.version == subnet.version and address in subnet
