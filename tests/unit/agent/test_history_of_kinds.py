"""Each kind of object has a history with requester and reason, and a way back."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from chv.common.wire import agent as api
from chv.common.wire import agent_history as wire
from tests.sim.bench import Bench, bare, image, manifest, network, open_bench, volume
from tests.sim.virtual import simulated

GROUP = {"ingress": [{"protocol": "TCP", "ports": ["80"], "cidrs": ["0.0.0.0/0"]}]}
EXPOSED: dict[str, Any] = {
    "network": "net",
    "addresses": ["192.0.2.1"],
    "port": 8000,
    "sources": ["0.0.0.0/0"],
    "targets": [{"virtualMachine": "web"}],
}
# Of each kind: as it is at first, and changed. What cannot change has a creation alone.
KINDS = {
    "VirtualMachine": (bare(), bare(memory="256Mi")),
    "Volume": (volume(), volume(limits={"iopsTotal": {"limit": 100}})),
    "Network": (network(), network(metadata=True)),
    "SecurityGroup": (
        manifest("SecurityGroup", "sg", GROUP),
        manifest("SecurityGroup", "sg", {"ingress": []}),
    ),
    "Exposure": (
        manifest("Exposure", "exp", EXPOSED),
        manifest("Exposure", "exp", {**EXPOSED, "port": 8001}),
    ),
    "Image": (
        image("far", disk={"url": "https://host/far", "sha256": "d" * 64, "format": "raw"}),
        image("far", disk={"url": "https://host/far2", "sha256": "e" * 64, "format": "raw"}),
    ),
    "VolumeSnapshot": (manifest("VolumeSnapshot", "snap", {"volume": "data"}), None),
    "VirtualMachineSnapshot": (
        manifest("VirtualMachineSnapshot", "all", {"virtualMachine": "web"}),
        None,
    ),
}


async def ground(bench: Bench) -> None:
    """What the others refer to."""
    interfaces = [{"name": "eth0", "network": "net"}]
    await bench.apply(image(), network(), volume(), bare(interfaces=interfaces))
    await bench.until("VMMRunning")


async def rows(bench: Bench, kind: str, name: str) -> list[wire.GenerationInfo]:
    request = wire.ListGenerations(kind=kind, name=name)
    return (await bench.engine.history.rows(request)).generations


def test_every_kind_is_tried() -> None:
    pattern = str(get_args(api.Kind)[1].pattern)
    assert set(KINDS) == set(pattern.removeprefix("^(").removesuffix(r")\Z").split("|"))


@simulated
@pytest.mark.parametrize("kind", KINDS)
async def test_who_made_a_generation_and_why_and_the_way_back(kind: str) -> None:
    first, second = KINDS[kind]
    name = first["metadata"]["name"]
    async with open_bench() as bench:
        await ground(bench)
        made = await bench.apply(first, reason="because")
        newest = (await rows(bench, kind, name))[0]
        changed = made.results[0].action != "unchanged"
        assert (newest.requester, newest.reason) == ("test", "because" if changed else "")
        if second is None:
            return
        start = newest.generation
        await bench.apply(second, reason="more")
        back = wire.Rollback(
            kind=kind, name=name, to=start, requester="ann", reason="less", dry_run=False
        )
        await bench.engine.history.rollback(back)
        last, middle = (await rows(bench, kind, name))[:2]
        assert (middle.requester, middle.reason) == ("test", "more")
        assert middle.changed
        assert last.requester == "ann"
        assert last.reason == f"rollback to generation {start}: less"
        assert (last.verb, last.generation) == ("update", start + 2)
