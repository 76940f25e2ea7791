"""A machine without chance, for tests that say exactly what happens: one engine at a time."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec

from chv.agent.engine import Engine
from chv.agent.ports import Limits
from chv.common.wire import agent as api
from chv.common.wire.resources import KINDS, Resource
from chv.common.wire.types import API_VERSION
from tests.sim.chaos import Chaos
from tests.sim.vmms import SimProcess
from tests.sim.world import Machine


class Bench:
    """A machine, its engine, and short words for what tests do."""

    def __init__(self, machine: Machine, engine: Engine) -> None:
        self.machine = machine
        self.engine = engine

    async def apply(self, *objects: dict[str, Any], **more: Any) -> api.ApplyReply:
        raw = [msgspec.Raw(msgspec.json.encode(each)) for each in objects]
        return await self.engine.apply(api.Apply(objects=raw, requester="test", **more))

    async def delete(self, kind: str, name: str) -> api.Operation:
        request = api.DeleteObject(kind=kind, name=name, requester="test")
        return (await self.engine.delete(request)).operation

    async def act(self, verb: str, name: str = "web", **more: Any) -> api.Operation:
        request = api.ActOnVm(verb=api.VmVerb(verb), name=name, requester="test", **more)
        return (await self.engine.act(request)).operation

    async def final(self, operation_id: str, timeout_s: float = 120.0) -> api.Operation:
        request = api.WaitOperation(operation_id=operation_id, timeout_s=timeout_s)
        return (await self.engine.wait_operation(request)).operation

    async def until(
        self, condition: str, name: str = "web", kind: str = "VirtualMachine", **more: Any
    ) -> Any:
        request = api.WaitCondition(kind=kind, name=name, condition=condition, **more)
        return self._decode(kind, (await self.engine.wait_condition(request)).object)

    def get(self, kind: str, name: str) -> Any:
        return self._decode(kind, self.engine.get(api.ObjectRef(kind=kind, name=name)).object)

    def process(self, name: str = "web") -> SimProcess | None:
        """Return the live VMM of a VM."""
        return self.machine.host.live(self.engine.vm_uid(name, "default"))

    def condition(self, kind: str, name: str = "web") -> tuple[str, str]:
        """Return status and reason of a condition."""
        conditions = self.get("VirtualMachine", name).status.conditions
        return next((c.status.value, c.reason) for c in conditions if c.type == kind)

    @staticmethod
    def _decode(kind: str, raw: msgspec.Raw) -> Resource:
        return msgspec.json.decode(raw, type=KINDS[kind])


@asynccontextmanager
async def open_bench(machine: Machine | None = None, **limits: Any) -> AsyncIterator[Bench]:
    """Run an engine on a machine; leaving is the agent's clean end, the machine goes on."""
    if machine is None:
        machine = Machine(
            1, Chaos(random.Random(1), delays_s=(0.0,)), Limits(**limits) if limits else None
        )
        machine.chaos.quiet = True
        machine.host.stord.mishaps = False
    else:
        machine.chaos.life += 1  # another agent, with ids of its own
    engine = Engine(machine.agent_store(), machine.world())
    await engine.load()
    await engine.recover()
    async with anyio.create_task_group() as group:
        await group.start(engine.run)
        yield Bench(machine, engine)
        group.cancel_scope.cancel()
    assert not engine.bugs()


def image(name: str = "tiny", **spec: Any) -> dict[str, Any]:
    return manifest("Image", name, spec or {"builtin": "tiny"})


def network(name: str = "net", **spec: Any) -> dict[str, Any]:
    return manifest("Network", name, {"subnet": "10.9.0.0/24", **spec})


def volume(name: str = "data", **spec: Any) -> dict[str, Any]:
    return manifest("Volume", name, {"size": "64Mi", "format": "raw", **spec})


def vm(name: str = "web", **spec: Any) -> dict[str, Any]:
    return manifest(
        "VirtualMachine",
        name,
        {
            "memory": "128Mi",
            "boot": {"image": "tiny"},
            "shutdownTimeout": "10s",
            "disks": [{"name": "data", "volume": "data"}],
            "interfaces": [{"name": "eth0", "network": "net"}],
            **spec,
        },
    )


def bare(name: str = "web", **spec: Any) -> dict[str, Any]:
    """A VM without disks and NICs."""
    return vm(name, **{"disks": [], "interfaces": [], **spec})


def everything(**spec: Any) -> list[dict[str, Any]]:
    """One of each kind, in the wrong order."""
    return [vm(**spec), volume(), network(), image()]


def manifest(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
