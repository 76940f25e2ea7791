"""Addresses: a model of attach and detach, and the rule that renderers take checked text only."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from chv.common.errors import ChvError, InvalidArgument, ResourceExhausted
from chv.nwd import dnsmasq
from chv.nwd.addresses import allocate, check_subnet, mac_of
from chv.nwd.dnsmasq import DnsNetwork, DnsNic
from chv.nwd.nft import text

SUBNET, GATEWAY = IPv4Network("10.0.0.0/28"), IPv4Address("10.0.0.1")
CAPACITY = SUBNET.num_addresses - 3
DNS = DnsNetwork(
    directory=Path("/run/net"),
    bridge="br0",
    subnet="10.0.0.0/24",
    gateway="10.0.0.1",
    mtu=1450,
    domain="net.test",
    has_uplink=True,
    forwarders=(),
    lease_s=3600,
)


@given(st.lists(st.integers(0, 1000), max_size=80))
def test_an_address_has_one_owner_and_the_longest_free_is_given(choices: list[int]) -> None:
    """Odd: detach one of the attached; even: attach."""
    used: list[str] = []
    released: list[str] = []
    seen: set[str] = set()
    for choice in choices:
        if choice % 2 and used:
            freed = used.pop(choice % len(used))
            released.append(freed)
            continue
        if len(used) == CAPACITY:
            try:
                allocate(SUBNET, GATEWAY, [used], released)
            except ResourceExhausted:
                continue
            raise AssertionError("more addresses than there are")
        address = allocate(SUBNET, GATEWAY, [used], released)
        assert address not in used
        assert IPv4Address(address) in SUBNET
        assert address != str(GATEWAY)
        assert address not in seen or (len(seen) == CAPACITY and address == released[0])
        if address in released:
            released.remove(address)
        seen.add(address)
        used.append(address)


@given(st.text(max_size=40))
def test_no_text_becomes_an_element_or_a_line_but_what_is_valid(value: str) -> None:
    for render in (text.link, text.mac, text.address, text.subnet, text.comment):
        try:
            rendered = render(value)
        except (InvalidArgument, ValueError):
            continue
        assert "\n" not in rendered
        assert ";" not in rendered
        assert "}" not in rendered


@given(st.text(max_size=30), st.text(max_size=30))
def test_a_hosts_line_has_five_fields_whatever_the_name(mac: str, hostname: str) -> None:
    try:
        files = dnsmasq.files([DnsNic(mac, "10.0.0.2", hostname)], DNS)
    except (InvalidArgument, ValueError):
        return
    line = files[dnsmasq.HOSTS]
    assert line.count("\n") == 1
    assert line.count(",") == 4


@given(st.text(max_size=24))
def test_a_subnet_is_a_network_address_or_an_error(value: str) -> None:
    try:
        subnet = check_subnet(value)
    except ChvError as error:
        assert error.field == "spec.subnet"
        return
    assert str(subnet) == value


@given(st.uuids())
def test_macs_are_local_and_unicast(uid: object) -> None:
    first = int(mac_of(str(uid))[:2], 16)
    assert first & 3 == 2
