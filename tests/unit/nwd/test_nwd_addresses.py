"""Which addresses a network and a NIC may have."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest

from chv.common.errors import InUse, InvalidArgument, ResourceExhausted
from chv.common.wire.nwd import Topology
from chv.nwd.addresses import (
    Surroundings,
    allocate,
    check_address,
    check_nic_mac,
    check_topology,
    free_slot,
    mac_of,
    uplink_addresses,
)

POOL = "169.254.64.0/18"
SUBNET, GATEWAY = IPv4Network("10.0.0.0/29"), IPv4Address("10.0.0.1")
UID = "0b7f7a4e-0000-4000-8000-000000000001"


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
    assert str(check_topology(topology(), around)) == "10.0.0.1"
    assert str(check_topology(topology(gateway="10.0.0.254"), around)) == "10.0.0.254"


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


def test_addresses_come_lowest_first_and_the_longest_free_before_newer_ones() -> None:
    assert allocate(SUBNET, GATEWAY, [], []) == "10.0.0.2"
    assert allocate(SUBNET, GATEWAY, ["10.0.0.2"], ["10.0.0.3"]) == "10.0.0.4"
    used = ["10.0.0.2", "10.0.0.4", "10.0.0.5"]
    assert allocate(SUBNET, GATEWAY, used, ["10.0.0.6", "10.0.0.3"]) == "10.0.0.6"


def test_an_exhausted_subnet_says_how_many_there_are() -> None:
    used = [f"10.0.0.{n}" for n in range(2, 7)]
    with pytest.raises(ResourceExhausted, match="all 5 addresses"):
        allocate(SUBNET, GATEWAY, used, [])


def test_a_released_address_of_an_earlier_subnet_is_not_given() -> None:
    used = [f"10.0.0.{n}" for n in range(2, 7)]
    with pytest.raises(ResourceExhausted):
        allocate(SUBNET, GATEWAY, used, ["10.9.0.2"])


def test_a_large_subnet_is_not_searched_through() -> None:
    huge = IPv4Network("10.0.0.0/8")
    used = [str(huge.network_address + n) for n in range(2, 200)]
    assert allocate(huge, GATEWAY, used, []) == "10.0.0.200"


def test_a_taken_address_names_its_owner() -> None:
    with pytest.raises(InUse, match="nic-7") as refused:
        check_address("10.0.0.3", SUBNET, GATEWAY, {"10.0.0.3": "nic-7"})
    assert refused.value.resource == "nic-7"


@pytest.mark.parametrize(
    "text", ["10.0.0.0", "10.0.0.7", "10.0.0.1", "10.0.1.3", "x", "10.0.0.3\n"]
)
def test_an_unusable_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        check_address(text, SUBNET, GATEWAY, {})


def test_a_mac_follows_from_the_uid_and_is_local_and_unicast() -> None:
    first = mac_of(UID)
    assert first == mac_of(UID) != mac_of(UID.replace("1", "2"))
    assert first.startswith("02:")
    assert check_nic_mac(first, "02:00:00:00:00:00") == first
    with pytest.raises(InvalidArgument, match="gateway"):
        check_nic_mac(first, first)


def test_an_uplink_slot_is_a_pair_of_the_pool() -> None:
    assert uplink_addresses(POOL, 0) == ("169.254.64.0", "169.254.64.1")
    assert uplink_addresses(POOL, 8191) == ("169.254.127.254", "169.254.127.255")


def test_a_slot_that_a_record_or_the_host_uses_is_passed_over() -> None:
    first = free_slot(POOL, UID, [], set())
    assert free_slot(POOL, UID, [first], set()) == (first + 1) % 8192
    occupied = {uplink_addresses(POOL, first)[1]}
    assert free_slot(POOL, UID, [], occupied) == (first + 1) % 8192


def test_a_used_up_pool_is_told() -> None:
    with pytest.raises(ResourceExhausted, match="all 2 uplinks"):
        free_slot("192.168.0.0/30", UID, [0, 1], set())
