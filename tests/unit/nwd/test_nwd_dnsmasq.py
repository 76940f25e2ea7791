"""What dnsmasq reads: made of checked values alone, and accepted by dnsmasq itself."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

import pytest

from chv.common.errors import InvalidArgument
from chv.nwd import dnsmasq
from chv.nwd.dnsmasq import DnsName, DnsNetwork, DnsNic

NETWORK = DnsNetwork(
    directory=Path("/run/chv/abc123/net/0b7f7a4e00"),
    bridge="br0",
    subnet="10.0.0.0/24",
    gateway="10.0.0.1",
    mtu=1450,
    domain="net.test",
    has_uplink=True,
    forwarders=("9.9.9.9", "149.112.112.112"),
    lease_s=3600,
)
ONE = DnsNic("02:00:00:00:00:01", "10.0.0.10", "one")
TWO = DnsNic("02:00:00:00:00:02", "10.0.0.9", "two")

NETWORK6 = replace(NETWORK, subnet6="fd00:7::/64", gateway6="fd00:7::1", search=("corp.test",))


def test_every_nic_has_a_fixed_address_whatever_its_client_id() -> None:
    files = dnsmasq.files([ONE, TWO], NETWORK)
    assert files["hosts"].splitlines() == [
        "02:00:00:00:00:02,id:*,10.0.0.9,two,3600",
        "02:00:00:00:00:01,id:*,10.0.0.10,one,3600",
    ]
    assert files["names"].splitlines() == [
        "10.0.0.9 two.net.test two",
        "10.0.0.10 one.net.test one",
    ]


def test_ipv6_is_managed_and_told_by_advertisements() -> None:
    lines = dnsmasq.configuration(NETWORK6).splitlines()
    assert {
        "enable-ra",
        "dhcp-range=fd00:7::,static,64,3600",
        "ra-param=br0,mtu:1450,120,1800",
        "dhcp-option=option6:dns-server,[fd00:7::1]",
        "dhcp-option=option6:domain-search,net.test,corp.test",
        "dhcp-option=option:domain-search,net.test,corp.test",
        "local=/0.0.0.0.0.0.0.0.7.0.0.0.0.0.d.f.ip6.arpa/",
    } <= set(lines)
    assert "ra-param=br0,mtu:1450,120,0" in dnsmasq.configuration(
        replace(NETWORK6, has_uplink=False)
    )
    assert "ra" not in {line.partition("-")[0] for line in dnsmasq.configuration(NETWORK)}


def test_a_nic_has_both_its_addresses_by_its_mac() -> None:
    files = dnsmasq.files([replace(ONE, address6="fd00:7::a")], NETWORK6)
    assert files["hosts"] == "02:00:00:00:00:01,id:*,10.0.0.10,[fd00:7::a],one,3600\n"
    assert files["names"].splitlines() == [
        "10.0.0.10 one.net.test one",
        "fd00:7::a one.net.test one",
    ]


def test_static_records_follow_the_nics() -> None:
    names = [DnsName("db", ("10.0.0.99", "fd00:7::99")), DnsName("a.b", ("192.0.2.1",))]
    files = dnsmasq.files([ONE], replace(NETWORK, names=names))
    assert files["names"].splitlines() == [
        "10.0.0.10 one.net.test one",
        "10.0.0.99 db.net.test db",
        "192.0.2.1 a.b.net.test",
        "fd00:7::99 db.net.test db",
    ]


@pytest.mark.parametrize("length", range(64, 113))
def test_there_are_never_many_ipv6_reverse_zones(length: int) -> None:
    zones = dnsmasq.reverse_zones6(IPv6Network(f"fd00:7::/{length}"))
    assert 1 <= len(zones) <= 8
    assert all(zone.endswith("7.0.0.0.0.0.d.f.ip6.arpa") for zone in zones)


def test_nothing_watches_files_nor_writes_leases_nor_answers_strangers() -> None:
    lines = dnsmasq.configuration(NETWORK).splitlines()
    assert {"no-resolv", "no-hosts", "no-ping", "leasefile-ro", "bind-interfaces"} <= set(lines)
    assert "dhcp-range=10.0.0.0,static,255.255.255.0,3600" in lines
    assert "dhcp-option-force=option:mtu,1450" in lines
    assert not [line for line in lines if line.startswith(("dhcp-hostsdir", "hostsdir"))]


def test_without_uplink_there_is_no_router_and_no_forwarder() -> None:
    lines = dnsmasq.configuration(replace(NETWORK, has_uplink=False)).splitlines()
    assert "dhcp-option=option:router" in lines
    assert not [line for line in lines if line.startswith("server=")]


@pytest.mark.parametrize(
    ("subnet", "zones"),
    [
        ("10.1.2.0/24", ["2.1.10.in-addr.arpa"]),
        ("10.1.2.64/26", ["2.1.10.in-addr.arpa"]),
        ("10.1.0.0/16", ["1.10.in-addr.arpa"]),
        ("10.1.4.0/23", ["4.1.10.in-addr.arpa", "5.1.10.in-addr.arpa"]),
        ("10.0.0.0/8", ["10.in-addr.arpa"]),
    ],
)
def test_the_reverse_of_the_subnet_is_ours(subnet: str, zones: list[str]) -> None:
    assert dnsmasq.reverse_zones(IPv4Network(subnet)) == zones


@pytest.mark.parametrize("length", range(8, 31))
def test_there_are_never_many_reverse_zones(length: int) -> None:
    assert 1 <= len(dnsmasq.reverse_zones(IPv4Network(f"10.0.0.0/{length}"))) <= 128


@pytest.mark.parametrize(
    "nic",
    [
        replace(ONE, hostname="a\ndhcp-script=/bin/sh"),
        replace(ONE, hostname="a,b"),
        replace(ONE, hostname="a b"),
        replace(ONE, hostname="a.b"),
        replace(ONE, hostname="-a"),
        replace(ONE, mac="02:00:00:00:00:01,ignore"),
        replace(ONE, address="10.0.0.1,"),
        replace(ONE, address6="fd00::1%\ndhcp-script=/bin/sh"),
        replace(ONE, address6="fd00::1],x"),
    ],
)
def test_a_nic_cannot_add_a_line_or_a_field(nic: DnsNic) -> None:
    with pytest.raises((InvalidArgument, ValueError)):
        dnsmasq.files([nic], NETWORK)


@pytest.mark.parametrize(
    "network",
    [
        replace(NETWORK, domain="a\nserver=1.2.3.4"),
        replace(NETWORK, domain="a/#"),
        replace(NETWORK, forwarders=("9.9.9.9#53",)),
        replace(NETWORK, forwarders=("/x/9.9.9.9",)),
        replace(NETWORK, directory=Path("/run/a\nb")),
        replace(NETWORK, gateway="x"),
        replace(NETWORK, search=("a b",)),
        replace(NETWORK, search=("a,b",)),
        replace(NETWORK, forwarders=("fe80::1%\n",)),
        replace(NETWORK6, gateway6="fd00::1%\n"),
    ],
)
def test_a_network_cannot_add_a_line(network: DnsNetwork) -> None:
    with pytest.raises((InvalidArgument, ValueError)):
        dnsmasq.configuration(network)


@pytest.mark.skipif(shutil.which("dnsmasq") is None, reason="needs dnsmasq")
@pytest.mark.parametrize("has_uplink", [True, False])
def test_dnsmasq_accepts_the_configuration(tmp_path: Path, has_uplink: bool) -> None:
    network = replace(
        NETWORK6, directory=tmp_path, has_uplink=has_uplink, subnet="10.0.0.0/12",
        subnet6="fd00:7::/99", forwarders=("9.9.9.9", "2620:fe::fe"),
        names=[DnsName("a.b", ("192.0.2.1",))],
    )  # fmt: skip
    nics = [replace(ONE, address6="fd00:7::a"), TWO]
    for name, text in dnsmasq.files(nics, network).items():
        (tmp_path / name).write_text(text)
    path = tmp_path / "conf"
    path.write_text(dnsmasq.configuration(network))
    checked = subprocess.run(
        ["dnsmasq", "--test", f"--conf-file={path}"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


def test_metadata_has_a_route_also_where_there_is_no_default_one() -> None:
    route = "dhcp-option=option:classless-static-route,169.254.169.254/32,10.0.0.1"
    asked = replace(NETWORK, by_gateway=("169.254.169.254",))
    assert route in dnsmasq.configuration(replace(asked, has_uplink=False)).splitlines()
    assert route not in dnsmasq.configuration(asked), "it would replace the default route"
