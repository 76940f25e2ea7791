"""What nwd remembers is durable before it is believed, and two owners cannot be recorded."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from chv.common.errors import Conflict
from chv.common.ids import Ids
from chv.common.store import Store
from chv.common.wire.nwd import Topology
from chv.nwd import graves
from chv.nwd.records import MIGRATIONS, Network, Nic, Records, Worker

IDS = Ids()


def network(slot: int | None = 1) -> Network:
    topology = Topology(
        network_id=IDS.uid(),
        name="net",
        tenant="default",
        subnet="10.0.0.0/24",
        gateway="10.0.0.1",
        dns_domain="net.test",
    )
    return Network(topology=topology, generation=1, boot_id="b", uplink_slot=slot)


def nic(network_id: str, address: str, mac: str = "") -> Nic:
    return Nic(
        nic_id=IDS.uid(),
        network_id=network_id,
        vm_id=IDS.uid(),
        generation=1,
        hostname="one",
        mac=mac or f"02:00:00:00:00:{int(address.rpartition('.')[2]):02x}",
        address=address,
        owner_uid=1,
        guest_ports=[22],
        boot_id="b",
    )


async def test_everything_comes_back_after_a_reopen(tmp_path: Path) -> None:
    row = network()
    port = nic(row.network_id, "10.0.0.2")
    worker = Worker(network_id=row.network_id, worker_id="w", conf_digest="c", bridge_index=3)
    async with Store.open(tmp_path / "db", MIGRATIONS) as store:
        records = await Records.load(store)
        await records.put_network(row)
        await records.put_nic(port)
        await records.put_worker(worker)
        await records.bury("gone", 7)
    async with Store.open(tmp_path / "db", MIGRATIONS) as store:
        records = await Records.load(store)
        assert records.networks == {row.network_id: row}
        assert records.nics == {port.nic_id: port}
        assert records.workers == {row.network_id: worker}
        assert records.tombstones == {"gone": 7}


async def test_an_address_a_mac_and_an_uplink_have_one_owner(tmp_path: Path) -> None:
    async with Store.open(tmp_path / "db", MIGRATIONS) as store:
        records = await Records.load(store)
        one, two = network(1), network(2)
        await records.put_network(one)
        await records.put_network(two)
        with pytest.raises(Conflict):
            await records.put_network(network(1))
        first = nic(one.network_id, "10.0.0.2")
        await records.put_nic(first)
        with pytest.raises(Conflict):
            await records.put_nic(nic(one.network_id, "10.0.0.2", "02:00:00:00:00:99"))
        with pytest.raises(Conflict):
            await records.put_nic(nic(one.network_id, "10.0.0.3", first.mac))
        await records.put_nic(nic(two.network_id, "10.0.0.2", first.mac))
        assert len(records.nics) == 2, "what was refused is not believed either"


async def test_released_addresses_keep_their_order(tmp_path: Path) -> None:
    async with Store.open(tmp_path / "db", MIGRATIONS) as store:
        records = await Records.load(store)
        row = network()
        await records.put_network(row)
        ports = [nic(row.network_id, f"10.0.0.{n}") for n in (2, 3, 4)]
        for port in ports:
            await records.put_nic(port)
        for index in (1, 0, 2):
            await records.drop_nic(ports[index])
        order = ["10.0.0.3", "10.0.0.2", "10.0.0.4"]
        assert list(records.released(row.network_id)) == order
        assert list((await Records.load(store)).released(row.network_id)) == order
        await records.put_nic(msgspec.structs.replace(ports[0], nic_id=IDS.uid()))
        assert list(records.released(row.network_id)) == ["10.0.0.3", "10.0.0.4"]
        assert records.tombstones[ports[0].nic_id] == 1


async def test_a_tombstone_never_goes_back(tmp_path: Path) -> None:
    async with Store.open(tmp_path / "db", MIGRATIONS) as store:
        records = await Records.load(store)
        await records.bury("x", 5)
        await records.bury("x", 3)
        assert records.tombstones["x"] == 5
        assert (await Records.load(store)).tombstones["x"] == 5


async def test_a_dropped_network_takes_its_worker_and_addresses_along(tmp_path: Path) -> None:
    async with Store.open(tmp_path / "db", MIGRATIONS) as store:
        records = await Records.load(store)
        row = network()
        await records.put_network(row)
        port = nic(row.network_id, "10.0.0.2")
        await records.put_nic(port)
        with pytest.raises(Conflict):
            await records.drop_network(row)
        await records.drop_nic(port)
        await records.drop_network(row)
        again = await Records.load(store)
        assert (again.networks, again.workers, again.released(row.network_id)) == ({}, {}, set())
        assert again.tombstones == {port.nic_id: 1, row.network_id: 1}


def test_the_oldest_of_too_many_graves_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graves, "TOMBSTONES_MAX", 2)
    buried = graves.Graves()
    for uid in ("a", "b", "a", "c"):
        buried[uid] = 1
    assert list(buried) == ["a", "c"]
