"""What a network may ask for, alone and beside others."""

from __future__ import annotations

import pytest

from chv.common.errors import AlreadyExists, InUse, InvalidArgument
from chv.common.wire.nwd import DnsRecord, Topology, UplinkMode
from chv.nwd.topology import (
    Surroundings,
    check_topology,
    refuse_overlap,
    refuse_recorded_name,
    refuse_taken_names,
)

POOL, POOL6 = "169.254.64.0/18", "fd63:6876::/112"
UID = "0b7f7a4e-0000-4000-8000-000000000001"
AROUND = Surroundings(
    uplink_pool=POOL,
    uplink_pool6=POOL6,
    host_addresses=["198.51.100.2/24", "fd99::2/64"],
    host_routes=["fd98::/48", "203.0.113.7/32"],
)


def topology(**changes: object) -> Topology:
    fields: dict[str, object] = {
        "network_id": UID,
        "name": "net",
        "tenant": "default",
        "subnet": "10.0.0.0/24",
        "dns_domain": "net.test",
    }
    return Topology(**(fields | changes))  # type: ignore[arg-type]


def test_the_gateway_is_the_first_address_unless_asked_otherwise() -> None:
    around = Surroundings(uplink_pool=POOL)
    assert check_topology(topology(), around).gateway == "10.0.0.1"
    asked = check_topology(topology(gateway="10.0.0.254"), around)
    assert asked.gateway == "10.0.0.254"


def test_a_subnet_with_host_bits_is_told_what_to_write() -> None:
    with pytest.raises(InvalidArgument, match="not a network address") as refused:
        check_topology(topology(subnet="10.0.0.7/24"), Surroundings(uplink_pool=POOL))
    assert refused.value.hint == "write 10.0.0.0/24"


