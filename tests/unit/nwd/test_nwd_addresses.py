"""Which addresses a network and a NIC may have."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Network

import pytest

from chv.common.errors import InUse, InvalidArgument, ResourceExhausted
from chv.nwd.addresses import (
    allocate,
    allocate6,
    check_address,
    check_address6,
    check_nic_mac,
    free_slot,
    mac_of,
    uplink_addresses,
    uplink_addresses6,
)

POOL = "169.254.64.0/18"
SUBNET, GATEWAY = IPv4Network("10.0.0.0/29"), IPv4Address("10.0.0.1")
UID = "0b7f7a4e-0000-4000-8000-000000000001"


def test_addresses_come_lowest_first_and_the_longest_free_before_newer_ones() -> None:
    assert allocate(SUBNET, GATEWAY, [[]], []) == "10.0.0.2"
    assert allocate(SUBNET, GATEWAY, [["10.0.0.2"]], ["10.0.0.3"]) == "10.0.0.4"
    used = ["10.0.0.2", "10.0.0.4", "10.0.0.5"]
    assert allocate(SUBNET, GATEWAY, [used], ["10.0.0.6", "10.0.0.3"]) == "10.0.0.6"


def test_an_exhausted_subnet_says_how_many_there_are() -> None:
    used = [f"10.0.0.{n}" for n in range(2, 7)]
    with pytest.raises(ResourceExhausted, match="all 5 addresses"):
        allocate(SUBNET, GATEWAY, [used], [])


def test_a_released_address_of_an_earlier_subnet_is_not_given() -> None:
    used = [f"10.0.0.{n}" for n in range(2, 7)]
    with pytest.raises(ResourceExhausted):
        allocate(SUBNET, GATEWAY, [used], ["10.9.0.2"])


def test_a_large_subnet_is_not_searched_through() -> None:
    huge = IPv4Network("10.0.0.0/8")
    used = [str(huge.network_address + n) for n in range(2, 200)]
    assert allocate(huge, GATEWAY, [used], []) == "10.0.0.200"


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


# --- IPv6
SUBNET6 = IPv6Network("fd00:7::/112")


def test_an_ipv6_address_has_the_number_of_the_ipv4_one_where_it_is_free() -> None:
    assert allocate6(SUBNET6, 10, [[]]) == "fd00:7::a"
    assert allocate6(SUBNET6, 10, [["fd00:7::a"]]) == "fd00:7::2"
    assert allocate6(SUBNET6, 10, [[]], released=["fd00:7::a"]) == "fd00:7::2"
    assert allocate6(SUBNET6, 1, [[]]) == "fd00:7::2", "the first one is the gateway"
    assert allocate6(SUBNET6, 1 << 20, [["fd00:7::2"]]) == "fd00:7::3"


def test_an_ipv6_address_that_was_given_back_comes_last() -> None:
    used = [f"fd00:7::{number:x}" for number in range(2, 1 << 16)]
    free = used.pop(77)
    assert allocate6(SUBNET6, 5, [used], [free]) == free
    with pytest.raises(ResourceExhausted, match="fd00:7::/112"):
        allocate6(SUBNET6, 5, [[*used, free]])


def test_an_ipv6_address_is_written_one_way() -> None:
    assert check_address6("fd00:7:0:0::00a", SUBNET6, {}) == "fd00:7::a"


@pytest.mark.parametrize(
    ("address", "kind", "words"),
    [
        ("fd00:8::5", InvalidArgument, "not in"),
        ("fd00:7::", InvalidArgument, "any router"),
        ("fd00:7::1", InvalidArgument, "gateway"),
        ("10.0.0.5", InvalidArgument, "not an IPv6"),
        ("fd00:7::5%eth0", InvalidArgument, "not an address"),
        ("x", InvalidArgument, "not an address"),
        ("fd00:7:0::9", InUse, "NIC owner"),
    ],
)
def test_an_ipv6_address_that_cannot_be_had_is_refused(
    address: str, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        check_address6(address, SUBNET6, {"fd00:7::9": "owner"})


def test_a_slot_has_a_pair_in_each_pool() -> None:
    assert uplink_addresses6("fd63:6876::/112", 3) == ("fd63:6876::6", "fd63:6876::7")
