"""A network and its uplink: it is not taken away from exposures that the outside uses."""

from __future__ import annotations

import pytest

from chv.common.errors import InUse
from tests.sim.bench import bare, image, manifest, network, open_bench
from tests.sim.virtual import simulated

NIC = {"name": "eth0", "network": "net"}


@simulated
async def test_an_uplink_stays_while_an_exposure_takes_what_comes_by_it() -> None:
    async with open_bench() as bench:
        body = {
            "network": "net",
            "addresses": ["192.0.2.7"],
            "port": 80,
            "sources": ["0.0.0.0/0"],
            "targets": [{"virtualMachine": "web"}],
        }
        inner = {**body, "addresses": ["10.9.0.200"]}
        net = network(subnet="10.9.0.0/24")
        apart = network(subnet="10.9.0.0/24", uplink="None")
        await bench.apply(image(), net, bare("web", interfaces=[NIC]))
        await bench.apply(manifest("Exposure", "site", body))
        with pytest.raises(InUse, match=r"192\.0\.2\.7.*Exposure default/site") as caught:
            await bench.apply(apart)
        assert caught.value.field == "spec.uplink"
        await bench.apply(network(subnet="10.9.0.0/24", uplink="Routed"))
        await bench.apply(manifest("Exposure", "site", inner))
        await bench.apply(apart)