@pytest.mark.parametrize(
    ("around", "words"),
    [
        (Surroundings(uplink_pool="10.0.0.0/20"), "the uplink pool"),
        (Surroundings(uplink_pool=POOL, reserved=["10.0.0.128/25"]), "network.reserved"),
        (Surroundings(uplink_pool=POOL, reserved=["fd00::/8", "10.0.0.0/8"]), "10.0.0.0/8"),
        (Surroundings(uplink_pool=POOL, host_addresses=["10.0.0.77/32"]), "10.0.0.77"),
        (Surroundings(uplink_pool=POOL, host_addresses=["10.0.9.1/16"]), "10.0.0.0/16"),
        (Surroundings(uplink_pool=POOL, host_routes=["10.0.0.0/30"]), "route to 10.0.0.0/30"),
    ],
)
def test_an_overlap_names_what_it_collides_with(around: Surroundings, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as refused:
        check_topology(topology(), around)
    assert refused.value.field == "spec.subnet"


@pytest.mark.parametrize("subnet6", ["fd00:7::/64", "fd00:7::/112", "2a00:1450:4001::/64"])
def test_an_ipv6_subnet_is_unique_local_or_global(subnet6: str) -> None:
    assert check_topology(topology(subnet6=subnet6), AROUND).subnet6 == subnet6


@pytest.mark.parametrize(
    ("subnet6", "words"),
    [
        ("fe80::/64", "link-local"),
        ("ff02::/64", "multicast"),
        ("2001:db8::/64", "documentation"),
        ("2002:a00::/64", "6to4"),
        ("::/64", "reserved"),
        ("4000::/64", "neither unique local"),
        ("fd00::/63", "outside /64 to /112"),
        ("fd00::/113", "outside /64 to /112"),
        ("fd00::1/64", "not written as a subnet"),
        ("fd00:0::/64", "not written as a subnet"),
        ("10.0.0.0/24", "not an IPv6 subnet"),
        ("fd63:6876::/64", "network.uplink_pool6"),
        ("fd99::/64", "the host's address"),
        ("fd98:0:0:7::/64", "the host's route"),
    ],
)
def test_an_ipv6_subnet_that_cannot_be_had_is_refused(subnet6: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as refused:
        check_topology(topology(subnet6=subnet6), AROUND)
    assert refused.value.field == "spec.subnet6"


def test_ipv6_needs_its_least_mtu() -> None:
    with pytest.raises(InvalidArgument, match="1280"):
        check_topology(topology(subnet6="fd00:7::/64", mtu=1279), AROUND)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("10.0.0.9", "part of the subnet"),
        ("169.254.64.9", "the uplink pool"),
        ("169.254.1.9", "link-local"),
        ("127.0.0.1", "loopback"),
        ("224.0.0.1", "multicast"),
        ("999.1.1.1", "not an IPv4 address"),
        ("198.51.100.2", "the host itself"),
        ("203.0.113.7", "another route"),
    ],
)
def test_a_public_address_that_cannot_be_routed_is_refused(address: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as refused:
        check_topology(topology(public_addresses=[address]), AROUND)
    assert refused.value.field == "spec.publicAddresses[0]"


def test_a_public_address_may_lie_in_the_subnet_of_the_host() -> None:
    check_topology(topology(public_addresses=["198.51.100.77"]), AROUND)


def test_public_addresses_need_an_uplink_and_differ() -> None:
    with pytest.raises(InvalidArgument, match="without an uplink"):
        asked = topology(public_addresses=["198.51.100.7"], uplink=UplinkMode.NONE)
        check_topology(asked, AROUND)
    with pytest.raises(InvalidArgument, match="named twice"):
        check_topology(topology(public_addresses=["198.51.100.7"] * 2), AROUND)


@pytest.mark.parametrize(
    ("ours", "theirs", "field"),
    [
        ({"uplink": UplinkMode.ROUTED}, {"uplink": UplinkMode.ROUTED}, "spec.subnet"),
        (
            {"public_addresses": ["198.51.100.7"]},
            {"public_addresses": ["198.51.100.8", "198.51.100.7"]},
            "spec.publicAddresses",
        ),
        (
            {"public_addresses": ["10.9.0.7"]},
            {"uplink": UplinkMode.ROUTED, "subnet": "10.9.0.0/16"},
            "spec.publicAddresses",
        ),
        (
            {"uplink": UplinkMode.ROUTED, "subnet6": "fd00:7::/64", "subnet": "10.1.0.0/24"},
            {"uplink": UplinkMode.ROUTED, "subnet6": "fd00:7::/112", "subnet": "10.2.0.0/24"},
            "spec.subnet6",
        ),
    ],
)
def test_what_the_host_routes_belongs_to_one_network(
    ours: dict[str, object], theirs: dict[str, object], field: str
) -> None:
    other = topology(network_id=UID.replace("0b", "0c"), name="theirs", tenant="acme", **theirs)
    with pytest.raises(InUse, match=r"network theirs \(tenant acme\)") as refused:
        refuse_overlap(topology(**ours), [other])
    assert refused.value.field == field


def test_subnets_that_are_translated_may_overlap() -> None:
    refuse_overlap(topology(), [topology(uplink=UplinkMode.ROUTED), topology()])


def test_a_record_and_a_nic_do_not_share_a_name() -> None:
    network = topology(records=[DnsRecord(name="db", addresses=["10.0.0.9"])])
    with pytest.raises(AlreadyExists, match="'db' belongs to NIC n1") as refused:
        refuse_taken_names(network, {"db": "n1"})
    assert refused.value.field == "spec.dns.records[0].name"
    with pytest.raises(AlreadyExists, match="'db' is a static record of network net"):
        refuse_recorded_name(network, "db")
    refuse_recorded_name(network, "web")


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (DnsRecord(name="a\nb", addresses=["10.0.0.9"]), "spec.dns.records[0].name"),
        (DnsRecord(name="a b", addresses=["10.0.0.9"]), "spec.dns.records[0].name"),
        (DnsRecord(name="a,b", addresses=["10.0.0.9"]), "spec.dns.records[0].name"),
        (DnsRecord(name="*", addresses=["10.0.0.9"]), "spec.dns.records[0].name"),
        (DnsRecord(name="-a", addresses=["10.0.0.9"]), "spec.dns.records[0].name"),
        (DnsRecord(name="a..b", addresses=["10.0.0.9"]), "spec.dns.records[0].name"),
        (DnsRecord(name="ä", addresses=["10.0.0.9"]), "spec.dns.records[0].name"),
        (DnsRecord(name="a" * 250, addresses=["10.0.0.9"]), "spec.dns.records[0].name"),
        (
            DnsRecord(name="a", addresses=["10.0.0.9", "10.0.0.300"]),
            "spec.dns.records[0].addresses[1]",
        ),
        (
            DnsRecord(name="a", addresses=["fd00::1%x\nserver=1"]),
            "spec.dns.records[0].addresses[0]",
        ),
    ],
)
def test_a_record_holds_names_and_addresses_alone(record: DnsRecord, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_topology(topology(records=[record]), AROUND)
    assert refused.value.field == field


def test_a_record_stands_once() -> None:
    record = DnsRecord(name="a", addresses=["10.0.0.9"])
    with pytest.raises(InvalidArgument, match="named twice"):
        check_topology(topology(records=[record, record]), AROUND)


@pytest.mark.parametrize("domain", ["a b", "a\nserver=1.2.3.4", "a..b", "-a", "a_b", ""])
def test_a_search_domain_is_a_domain(domain: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_topology(topology(search=["ok.test", domain]), AROUND)
    assert refused.value.field == "spec.dns.search[1]"


def test_an_ipv6_forwarder_needs_an_ipv6_network() -> None:
    with pytest.raises(InvalidArgument, match="subnet6") as refused:
        check_topology(topology(forwarders=["9.9.9.9", "2620:fe::fe"]), AROUND)
    assert refused.value.field == "spec.dns.forwarders[1]"
    check_topology(topology(forwarders=["2620:fe::fe"], subnet6="fd00:7::/64"), AROUND)


@pytest.mark.parametrize("forwarder", ["127.0.0.53", "::1", "fe80::1", "0.0.0.0", "ff02::1", "x"])
def test_a_forwarder_can_be_reached_from_a_network(forwarder: str) -> None:
    with pytest.raises(InvalidArgument):
        check_topology(topology(forwarders=[forwarder], subnet6="fd00:7::/64"), AROUND)
