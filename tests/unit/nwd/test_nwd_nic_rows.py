"""What the record of a NIC may hold beside what others hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from chv.common.errors import ChvError, Conflict, InUse, InvalidArgument, NotFound, PermissionDenied
from chv.common.wire.nwd import L2Mode, Shape, Topology, UplinkMode
from chv.nwd.nic_rows import NicRows
from chv.nwd.parts import Parts
from chv.nwd.uses import refuse_orphans
from tests.unit.nwd.nwd_rows import (
    BOOT,
    IDS,
    attach,
    exposure,
    exposure_row,
    group,
    network,
    nic,
    open_parts,
    topology,
)


def rows_of(parts: Parts) -> NicRows:
    return NicRows(parts.layout, parts.records, parts.boot_id)


async def test_an_unknown_group_is_named(tmp_path: Path) -> None:
    async with open_parts(tmp_path / "db") as parts:
        net, known, unknown = network(), group(), IDS.uid()
        await parts.records.put_group(known)
        request = attach(net.network_id, security_groups=[known.group.group_id, unknown])
        with pytest.raises(NotFound, match=unknown) as caught:
            rows_of(parts).make(request, None, net)
        assert caught.value.field == "security_groups[1]"


async def test_a_group_of_another_tenant_is_refused(tmp_path: Path) -> None:
    async with open_parts(tmp_path / "db") as parts:
        net, other = network(), group(tenant="other")
        await parts.records.put_group(other)
        request = attach(net.network_id, security_groups=[other.group.group_id])
        with pytest.raises(PermissionDenied):
            rows_of(parts).make(request, None, net)


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"public_address": "192.0.2.9"}, InvalidArgument, "public_address"),
        ({"address6": "fd00::5"}, InvalidArgument, "address6"),
        ({"address": "10.0.0.200"}, InUse, "address"),
    ],
)
async def test_what_the_network_does_not_have_is_refused(
    tmp_path: Path, changes: dict[str, Any], kind: type[ChvError], field: str
) -> None:
    async with open_parts(tmp_path / "db") as parts:
        net = network(public_addresses=["192.0.2.8"])
        await parts.records.put_network(net)
        virtual = exposure(net.network_id, addresses=["10.0.0.200"])
        await parts.records.put_exposure(exposure_row(virtual))
        with pytest.raises(kind) as caught:
            rows_of(parts).make(attach(net.network_id, **changes), None, net)
        assert caught.value.field == field


async def test_addresses_of_both_families_are_kept_and_the_longest_free_comes_back(
    tmp_path: Path,
) -> None:
    async with open_parts(tmp_path / "db") as parts:
        net = network(subnet="10.0.0.0/29", subnet6="fd00::/64")
        await parts.records.put_network(net)
        made = []
        for _ in range(5):
            row = rows_of(parts).make(attach(net.network_id, hostname=IDS.uid()), None, net)
            await parts.records.put_nic(row)
            made.append(row)
        assert len({row.address6 for row in made}) == 5
        again = attach(
            net.network_id, 2, nic_id=made[1].nic_id, vm_id=made[1].vm_id, hostname="renamed"
        )
        assert rows_of(parts).make(again, made[1], net).addresses == made[1].addresses
        for gone in (made[3], made[0]):
            await parts.records.drop_nic(gone)
        released = parts.records.released(net.network_id)
        assert list(released) == [*made[3].addresses, *made[0].addresses]
        following = rows_of(parts).make(attach(net.network_id), None, net)
        assert following.address == made[3].address
        assert following.address6 not in {row.address6 for row in made}, "there are fresh ones"


async def test_two_nics_of_a_network_cannot_be_recorded_with_one_ipv6_address(
    tmp_path: Path,
) -> None:
    async with open_parts(tmp_path / "db") as parts:
        net = network(subnet6="fd00::/64")
        await parts.records.put_network(net)
        await parts.records.put_nic(nic(net.network_id, 2, address6="fd00::2"))
        await parts.records.put_nic(nic(net.network_id, 3))
        await parts.records.put_nic(nic(net.network_id, 4))
        with pytest.raises(Conflict):
            await parts.records.put_nic(nic(net.network_id, 5, address6="fd00::2"))


async def test_the_same_generation_with_another_content_is_refused(tmp_path: Path) -> None:
    async with open_parts(tmp_path / "db") as parts:
        net, one = network(), group()
        await parts.records.put_group(one)
        request = attach(net.network_id, security_groups=[one.group.group_id])
        row = rows_of(parts).make(request, None, net)
        same: dict[str, Any] = {"nic_id": request.nic_id, "vm_id": request.vm_id}
        uids = [one.group.group_id]
        again = attach(net.network_id, security_groups=uids, **same)
        assert rows_of(parts).make(again, row, net) == row
        others: tuple[dict[str, Any], ...] = (
            {},
            {"security_groups": uids, "shape": Shape(egress_bps=1000)},
        )
        for changes in others:
            with pytest.raises(Conflict):
                rows_of(parts).make(attach(net.network_id, **(same | changes)), row, net)
        newer = rows_of(parts).make(attach(net.network_id, 2, **same), row, net)
        assert (newer.groups, newer.unswept, newer.boot_id) == ([], True, BOOT)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"public_addresses": []}, "spec.publicAddresses"),
        ({"tenant": "another"}, "tenant"),
        ({"uplink": "none"}, "spec.uplink"),
        ({"subnet": "10.1.0.0/24"}, "spec"),
        ({"l2": L2Mode.OPEN}, "spec.l2"),
        ({"mtu": 1400}, ""),
    ],
)
def test_a_network_keeps_what_others_rest_on(changes: dict[str, Any], field: str) -> None:
    before = topology(public_addresses=["192.0.2.8"])
    fields = msgspec.structs.asdict(before) | {"uplink": UplinkMode.NAT} | changes
    after = Topology(**(fields | {"uplink": UplinkMode(fields["uplink"])}))
    port = nic(before.network_id, 5, public_address="192.0.2.8", groups=["g"])
    rows = [
        exposure_row(exposure(before.network_id), host_addresses=["192.0.2.1"]),
        exposure_row(exposure(before.network_id, addresses=["10.0.0.200"])),
    ]
    if not field:
        refuse_orphans(after, before, [port], rows)
        return
    with pytest.raises(InUse) as caught:
        refuse_orphans(after, before, [port], rows)
    assert caught.value.field == field
