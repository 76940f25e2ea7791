"""Records as tests make them, and the parts of nwd that need no kernel."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.store import Store
from chv.common.wire import nwd_policy as wire
from chv.common.wire.nwd import AttachVmNic, Topology
from chv.common.wire.types import CallMeta
from chv.nwd.blueprint import Settings
from chv.nwd.parts import Parts
from chv.nwd.records import MIGRATIONS, ExposureRow, GroupRow, Network, Nic, Records

IDS = Ids()
BOOT = "boot-1"


def topology(**changes: Any) -> Topology:
    fields: dict[str, Any] = {
        "network_id": IDS.uid(),
        "name": "net",
        "tenant": "default",
        "subnet": "10.0.0.0/24",
        "gateway": "10.0.0.1",
        "dns_domain": "net.test",
    }
    return Topology(**(fields | changes))


def network(slot: int | None = 1, **changes: Any) -> Network:
    return Network(topology=topology(**changes), generation=1, boot_id=BOOT, uplink_slot=slot)


def nic(network_id: str, number: int, **changes: Any) -> Nic:
    fields: dict[str, Any] = {
        "nic_id": IDS.uid(),
        "network_id": network_id,
        "vm_id": IDS.uid(),
        "generation": 1,
        "hostname": f"vm{number}",
        "mac": f"02:00:00:00:00:{number:02x}",
        "address": f"10.0.0.{number}",
        "owner_uid": 1,
        "guest_ports": [22],
        "boot_id": BOOT,
    }
    return Nic(**(fields | changes))


def attach(network_id: str, generation: int = 1, **changes: Any) -> AttachVmNic:
    fields: dict[str, Any] = {
        "meta": CallMeta(operation_id=IDS.operation(), generation=generation),
        "nic_id": IDS.uid(),
        "vm_id": IDS.uid(),
        "network_id": network_id,
        "hostname": "vm",
        "owner_uid": 1,
    }
    return AttachVmNic(**(fields | changes))


def group(*rules: wire.SecurityRule, tenant: str = "default", uid: str = "") -> GroupRow:
    made = wire.SecurityGroup(
        group_id=uid or IDS.uid(), name="group", tenant=tenant, rules=list(rules)
    )
    return GroupRow(group=made, generation=1)


def exposure(network_id: str, **changes: Any) -> wire.Exposure:
    fields: dict[str, Any] = {
        "exposure_id": IDS.uid(),
        "name": "web",
        "network_id": network_id,
        "protocol": wire.IpProtocol.TCP,
        "addresses": ["192.0.2.1"],
        "port": 80,
        "sources": ["0.0.0.0/0"],
    }
    return wire.Exposure(**(fields | changes))


def exposure_row(made: wire.Exposure, **changes: Any) -> ExposureRow:
    fields: dict[str, Any] = {"exposure": made, "generation": 1}
    return ExposureRow(**(fields | changes))


@asynccontextmanager
async def open_parts(path: Path) -> AsyncIterator[Parts]:
    """Parts with real records and nothing that would touch a kernel."""
    async with Store.open_inline(path, MIGRATIONS) as store:
        nothing = cast(Any, None)
        yield Parts(
            layout=Layout("abcdef", Path("/run"), Path("/var/lib")),
            settings=Settings(
                uplink_pool="169.254.64.0/18",
                uplink_pool6="fd63:6876::/112",
                forwarders=(),
                reserved=(),
                lease_s=3600,
            ),
            records=await Records.load(store),
            provider=nothing,
            workers=nothing,
            nft=nothing,
            boot_id=BOOT,
        )
