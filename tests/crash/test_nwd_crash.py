"""SIGKILL of nwd at every failpoint that a verb passes: it converges, and nothing leaks.

Which points there are is found out by running the verb once and reading which it passed, so a new
point is covered the day it is made.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from chv.common.errors import ChvError
from chv.common.wire.nwd import NicInfo, Shape
from tests.integration.nwd_helpers import IDS, Node, leased, needs_nwd, open_node

SHAPE = Shape(ingress_bps=50_000_000, egress_bps=20_000_000)
pytestmark = [pytest.mark.root, pytest.mark.slow, needs_nwd]


@dataclass
class Scene:
    """A node, the network of this round and perhaps a NIC."""

    node: Node
    network: str
    nic_id: str
    vm_id: str

    async def ensure(self) -> None:
        await self.node.ensure(self.network)

    async def attach(self) -> NicInfo:
        return await self.node.attach(self.network, self.nic_id, vm_id=self.vm_id)

    async def attach_shaped(self) -> NicInfo:
        return await self.node.attach(
            self.network, self.nic_id, 2, vm_id=self.vm_id, shape=SHAPE, queues=2
        )

    async def attach_unshaped(self) -> NicInfo:
        return await self.node.attach(self.network, self.nic_id, 3, vm_id=self.vm_id)

    async def detach_shaped(self) -> None:
        await self.node.detach(self.nic_id, 2)

    async def ensure_answering(self) -> None:
        await self.node.ensure(self.network, 2, metadata=True)

    async def ensure_silent(self) -> None:
        await self.node.ensure(self.network, 3)

    async def detach(self) -> None:
        await self.node.detach(self.nic_id)

    async def delete(self) -> None:
        await self.node.delete(self.network)


Act = Callable[[Scene], Awaitable[object]]


async def nothing(_: Scene) -> None:
    return


async def with_nic(scene: Scene) -> None:
    await scene.ensure()
    await scene.attach()


async def with_shaped_nic(scene: Scene) -> None:
    await with_nic(scene)
    await scene.attach_shaped()


async def answering(scene: Scene) -> None:
    await scene.ensure()
    await scene.ensure_answering()


# verb, perhaps with a word more: (what stands before, the act that is cut short)
VERBS: dict[str, tuple[Act, Act]] = {
    "ensure": (nothing, Scene.ensure),
    "attach": (Scene.ensure, Scene.attach),
    "detach": (with_nic, Scene.detach),
    "delete": (Scene.ensure, Scene.delete),
    "attach shaped": (with_nic, Scene.attach_shaped),
    "attach unshaped": (with_shaped_nic, Scene.attach_unshaped),
    "detach shaped": (with_shaped_nic, Scene.detach_shaped),
    "ensure answering": (Scene.ensure, Scene.ensure_answering),
    "ensure silent": (answering, Scene.ensure_silent),
}
POINTS_MIN = {
    "ensure": 20,
    "attach": 8,
    "detach": 5,
    "delete": 8,
    "attach shaped": 15,
    "attach unshaped": 8,
    "detach shaped": 6,
    "ensure answering": 3,
    "ensure silent": 3,
}


def scene_of(node: Node) -> Scene:
    return Scene(node, IDS.uid(), IDS.uid(), IDS.uid())


async def points_of(node: Node, verb: str) -> list[str]:
    """Return the failpoints that a verb passes, in order, each once."""
    before, act = VERBS[verb]
    scene = scene_of(node)
    await node.start()
    await before(scene)
    node.points.write_text("")
    await act(scene)
    passed = dict.fromkeys(node.points.read_text().split())
    await clear(scene)
    await node.end()
    return [name for name in passed if name.startswith(f"nwd.{verb.split()[0]}.")]


async def clear(scene: Scene) -> None:
    await scene.node.detach(scene.nic_id, 9)
    await scene.node.delete(scene.network, 9)


async def kill_at(scene: Scene, point: str, verb: str) -> None:
    """Run the verb until nwd kills itself at the point."""
    before, act = VERBS[verb]
    if " " in verb:  # what stands before passes the same points
        await scene.node.start()
        await before(scene)
        await scene.node.end()
    await scene.node.start(f"{point}=kill")
    if " " not in verb:
        await before(scene)
    with pytest.raises(ChvError):
        await act(scene)
    assert await scene.node.ended() == -9, point


async def settled(scene: Scene, verb: str, point: str) -> None:
    """After a restart: the same call again works, a further one changes nothing."""
    node = scene.node
    await node.start()
    act = VERBS[verb][1]
    await act(scene)
    node.forget_log()
    await act(scene)
    assert node.applied() == [], f"{point}: the second pass is a no-op"
    assert all(item.known for item in await node.census()), point
    if verb == "delete":
        return
    is_plain = verb in ("ensure", "attach")
    nic = await scene.attach() if is_plain else await node.attach(scene.network)
    assert await leased(node, nic) == nic.address, point
    assert len(node.workers()) == 1, point
    await node.detach(nic.nic_id, 9)


@pytest.mark.parametrize("verb", VERBS)
async def test_a_kill_at_each_step_converges_and_leaks_nothing(verb: str) -> None:
    async with open_node(start=False) as node:
        await node.start()
        baseline = node.snapshot()
        await node.end()
        points = await points_of(node, verb)
        assert len(points) >= POINTS_MIN[verb], points
        for point in points:
            scene = scene_of(node)
            await kill_at(scene, point, verb)
            await settled(scene, verb, point)
            await clear(scene)
            await node.end()
            assert node.snapshot() == baseline, point


async def test_a_kill_at_any_moment_under_load_leaves_records_and_kernel_in_step() -> None:
    """Kill at the n-th passing of a common step while several networks are worked on."""
    async with open_node(start=False) as node:
        await node.start()
        baseline = node.snapshot()
        await node.end()
        networks = [IDS.uid() for _ in range(3)]
        nics = {IDS.uid(): network for network in networks for _ in range(2)}
        for _ in range(3):
            await node.start("nwd.attach.after_make_tap=1*off->1*kill")
            with pytest.raises(ChvError):
                for network in networks:
                    await node.ensure(network)
                for nic_id, network in nics.items():
                    await node.attach(network, nic_id, vm_id=nic_id, hostname=f"h{nic_id[:8]}")
            assert await node.ended() == -9
        await node.start()
        for nic_id, network in nics.items():
            nic = await node.attach(network, nic_id, vm_id=nic_id, hostname=f"h{nic_id[:8]}")
            assert await leased(node, nic) == nic.address
        addresses = {(nic.network_id, nic.address) for nic in await node.nics()}
        assert len(addresses) == len(nics), "no address was given twice"
        for nic_id in nics:
            await node.detach(nic_id)
        for network in networks:
            await node.delete(network)
        await node.end()
        assert node.snapshot() == baseline
