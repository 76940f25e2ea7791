"""SIGKILL of nwd at every failpoint that a verb passes: it converges, and nothing leaks.

Which points there are is found out by running the verb once and reading which it passed, so a new
point is covered the day it is made.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from chv.common.errors import ChvError
from chv.common.wire.nwd import DnsRecord, NicInfo, Shape
from chv.common.wire.nwd_policy import HealthCheck, HealthProtocol
from chv.nwd.kernel import nft_generation
from tests.integration.nwd_helpers import (
    HOST_ADDRESS,
    IDS,
    SUBNET6,
    Node,
    inside,
    leased,
    needs_nwd,
    open_guest,
    open_node,
)
from tests.integration.nwd_objects import (
    OUT,
    Stream,
    delete_exposure,
    delete_group,
    echoing,
    exposure,
    rule,
    set_exposure,
    set_group,
    word,
)
from tests.sampling import sampled

IN_CI = 3  # points of each verb
SEED = 20_261_201

SHAPE = Shape(ingress_bps=50_000_000, egress_bps=20_000_000)
# Everything that a network can have, so that a kill falls between any two of its steps.
WANTED: dict[str, Any] = {
    "subnet6": SUBNET6,
    "public_addresses": ["198.51.100.7"],
    "records": [DnsRecord(name="db", addresses=["10.7.0.50", "fd00:7::50"])],
}
pytestmark = [pytest.mark.root, pytest.mark.slow, needs_nwd]


@dataclass
class Scene:
    """A node, the network of this round and perhaps a NIC."""

    node: Node
    network: str
    nic_id: str
    vm_id: str

    async def ensure(self) -> None:
        await self.node.ensure(self.network, **WANTED)

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
        await self.node.ensure(self.network, 2, metadata=True, **WANTED)

    async def ensure_silent(self) -> None:
        await self.node.ensure(self.network, 3, **WANTED)

    async def detach(self) -> None:
        await self.node.detach(self.nic_id)

    async def delete(self) -> None:
        await self.node.delete(self.network)

    # --- groups and exposures; uids of their own follow from the network's
    @property
    def group(self) -> str:
        return f"{self.network[:-1]}{'1' if self.network[-1] == '0' else '0'}"

    @property
    def exposure(self) -> str:
        return f"{self.network[:-1]}{'3' if self.network[-1] == '2' else '2'}"

    async def member(self) -> None:
        await self.ensure()
        await set_group(self.node, self.group, OUT)
        await self.node.attach(
            self.network, self.nic_id, vm_id=self.vm_id, security_groups=[self.group]
        )

    async def set_group(self) -> None:
        web = rule("ingress", "tcp", ["80"])
        await set_group(self.node, self.group, web, OUT, generation=2)

    async def regroup(self) -> None:
        await self.node.attach(self.network, self.nic_id, 2, vm_id=self.vm_id)

    async def lone_group(self) -> None:
        await self.ensure()
        await set_group(self.node, self.group, OUT)

    async def delete_group(self) -> None:
        await delete_group(self.node, self.group)

    async def expose(self, generation: int = 1, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "addresses": [HOST_ADDRESS, "10.7.0.200"],
            "port": 8080,
            "target_port": 80,
            "targets": [self.nic_id],
        }
        await set_exposure(self.node, self.network, self.exposure, generation, **(fields | changes))

    async def exposed(self) -> None:
        await with_nic(self)
        await self.expose()

    async def set_exposure(self) -> None:
        """Move it, and take its target out."""
        await self.expose(2, port=8081, targets=[], drain_s=0.0, addresses=[HOST_ADDRESS])

    async def delete_exposure(self) -> None:
        await delete_exposure(self.node, self.exposure)


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


# The same for groups and exposures, and the verb of the failpoints.
POLICY_VERBS: dict[str, tuple[Act, Act, str, int]] = {
    "set_group": (Scene.member, Scene.set_group, "set_group", 4),
    "regroup": (Scene.member, Scene.regroup, "attach", 4),
    "delete_group": (Scene.lone_group, Scene.delete_group, "delete_group", 2),
    "expose": (with_nic, Scene.expose, "set_exposure", 6),
    "set_exposure": (Scene.exposed, Scene.set_exposure, "set_exposure", 6),
    "delete_exposure": (Scene.exposed, Scene.delete_exposure, "delete_exposure", 6),
}


def scene_of(node: Node) -> Scene:
    return Scene(node, IDS.uid(), IDS.uid(), IDS.uid())


async def passed(node: Node, before: Act, act: Act, clear: Act) -> list[str]:
    """Return the failpoints that `act` passes, in order, each once."""
    scene = scene_of(node)
    await node.start()
    await before(scene)
    node.points.write_text("")
    await act(scene)
    names = list(dict.fromkeys(node.points.read_text().split()))
    await clear(scene)
    await node.end()
    return names


async def points_of(node: Node, verb: str) -> list[str]:
    """Return those that belong to a verb."""
    names = await passed(node, *VERBS[verb], clear)
    return [name for name in names if name.startswith(f"nwd.{verb.split()[0]}.")]


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
        for point in sampled(points, IN_CI, seed=SEED):
            scene = scene_of(node)
            await kill_at(scene, point, verb)
            await settled(scene, verb, point)
            await clear(scene)
            await node.end()
            assert node.snapshot() == baseline, point


async def policy_points(node: Node, name: str) -> list[str]:
    before, act, verb, _ = POLICY_VERBS[name]
    names = await passed(node, before, act, clear_policy)
    return [point for point in names if point.startswith(f"nwd.{verb}.")]


async def clear_policy(scene: Scene) -> None:
    await delete_exposure(scene.node, scene.exposure, 9)
    await scene.node.detach(scene.nic_id, 9)
    await delete_group(scene.node, scene.group, 9)
    await scene.node.delete(scene.network, 9)


def due_in(node: Node) -> list[str]:
    """What the records still have to do, read past nwd."""
    found = []
    path = node.layout.database("nwd")
    with contextlib.closing(sqlite3.connect(path)) as db:
        for (doc,) in db.execute("SELECT doc FROM security_groups"):
            found += msgspec.json.decode(doc)["pending"]
        for (doc,) in db.execute("SELECT doc FROM exposures"):
            row = msgspec.json.decode(doc)
            found += [*row["sweeps"], *row["draining"]]
        for (doc,) in db.execute("SELECT doc FROM nics"):
            found += ["unswept"] * msgspec.json.decode(doc)["unswept"]
    return found


def rules_of(scene: Scene) -> list[int]:
    """The numbers of the last changes of rules: in the network and on the host."""
    names = (scene.node.layout.netns(scene.network), scene.node.sandbox.host)
    return [inside(name, nft_generation.read) for name in names]


@pytest.mark.parametrize("name", POLICY_VERBS)
async def test_a_kill_at_each_step_of_groups_and_exposures_converges(name: str) -> None:
    before, act, _, least = POLICY_VERBS[name]
    async with open_node(start=False) as node:
        await node.start()
        baseline = node.snapshot()
        await node.end()
        points = await policy_points(node, name)
        assert len(points) >= least, points
        for point in sampled(points, IN_CI, seed=SEED):
            scene = scene_of(node)
            passes = await passes_before(scene, before, point)
            await node.start(f"{point}={passes}*off->1*kill" if passes else f"{point}=1*kill")
            await before(scene)
            with pytest.raises(ChvError):
                await act(scene)
            assert await node.ended() == -9, point
            await node.start()  # the records alone make it good
            node.forget_log()
            standing = rules_of(scene)
            await act(scene)
            assert node.applied() == [], f"{point}: nothing was left to do"
            assert rules_of(scene) == standing, f"{point}: the rules stood already"
            assert due_in(node) == [], point
            assert all(item.known for item in await node.census()), point
            await clear_policy(scene)
            await node.end()
            assert node.snapshot() == baseline, point


async def passes_before(scene: Scene, before: Act, point: str) -> int:
    """Return how often what comes before passes a point of the same name."""
    node = scene.node
    await node.start()
    node.points.write_text("")
    await before(scene)
    passed = node.points.read_text().split().count(point)
    await clear_policy(scene)
    await node.end()
    fresh = scene_of(node)
    scene.network, scene.nic_id, scene.vm_id = fresh.network, fresh.nic_id, fresh.vm_id
    return passed


@pytest.mark.parametrize("point", ["nwd.health.recorded", "nwd.health.rules_loaded"])
async def test_a_kill_while_a_target_becomes_healthy_loses_nothing(point: str) -> None:
    check = HealthCheck(protocol=HealthProtocol.TCP, interval_s=0.2, rise=1, fall=1)
    async with open_node(start=False) as node:
        scene = scene_of(node)
        await node.start(f"{point}=kill")
        await with_nic(scene)
        async with open_guest(node, await scene.attach()) as guest:
            guest.configure()
            with echoing(guest.name, 80, b"0"):
                await scene.expose(health=check, addresses=[HOST_ADDRESS])
                assert await node.ended() == -9
                await node.start()
                found = await exposure(node, scene.exposure)
                assert found.targets[0].state == "healthy", "it was recorded first"
                assert word(node.sandbox.wan, HOST_ADDRESS, 8080) == b"0"


async def test_a_kill_while_a_drain_ends_ends_it_all_the_same() -> None:
    async with open_node(start=False) as node:
        scene = scene_of(node)
        await node.start("nwd.drain.before_sweep=kill")
        await with_nic(scene)
        async with open_guest(node, await scene.attach()) as guest:
            guest.configure()
            with echoing(guest.name, 80):
                await scene.expose(addresses=[HOST_ADDRESS])
                stream = Stream(node.sandbox.wan, HOST_ADDRESS, 8080)
                assert stream.lives()
                await scene.expose(2, targets=[], drain_s=0.5, addresses=[HOST_ADDRESS])
                assert await node.ended() == -9
                assert stream.lives()
                await node.start()
                assert due_in(node) == []
                assert not stream.lives()


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
