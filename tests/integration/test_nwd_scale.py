"""As many NICs as a network takes, attached and removed: what is refused, and what is left.

With CHV_LONG=1 all 1,023 of them, else a sample.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from typing import Any

import pytest

from chv.common.errors import ChvError, ResourceExhausted
from chv.common.wire import nwd as wire
from chv.common.wire.nwd import BRIDGE_PORTS_MAX, Shape
from chv.nwd.kernel import conntrack, links, neighbours
from tests.integration.nwd_helpers import (
    HOST_ADDRESS,
    IDS,
    SUBNET6,
    Node,
    inside,
    leased,
    meta,
    needs_nwd,
    nft_in,
    open_node,
)
from tests.integration.nwd_objects import OUT, rule, set_exposure, set_group

LONG = bool(os.environ.get("CHV_LONG"))
COUNT = BRIDGE_PORTS_MAX if LONG else 60
SHAPED_EVERY = 10
TARGETS = 5
SHAPE = Shape(ingress_bps=50_000_000, egress_bps=20_000_000)
_COUNTED = re.compile(r"counter packets \d+ bytes \d+")
pytestmark = [pytest.mark.root, needs_nwd]


def world(node: Node, network: str) -> dict[str, Any]:
    """Everything that a NIC may leave in its network."""
    name, directory = node.layout.netns(network), node.layout.network_run(network)

    def look() -> tuple[list[str], frozenset[str], set[str]]:
        found = links.read_all()
        return sorted(found), neighbours.proxied_all(found["br0"].index), conntrack.tracked()

    names, proxies, tracked = inside(name, look)
    return {
        "links": names,
        "proxies": proxies,
        "tracked": tracked,
        "rules": _COUNTED.sub("", nft_in(name, "list ruleset")),
        "hosts": (directory / "hosts").read_text(),
        "names": (directory / "names").read_text(),
        "files": node.run_files(),
        "host links": node.host_links(),
        "cgroups": node.cgroups(),
    }


def rows(node: Node) -> dict[str, int]:
    """How many records there are."""
    tables = ("nics", "networks", "security_groups", "exposures", "workers", "tombstones")
    with sqlite3.connect(f"file:{node.layout.database('nwd')}?mode=ro", uri=True) as db:
        return {each: db.execute(f"SELECT count(*) FROM {each}").fetchone()[0] for each in tables}


class Crowd:
    """A network, a group and an exposure for many NICs."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.network, self.group, self.exposure = IDS.uid(), IDS.uid(), IDS.uid()
        self.nics: list[wire.NicInfo] = []
        self.attached = 0

    async def make(self) -> None:
        await self.node.ensure(self.network, subnet="10.7.0.0/20", subnet6=SUBNET6)
        web = rule("ingress", "tcp", ["80"], cidrs=["0.0.0.0/0", "::/0"], groups=[self.group])
        await set_group(self.node, self.group, web, OUT)
        await self.expose(1, [])
        # A network with a port has a bridge that is no longer the same as one that never had any.
        first = await self.node.attach(self.network, security_groups=[self.group])
        await self.node.detach(first.nic_id)

    async def expose(self, generation: int, targets: list[str]) -> None:
        await set_exposure(
            self.node,
            self.network,
            self.exposure,
            generation,
            addresses=[HOST_ADDRESS],
            port=8080,
            target_port=80,
            targets=targets,
            drain_s=0,
        )

    async def attach(self, number: int) -> None:
        shape: dict[str, Any] = {"shape": SHAPE} if number % SHAPED_EVERY == 0 else {}
        self.attached += 1
        self.nics.append(
            await self.node.attach(self.network, security_groups=[self.group], **shape)
        )

    async def detach_all(self) -> None:
        async with self.node.client() as client:
            for nic in self.nics:
                request = wire.NicRef(meta=meta(2), nic_id=nic.nic_id)
                await client.call(wire.DETACH_NIC, request)
        self.nics.clear()


async def test_as_many_nics_as_a_bridge_takes_come_and_leave_nothing() -> None:
    async with open_node() as node:
        crowd = Crowd(node)
        await crowd.make()
        empty, records = world(node, crowd.network), rows(node)
        begun = time.monotonic()
        for number in range(COUNT):
            await crowd.attach(number)
        print(f"{COUNT} attached in {time.monotonic() - begun:.1f} s")
        await full_works(crowd)
        addresses = {nic.address for nic in crowd.nics}
        await crowd.expose(3, [])
        await crowd.detach_all()
        left_over = world(node, crowd.network)
        assert not addresses & left_over.pop("tracked")
        del empty["tracked"]
        assert left_over == empty
        left = rows(node)
        assert left.pop("tombstones") == records.pop("tombstones") + crowd.attached
        assert left == records
        assert all(item.known for item in await node.census())


async def full_works(crowd: Crowd) -> None:
    """All of them are there, and one more than there can be is refused with the number."""
    node, last = crowd.node, crowd.nics[-1]
    await crowd.expose(2, [nic.nic_id for nic in crowd.nics[:TARGETS]])
    with pytest.raises(ChvError):  # nobody listens there; the attempt is tracked
        await node.connect_guest(last.nic_id, 22, 0.2)
    found = world(node, crowd.network)
    assert len([name for name in found["links"] if name.startswith("t")]) == COUNT
    assert len([name for name in found["links"] if name.startswith("i")]) == -(
        -COUNT // SHAPED_EVERY
    )
    assert len(found["proxies"]) == COUNT
    assert found["hosts"].count("\n") == COUNT
    assert last.address in found["tracked"]
    assert len({nic.address for nic in crowd.nics}) == COUNT
    assert await leased(node, last) == last.address
    if COUNT == BRIDGE_PORTS_MAX:
        await the_next_is_refused(crowd)


async def the_next_is_refused(crowd: Crowd) -> None:
    node = crowd.node
    with pytest.raises(ResourceExhausted, match=str(BRIDGE_PORTS_MAX)):
        await node.attach(crowd.network)
    assert (await node.network(crowd.network)).status == "ready"
    leaving = crowd.nics.pop(7)
    await node.detach(leaving.nic_id, 2)
    await crowd.attach(1)  # its place is free again
    assert await leased(node, crowd.nics[-1]) == crowd.nics[-1].address
    with pytest.raises(ResourceExhausted, match=str(BRIDGE_PORTS_MAX)):
        await node.attach(crowd.network)
