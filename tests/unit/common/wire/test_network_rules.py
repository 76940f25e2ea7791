"""Networks, groups, exposures and interfaces: what is refused names field, value and fix."""

from __future__ import annotations

from typing import Any

import pytest

from chv.common.errors import InvalidArgument
from chv.common.wire.manifest import parse
from chv.common.wire.types import API_VERSION


def manifest(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": "x"}, "spec": spec}


def refused(kind: str, spec: dict[str, Any]) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        parse(manifest(kind, spec))
    return caught.value


def network(**spec: Any) -> dict[str, Any]:
    return {"subnet": "10.1.0.0/24", **spec}


def rule(**fields: Any) -> dict[str, Any]:
    return {"protocol": "TCP", "ports": ["80"], "cidrs": ["0.0.0.0/0"], **fields}


def exposure(**spec: Any) -> dict[str, Any]:
    return {
        "network": "net",
        "addresses": ["192.0.2.7"],
        "port": 80,
        "sources": ["0.0.0.0/0"],
        "targets": [{"virtualMachine": "web"}],
        **spec,
    }


def vm(**interface: Any) -> dict[str, Any]:
    return {
        "boot": {"image": "tiny"},
        "interfaces": [{"name": "eth0", "network": "net", **interface}],
    }


def test_a_network_with_everything_is_taken() -> None:
    spec = network(
        gateway="10.1.0.254",
        subnet6="fd00:1::/64",
        l2="Open",
        uplink="Routed",
        publicAddresses=["192.0.2.10", "192.0.2.11"],
        metadata=True,
        dns={
            "domain": "shop.example",
            "forwarders": ["192.0.2.53", "2001:db8::53"],
            "search": ["example", "_tcp.example"],
            "records": [{"name": "_ldap._tcp", "addresses": ["10.1.0.5", "fd00:1::5"]}],
        },
    )
    parse(manifest("Network", spec))


@pytest.mark.parametrize(
    ("change", "field", "hint"),
    [
        ({"subnet6": "fd00:1::/48"}, "spec.subnet6", "/64 to /112"),
        ({"subnet6": "fd00:1::/113"}, "spec.subnet6", "/64 to /112"),
        ({"subnet6": "fd00:1::5/64"}, "spec.subnet6", "fd00:1::/64"),
        ({"subnet6": "FD00:1::/64"}, "spec.subnet6", ""),
        ({"subnet6": "fd00:0001::/64"}, "spec.subnet6", "fd00:1::/64"),
        ({"subnet6": "fe80::/64"}, "spec.subnet6", "fd00:20::/64"),
        ({"subnet6": "ff00::/64"}, "spec.subnet6", "fd00:20::/64"),
        ({"subnet6": "::ffff:10.0.0.0/112"}, "spec.subnet6", ""),
        ({"subnet6": "10.1.0.0/24"}, "spec.subnet6", ""),
        ({"subnet6": "fd00:1::/64", "mtu": 1279}, "spec.mtu", "1280"),
        ({"publicAddresses": ["10.1.0.9"]}, "spec.publicAddresses[0]", "routed"),
        ({"publicAddresses": ["192.0.2.1", "192.0.2.1"]}, "spec.publicAddresses[1]", ""),
        ({"publicAddresses": ["127.0.0.1"]}, "spec.publicAddresses[0]", ""),
        ({"publicAddresses": ["300.0.0.1"]}, "spec.publicAddresses[0]", ""),
        (
            {"publicAddresses": ["192.0.2.1"], "uplink": "None"},
            "spec.publicAddresses[0]",
            "uplink",
        ),
        ({"dns": {"forwarders": ["2001:DB8::1"]}}, "spec.dns.forwarders[0]", ""),
        ({"dns": {"forwarders": ["2001:db8:0::1"]}}, "spec.dns.forwarders[0]", "2001:db8::1"),
        ({"dns": {"search": ["a..b"]}}, "spec.dns.search[0]", "labels"),
        ({"dns": {"search": ["a", "a"]}}, "spec.dns.search[1]", ""),
        ({"dns": {"search": ["a\nb"]}}, "spec.dns.search[0]", ""),
        (
            {"dns": {"records": [{"name": "a-.b", "addresses": ["10.1.0.5"]}]}},
            "spec.dns.records[0].name",
            "labels",
        ),
        (
            {"dns": {"records": [{"name": "a", "addresses": ["10.1.0.555"]}]}},
            "spec.dns.records[0].addresses[0]",
            "",
        ),
        (
            {"dns": {"records": [{"name": "a", "addresses": ["10.1.0.5", "10.1.0.5"]}]}},
            "spec.dns.records[0].addresses[1]",
            "",
        ),
        (
            {"dns": {"records": [{"name": "a", "addresses": ["10.1.0.5"]}] * 2}},
            "spec.dns.records[1].name",
            "",
        ),
    ],
)
def test_a_network_that_cannot_be_is_refused(change: dict[str, Any], field: str, hint: str) -> None:
    error = refused("Network", network(**change))
    assert error.field == field
    assert hint in error.hint


def test_a_group_with_everything_is_taken() -> None:
    rules = [
        rule(ports=["80", "8000-8010"], newConnectionsPerSecond=5, maxConnections=9, log=True),
        rule(protocol="UDP", ports=["53"], cidrs=["fd00::/8", "10.0.0.0/8"]),
        rule(protocol="ICMP", ports=[], cidrs=["10.0.0.0/8"], securityGroups=["x"]),
        rule(protocol="ICMPv6", ports=[], cidrs=["::/0"]),
        rule(protocol="Any", ports=[], cidrs=[], securityGroups=["x", "y"]),
    ]
    parse(manifest("SecurityGroup", {"ingress": rules, "egress": rules, "logDropped": True}))


@pytest.mark.parametrize(
    ("change", "field", "hint"),
    [
        ({"protocol": "Any"}, "ports", "TCP or UDP"),
        ({"protocol": "ICMP"}, "ports", "TCP or UDP"),
        ({"protocol": "SCTP"}, "protocol", ""),
        ({"ports": ["90-80"]}, "ports[0]", "80-90"),
        ({"ports": ["80-80"]}, "ports[0]", '"80"'),
        ({"ports": ["0"]}, "ports[0]", ""),
        ({"ports": ["65536"]}, "ports[0]", ""),
        ({"ports": ["80-70000"]}, "ports[0]", ""),
        ({"ports": ["80", "80"]}, "ports[1]", ""),
        ({"ports": ["http"]}, "ports[0]", ""),
        ({"ports": ["80\n"]}, "ports[0]", ""),
        ({"ports": ["80, 443"]}, "ports[0]", ""),
        ({"cidrs": []}, "cidrs", "0.0.0.0/0"),
        ({"cidrs": ["10.0.0.1/8"]}, "cidrs[0]", "10.0.0.0/8"),
        ({"cidrs": ["010.0.0.0/8"]}, "cidrs[0]", ""),
        ({"cidrs": ["10.0.0.0"]}, "cidrs[0]", ""),
        ({"cidrs": ["fd00:0::/32"]}, "cidrs[0]", "fd00::/32"),
        ({"cidrs": ["10.0.0.0/8", "10.0.0.0/8"]}, "cidrs[1]", ""),
        ({"cidrs": ["10.0.0.0/8 } accept"]}, "cidrs[0]", ""),
        ({"protocol": "ICMP", "ports": [], "cidrs": ["::/0"]}, "cidrs[0]", "ICMPv6"),
        ({"protocol": "ICMPv6", "ports": [], "cidrs": ["0.0.0.0/0"]}, "cidrs[0]", "ICMP"),
        ({"securityGroups": ["a", "a"]}, "securityGroups[1]", ""),
        ({"securityGroups": ['a"; drop']}, "securityGroups[0]", ""),
    ],
)
@pytest.mark.parametrize("direction", ["ingress", "egress"])
def test_a_rule_that_means_nothing_is_refused(
    direction: str, change: dict[str, Any], field: str, hint: str
) -> None:
    error = refused("SecurityGroup", {direction: [rule(), rule(**change)]})
    assert error.field == f"spec.{direction}[1].{field}"
    assert hint in error.hint


@pytest.mark.parametrize(
    "spec",
    [
        exposure(),
        exposure(endPort=90),
        exposure(endPort=90, targetPort=80),
        exposure(targetPort=8080, algorithm="Source", drain="0s", targets=[]),
        exposure(addresses=["fd00::7", "10.0.0.7"], sources=["::/0", "10.0.0.0/8"]),
        exposure(healthCheck={"protocol": "HTTP", "path": "/up?x=1", "port": 8080}),
        exposure(protocol="UDP", healthCheck={"protocol": "TCP", "port": 8080}),
        exposure(healthCheck={"interval": "1s"}),  # nothing is asked: the timeout says nothing
        exposure(
            targets=[
                {"virtualMachine": "web", "interface": "eth0"},
                {"virtualMachine": "web", "interface": "eth1"},
            ]
        ),
    ],
)
def test_an_exposure_that_makes_sense_is_taken(spec: dict[str, Any]) -> None:
    parse(manifest("Exposure", spec))


@pytest.mark.parametrize(
    ("change", "field", "hint"),
    [
        ({"endPort": 80}, "spec.endPort", "leave it out"),
        ({"endPort": 79}, "spec.endPort", "leave it out"),
        ({"endPort": 80 + 1024}, "spec.endPort", "at most 1024"),
        ({"endPort": 90, "targetPort": 8080}, "spec.targetPort", "endPort"),
        ({"sources": []}, "spec.sources", ""),
        ({"sources": ["10.0.0.1/8"]}, "spec.sources[0]", "10.0.0.0/8"),
        ({"addresses": []}, "spec.addresses", ""),
        ({"addresses": ["0.0.0.0"]}, "spec.addresses[0]", "of the node"),
        ({"addresses": ["127.0.0.1"]}, "spec.addresses[0]", "of the node"),
        ({"addresses": ["10.0.0.7", "10.0.0.7"]}, "spec.addresses[1]", ""),
        ({"addresses": ["fd00:0::7"]}, "spec.addresses[0]", "fd00::7"),
        ({"targets": [{"virtualMachine": "a"}] * 2}, "spec.targets[1]", ""),
        ({"drain": "2h"}, "spec.drain", "1h"),
        ({"drain": 30}, "spec.drain", ""),
        (
            {"healthCheck": {"protocol": "TCP", "interval": "1s", "timeout": "2s"}},
            "spec.healthCheck.timeout",
            "interval",
        ),
        ({"healthCheck": {"protocol": "TCP", "interval": "50ms"}}, "spec.healthCheck.interval", ""),
        ({"healthCheck": {"protocol": "TCP", "timeout": "0s"}}, "spec.healthCheck.timeout", ""),
        ({"healthCheck": {"protocol": "HTTP", "path": "up"}}, "spec.healthCheck.path", ""),
        ({"healthCheck": {"path": "/ HTTP/1.1\r\nX: y"}}, "spec.healthCheck.path", ""),
        ({"protocol": "UDP", "healthCheck": {"protocol": "HTTP"}}, "spec.healthCheck.port", "TCP"),
        ({"protocol": "ICMP"}, "spec.protocol", ""),
    ],
)
def test_an_exposure_that_cannot_be_is_refused(
    change: dict[str, Any], field: str, hint: str
) -> None:
    error = refused("Exposure", exposure(**change))
    assert error.field == field
    assert hint in error.hint


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"address6": "fd00:0::5"}, "address6"),
        ({"address6": "::ffff:10.0.0.5"}, "address6"),
        ({"address6": "10.0.0.5"}, "address6"),
        ({"publicAddress": "300.0.0.1"}, "publicAddress"),
        ({"securityGroups": ["a", "b", "a"]}, "securityGroups[2]"),
        ({"bandwidth": {"ingress": "100"}}, "bandwidth.ingress"),
        ({"bandwidth": {"egress": "100MB"}}, "bandwidth.egress"),
        ({"bandwidth": {"egress": "1kbit"}}, "bandwidth.egress"),
        ({"bandwidth": {"egress": "2000Gbit"}}, "bandwidth.egress"),
        ({"queues": 17}, "queues"),
        ({"maxConnections": -1}, "maxConnections"),
    ],
)
def test_an_interface_that_cannot_be_is_refused(change: dict[str, Any], field: str) -> None:
    assert refused("VirtualMachine", vm(**change)).field == f"spec.interfaces[0].{field}"


def test_a_refusal_shows_how_it_is_written() -> None:
    refusal = str(refused("VirtualMachine", vm(bandwidth={"ingress": "100M"})))
    assert "'100M'" in refusal
    assert "(bits a second: `100Mbit`)" in refusal
    assert "regex" not in refusal
    bare = refused("SecurityGroup", {"ingress": [rule(ports=[80])]})
    assert bare.hint == 'write "80", in quotes'
    check = {"protocol": "TCP", "interval": 1}
    assert "500ms, 30s" in str(refused("Exposure", exposure(healthCheck=check)))


def test_one_address_on_two_interfaces_of_a_network_is_refused() -> None:
    spec = vm()
    for part, address in (
        ("address", "10.0.0.5"), ("address6", "fd00::5"), ("publicAddress", "192.0.2.5"),
    ):  # fmt: skip
        spec["interfaces"] = [
            {"name": "eth0", "network": "net", part: address},
            {"name": "eth1", "network": "net", part: address},
        ]
        assert refused("VirtualMachine", spec).field == f"spec.interfaces[1].{part}"
        spec["interfaces"][1]["network"] = "other"  # networks may have equal subnets
        parse(manifest("VirtualMachine", spec))
