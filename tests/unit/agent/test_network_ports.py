"""A network's ports are counted when a NIC is asked for, not when its VM starts."""

from __future__ import annotations

import pytest

from chv.agent.resources import ports
from chv.common.errors import ResourceExhausted
from tests.sim.bench import bare, image, network, open_bench
from tests.sim.virtual import simulated

NIC = {"interfaces": [{"name": "eth0", "network": "net"}], "runStrategy": "Halted"}


@simulated
async def test_one_nic_more_than_the_bridge_has_ports_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ports, "BRIDGE_PORTS_MAX", 2)
    async with open_bench() as bench:
        await bench.apply(image(), network(), network("other", subnet="10.8.0.0/24"))
        await bench.apply(bare("one", **NIC), bare("two", **NIC))
        with pytest.raises(ResourceExhausted, match="a bridge takes 2") as caught:
            await bench.apply(bare("three", **NIC))
        assert caught.value.field == "spec.interfaces[0].network"
        # Another network has room, and who has a port keeps it.
        await bench.apply(
            bare("three", **{**NIC, "interfaces": [{"name": "a", "network": "other"}]})
        )
        await bench.apply(bare("one", **NIC, cpus=2))
