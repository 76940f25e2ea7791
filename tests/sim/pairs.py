"""Ordered pairs of crashes: the agent dies at an effect of a verb, the next one in its recovery.

A pair is two calls that change something: the first lies in the undisturbed course of the verb, the
second in what the next agent does until the verb is done. Dying before an effect is dying after
the one before it, so that each is died after. A commit that only shows a status is no effect.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio

from chv.common.errors import ChvError, NotFound
from chv.common.wire.agent_clone import CloneVm
from chv.vmm.driver import VmmState
from tests.sim.bench import Bench, image, manifest, network, vm, volume
from tests.sim.test_every_seam import Life

DATA = {"name": "data", "volume": "data"}
MORE = {"name": "more", "volume": "more"}
NIC = {"name": "eth0", "network": "net"}
SECOND_NIC = {"name": "eth1", "network": "other"}
RESIZABLE = {"cpus": 1, "maxCpus": 4, "maxMemory": "384Mi"}
CLEARED = (
    "VirtualMachine",
    "VirtualMachineSnapshot",
    "Volume",
    "VolumeSnapshot",
    "Network",
    "Image",
)


@dataclass(frozen=True)
class Verb:
    """`before`: the stages that lead to the verb, which run undisturbed."""

    name: str
    before: tuple[str, ...] = ("base", "create")


VERBS = (
    Verb("create", ("base",)),
    Verb("start", ("base", "create", "stop")),
    Verb("stop"),
    Verb("restart"),
    Verb("reset"),
    Verb("pause"),
    Verb("resume", ("base", "create", "pause")),
    Verb("replace"),
    Verb("attach_volume"),
    Verb("detach_volume", ("base", "create", "attach_volume")),
    Verb("attach_nic"),
    Verb("detach_nic", ("base", "create", "attach_nic")),
    Verb("resize"),
    Verb("grow"),
    Verb("snapshot"),
    Verb("save"),
    Verb("restore", ("base", "create", "save")),
    Verb("clone"),
    Verb("delete"),
)


class VerbLife(Life):
    """What leads to a verb, the verb, and the end of everything."""

    def __init__(self, verb: Verb, plan: dict[int, str]) -> None:
        super().__init__(plan)
        self.verb = verb
        self.stages = (*verb.before, verb.name, "clear")

    async def _base(self, bench: Bench) -> None:
        objects = [image(), network(), volume(), volume("more")]
        objects.append(network("other", subnet="10.8.0.0/24"))
        await self._applied(bench, "base", *objects)

    async def _create(self, bench: Bench) -> None:
        await self._changed(bench, "create")

    async def _attach_volume(self, bench: Bench) -> None:
        await self._changed(bench, "attach_volume", disks=[DATA, MORE])

    async def _detach_volume(self, bench: Bench) -> None:
        await self._changed(bench, "detach_volume")

    async def _attach_nic(self, bench: Bench) -> None:
        await self._changed(bench, "attach_nic", interfaces=[NIC, SECOND_NIC])

    async def _detach_nic(self, bench: Bench) -> None:
        await self._changed(bench, "detach_nic")

    async def _resize(self, bench: Bench) -> None:
        await self._changed(bench, "resize", cpus=3, memory="256Mi")
        process = bench.process()
        assert process is not None
        assert (process.cpus, process.memory_bytes) == (3, 256 << 20)

    async def _grow(self, bench: Bench) -> None:
        await self._applied(bench, "grow", volume(size="128Mi"))

    async def _snapshot(self, bench: Bench) -> None:
        spec = {"virtualMachine": "web", "freeze": "5s"}
        await self._applied(bench, "snapshot", manifest("VolumeSnapshot", "snap", spec))

    async def _save(self, bench: Bench) -> None:
        spec = {"virtualMachine": "web"}
        await self._applied(bench, "save", manifest("VirtualMachineSnapshot", "saved", spec))

    async def _restore(self, bench: Bench) -> None:
        """Back to a snapshot; one that was interrupted is not there, which is an end too."""
        status = bench.get("VirtualMachineSnapshot", "saved").status
        if status is not None and status.phase == "Ready":
            await self._acted(bench, "restore", snapshot="saved", force=True)

    async def _clone(self, bench: Bench) -> None:
        request = CloneVm(name="web", new_name="two", requester="test", idempotency_key="clone")
        await self._retried(lambda: bench.engine.clone(request))
        await self._idle(bench)
        assert bench.process("two") is not None

    async def _reset(self, bench: Bench) -> None:
        await self._acted(bench, "reset")

    async def _pause(self, bench: Bench) -> None:
        await self._retried(lambda: bench.act("pause", idempotency_key="pause"))
        with anyio.fail_after(900):
            while self.machine.store.tables.active:  # noqa: ASYNC110
                await anyio.sleep(1)
        process = bench.process()
        assert process is not None
        assert process.state is VmmState.PAUSED

    async def _resume(self, bench: Bench) -> None:
        await self._acted(bench, "resume")

    async def _replace(self, bench: Bench) -> None:
        await self._acted(bench, "restart_storage")

    async def _delete(self, bench: Bench) -> None:
        with suppress(NotFound):  # deleted by what was asked for in an earlier life
            await self._retried(lambda: bench.delete("VirtualMachine", "web"))
        await self._idle(bench)

    async def _clear(self, bench: Bench) -> None:
        """Delete all there is, in whatever order it lets itself be deleted."""
        tables = self.machine.store.tables
        with anyio.fail_after(900):
            while tables.objects:
                for kind in CLEARED:
                    for stored in tables.of_kind(kind):
                        await self._asked_to_go(bench, kind, stored.resource.metadata.name)
                await anyio.sleep(2)

    @staticmethod
    async def _asked_to_go(bench: Bench, kind: str, name: str) -> None:
        try:
            await bench.delete(kind, name)
        except ChvError:
            return  # in use, or gone meanwhile: the next round sees

    async def _applied(self, bench: Bench, key: str, *objects: dict[str, object]) -> None:
        await self._retried(lambda: bench.apply(*objects, idempotency_key=key))
        await self._idle(bench)

    async def _changed(self, bench: Bench, key: str, **spec: Any) -> None:
        await self._applied(bench, key, vm(**{**RESIZABLE, **spec}))

    async def _acted(self, bench: Bench, verb: str, **more: Any) -> None:
        await self._retried(lambda: bench.act(verb, idempotency_key=verb, **more))
        await self._idle(bench)


def effects(life: VerbLife, after: int = -1) -> list[int]:
    """Return the effects of a life's verb, after one of them."""
    first, end = life.spans[life.verb.name]
    return [at for at in life.machine.chaos.effects_at if first <= at < end and at > after]


