"""What an exposure may have: addresses, ports and targets beside those of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chv.common.errors import AlreadyExists, ChvError, InUse, InvalidArgument, NotFound
from chv.common.wire.nwd import L2Mode
from chv.common.wire.nwd_policy import IpProtocol
from chv.nwd.exposure_rules import Checks
from chv.nwd.records import Network
from tests.unit.nwd.nwd_rows import (
    IDS,
    exposure,
    exposure_row,
    network,
    nic,
    open_parts,
)

NODE = frozenset({"192.0.2.1", "192.0.2.2", "2001:db8::1"})


async def check(
    path: Path, net: Network, changes: dict[str, Any], *others: tuple[Network, dict[str, Any]]
) -> list[str]:
    async with open_parts(path / "db") as parts:
        await parts.records.put_network(net)
        await parts.records.put_nic(nic(net.network_id, 9))
        for owner, fields in others:
            if owner.network_id not in parts.records.networks:
                await parts.records.put_network(owner)
            made = exposure(owner.network_id, **fields)
            host = [text for text in made.addresses if text in NODE]
            await parts.records.put_exposure(exposure_row(made, host_addresses=host))
        return Checks(parts).check(exposure(net.network_id, **changes), net, NODE)


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"protocol": IpProtocol.ICMP}, InvalidArgument, "exposure.protocol"),
        ({"protocol": IpProtocol.ANY}, InvalidArgument, "exposure.protocol"),
        ({"addresses": ["203.0.113.5"]}, InvalidArgument, "exposure.addresses[0]"),
        ({"addresses": ["10.0.0.1"]}, InvalidArgument, "exposure.addresses[0]"),
        ({"addresses": ["10.0.0.255"]}, InvalidArgument, "exposure.addresses[0]"),
        ({"addresses": ["192.0.2.1", "10.0.0.9"]}, InUse, "exposure.addresses[1]"),
        ({"addresses": ["192.0.2.1", "192.0.2.1"]}, InvalidArgument, "exposure.addresses[1]"),
        ({"addresses": ["2001:db8::0001"]}, InvalidArgument, "exposure.addresses[0]"),
        ({"sources": ["10.0.0.1/8"]}, InvalidArgument, "exposure.sources[0]"),
        ({"port_end": 79}, InvalidArgument, "exposure.port_end"),
        ({"port_end": 80 + 1024}, InvalidArgument, "exposure.port_end"),
        ({"port_end": 90, "target_port": 8080}, InvalidArgument, "exposure.target_port"),
        ({"targets": [IDS.uid()]}, NotFound, "exposure.targets[0]"),
    ],
)
async def test_what_cannot_be_is_refused_by_its_field(
    tmp_path: Path, changes: dict[str, Any], kind: type[ChvError], field: str
) -> None:
    with pytest.raises(kind) as caught:
        await check(tmp_path, network(), changes)
    assert caught.value.field == field


async def test_addresses_of_the_node_are_told_from_public_and_inner_ones(tmp_path: Path) -> None:
    net = network(public_addresses=["198.51.100.7"])
    addresses = ["192.0.2.1", "198.51.100.7", "10.0.0.200"]
    assert await check(tmp_path, net, {"addresses": addresses}) == ["192.0.2.1"]


async def test_a_target_on_another_network_is_refused(tmp_path: Path) -> None:
    async with open_parts(tmp_path / "db") as parts:
        net, other = network(), network(2)
        stranger = nic(other.network_id, 5)
        for row in (net, other):
            await parts.records.put_network(row)
        await parts.records.put_nic(stranger)
        with pytest.raises(InvalidArgument, match="another network"):
            Checks(parts).check(exposure(net.network_id, targets=[stranger.nic_id]), net, NODE)


async def test_the_node_needs_an_uplink_of_the_network_to_lead_to_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no uplink"):
        await check(tmp_path, network(None, uplink="none"), {})


async def test_bridged_guests_have_no_exposure_in_their_subnet(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="bridged"):
        await check(tmp_path, network(l2=L2Mode.OPEN), {"addresses": ["10.0.0.200"]})


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ({"addresses": ["192.0.2.1"], "port": 80}, {"addresses": ["192.0.2.1"], "port": 80}),
        ({"port": 80, "port_end": 90}, {"port": 85}),
        ({"port": 85}, {"port": 80, "port_end": 90}),
    ],
)
async def test_a_port_of_an_address_belongs_to_one_exposure_on_the_node(
    tmp_path: Path, mine: dict[str, Any], other: dict[str, Any]
) -> None:
    uid = IDS.uid()
    with pytest.raises(AlreadyExists, match=uid):
        await check(tmp_path, network(), mine, (network(2), {"exposure_id": uid, **other}))


async def test_two_addresses_of_the_node_cannot_share_a_port_in_one_network(
    tmp_path: Path,
) -> None:
    net = network()
    with pytest.raises(AlreadyExists):
        await check(
            tmp_path, net, {"addresses": ["192.0.2.1"]}, (net, {"addresses": ["192.0.2.2"]})
        )


async def test_what_does_not_meet_goes_side_by_side(tmp_path: Path) -> None:
    net = network()
    others: list[tuple[Network, dict[str, Any]]] = [
        (net, {"port": 81}),
        (net, {"protocol": IpProtocol.UDP}),
        (net, {"addresses": ["2001:db8::1"]}),
        (network(2), {"addresses": ["192.0.2.2"]}),
        (network(3), {"addresses": ["10.0.0.200"]}),  # the same text, another tenant's subnet
    ]
    changes = {"addresses": ["192.0.2.1", "10.0.0.200"]}
    assert await check(tmp_path, net, changes, *others) == ["192.0.2.1"]