def firsts(verb: Verb) -> list[int]:
    """Return the effects of the undisturbed verb."""
    life = VerbLife(verb, {})
    assert not life.run()
    return effects(life)


def with_one(verb: Verb, first: int) -> tuple[list[str], list[int]]:
    """Die after one effect; return what is broken, and the effects until the verb is done."""
    life = VerbLife(verb, {first: "kill_after"})
    found = [f"{verb.name}, killed after {first}: {each}" for each in life.run()]
    return found, effects(life, first) if not found else []


def with_two(verb: Verb, first: int, second: int) -> list[str]:
    """Die after two effects; return what is broken."""
    life = VerbLife(verb, {first: "kill_after", second: "kill_after"})
    return [f"{verb.name}, killed after {first} and {second}: {each}" for each in life.run()]


def all_pairs(verb: Verb) -> Iterator[tuple[int, list[str]]]:
    """Yield for each first crash how many runs it made, and what is broken."""
    for first in firsts(verb):
        found, seconds = with_one(verb, first)
        for second in seconds:
            found += with_two(verb, first, second)
        yield 1 + len(seconds), found


def some_pairs(verb: Verb, count: int, choose: random.Random) -> list[str]:
    """Return what is broken after so many pairs, drawn anew each."""
    undisturbed, broken = firsts(verb), []
    for _ in range(count):
        first = choose.choice(undisturbed)
        found, seconds = with_one(verb, first)
        broken += found
        if seconds:
            broken += with_two(verb, first, choose.choice(seconds))
    return broken
