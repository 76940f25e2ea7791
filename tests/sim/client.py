"""The users of the simulation: random requests, each repeated under one key until answered.

Outlives the agent. What was acknowledged is remembered, so that nothing acknowledged may be
found lost. Refusals that a correct agent gives (in use, being deleted) are part of the game.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import anyio
import msgspec

from chv.agent.engine import Engine
from chv.common.errors import (
    ChvError,
    Conflict,
    DeadlineExceeded,
    FailedPrecondition,
    InUse,
    InvalidArgument,
    NotFound,
    OutcomeUnknown,
    ResourceExhausted,
    Unavailable,
)
from chv.common.wire import agent as api
from chv.common.wire.agent_node import ActOnNode, NodeVerb
from chv.common.wire.types import API_VERSION
from tests.sim.copies import ask, ask_for_copies, with_sources

LOST = (Unavailable, DeadlineExceeded, OutcomeUnknown)
REFUSED = (Conflict, FailedPrecondition, InUse, InvalidArgument, NotFound, ResourceExhausted)
VMS, VOLUMES, NETWORKS, GROUPS = 3, 5, 2, 2
VERBS = ("start", "start", "stop", "restart", "reset", "pause", "resume", "resume")
ALONE = 4  # the volume that no VM has: what needs one at rest is done there as well
PAUSES_S = (0.01, 0.3, 2.0, 8.0, 25.0)


class Client:
    """A list of requests and the position in it."""

    def __init__(self, generator: random.Random, count: int) -> None:
        self._random = generator
        self._policy = random.Random()  # draws of its own: others keep theirs
        self._policy.setstate(generator.getstate())
        self._order = random.Random(generator.getstate()[1][1])
        self._specs: dict[int, dict[str, Any]] = {}  # of the VMs, as applied last
        self._sizes: dict[int, int] = {}  # of the volumes in MiB, as applied last
        self._snapshots: dict[int, dict[str, Any]] = {}  # what is fixed at creation
        self.requests: list[dict[str, Any]] = [self._base()]
        self.requests += [self._request() for _ in range(count)]
        self._ask_the_node(random.Random(generator.getstate()[1][0]))  # takes no draw of others
        ask_for_copies(self.requests, random.Random(generator.getstate()[1][2]))
        self._ask_for_images(random.Random(generator.getstate()[1][1]))
        self.position = 0
        self.acknowledged: dict[str, int] = {}  # uid -> generation
        self.operations: set[str] = set()
        self.refused: Counter[str] = Counter()

    async def run(self, engine: Engine) -> None:
        """Send what is left, in order."""
        while self.position < len(self.requests):
            await anyio.sleep(self._random.choice(PAUSES_S))
            await self._send(engine, self.requests[self.position])

    async def _send(self, engine: Engine, request: dict[str, Any]) -> None:
        key = f"key-{self.position}"
        try:
            await self._dispatch(engine, request, key)
        except LOST:
            return  # once more, under the same key
        except REFUSED as error:
            self.refused[type(error).__name__] += 1
        except ChvError as error:
            raise AssertionError(f"{request}: {error!r}") from error
        self.position += 1

    async def _dispatch(self, engine: Engine, request: dict[str, Any], key: str) -> None:
        if "replug" in request:
            request = self._settled(engine, request)
        if "regroup" in request:
            request = self._regrouped(engine, request["regroup"])
            self.requests[self.position] = request
        match request:
            case {"rebuild": _} | {"clone": _}:
                copying = await ask(engine, request, key)
                self._acknowledge(copying.uid, copying.generation, copying.id)
            case {"apply": objects}:
                objects = with_sources(engine, objects)
                self.requests[self.position] = {"apply": objects}
                raw = [msgspec.Raw(msgspec.json.encode(each)) for each in objects]
                applied = await engine.apply(
                    api.Apply(objects=raw, requester="sim", idempotency_key=key)
                )
                for result in applied.results:
                    self._acknowledge(result.uid, result.generation, result.operation_id)
            case {"delete": (kind, name)}:
                wish = api.DeleteObject(kind=kind, name=name, requester="sim", idempotency_key=key)
                reply = await engine.delete(wish)
                self._acknowledge(reply.operation.uid, 0, reply.operation.id)
            case {"verb": verb, "name": name, "force": force}:
                reply = await engine.act(
                    api.ActOnVm(
                        verb=verb, name=name, requester="sim", force=force, idempotency_key=key
                    )
                )
                operation = reply.operation
                self._acknowledge(operation.uid, operation.generation, operation.id)
            case {"volume_verb": verb, "name": name, **rest}:
                act = api.ActOnVolume(
                    verb=verb, name=name, requester="sim", idempotency_key=key, **rest
                )
                self.operations.add((await engine.act_on_volume(act)).operation.id)
            case {"node": verb}:
                node_wish = ActOnNode(
                    verb=verb,
                    requester="sim",
                    reason="because",
                    idempotency_key=key,
                    until_boot=self.position % 3 == 0,
                )
                operation_id, _ = await engine.node.act(node_wish)
                if operation_id:
                    self.operations.add(operation_id)
            case {"fetch": number}:
                fetch = api.FetchImage(
                    name=f"far{number}",
                    url=f"https://host/far{number}",
                    sha256=f"{number}" * 64,
                    requester="sim",
                    idempotency_key=key,
                )
                await engine.import_image(fetch)
            case {"end_imports": True}:
                await self._end_imports(engine)
            case {"cancel": draw} if self.operations:
                operation_id = sorted(self.operations)[draw % len(self.operations)]
                await engine.cancel(api.CancelOperation(operation_id=operation_id, requester="sim"))

    @staticmethod
    async def _end_imports(engine: Engine) -> None:
        """Ask for the end of every import that is under way, left by an agent that was killed."""
        wanted = api.ListOperations(verb="import", active_only=True)
        for each in (await engine.list_operations(wanted)).operations:
            await engine.cancel(api.CancelOperation(operation_id=each.id, requester="sim"))

    def _acknowledge(self, uid: str, generation: int, operation_id: str) -> None:
        self.acknowledged[uid] = max(generation, self.acknowledged.get(uid, 0))
        if operation_id:
            self.operations.add(operation_id)

    # --- requests

    def _base(self) -> dict[str, Any]:
        objects = [_object("Image", "tiny", {"builtin": "tiny"})]
        objects += [self._network(n) for n in range(NETWORKS)]
        objects += [self._volume(n) for n in range(VOLUMES)]
        objects += [self._group(n) for n in range(GROUPS)]
        return {"apply": [*objects, self._vm(0), self._vm(1)]}

    def _request(self) -> dict[str, Any]:
        drawn = self._policy.random()
        if drawn < 0.3:
            return self._policy_request()
        drawn = self._random.random()
        vm = self._random.randrange(VMS)
        if drawn < 0.4:
            return {"apply": self._some()}
        if drawn < 0.52:
            return {"delete": self._victim()}
        if drawn < 0.75:
            return self._storage()
        if drawn < 0.85:
            return {"replug": vm}
        verb = self._random.choice(VERBS)
        force = verb in ("stop", "restart") and self._random.random() < 0.3
        return {"verb": api.VmVerb(verb), "name": f"vm{vm}", "force": force}

    def _ask_the_node(self, draw: random.Random) -> None:
        """In some of the schedules an operator asks for drains, and mostly takes them back soon."""
        if draw.random() < 0.6:
            return
        for _ in range(draw.choice((1, 2))):
            first = draw.choice([NodeVerb.DRAIN] * 3 + [NodeVerb.MAINTENANCE])
            back = draw.choice([NodeVerb.CANCEL_DRAIN, NodeVerb.RESUME])
            at = draw.randrange(1, len(self.requests) + 1)
            self.requests.insert(at, {"node": first})
            later = min(len(self.requests), at + 1 + draw.choice((0, 0, 1, 3)))
            self.requests[later:later] = [{"node": back}] * draw.choice((1, 2))
        if draw.random() < 0.3:
            at = draw.randrange(1, len(self.requests) + 1)
            pause = [{"node": NodeVerb.PAUSE_SCHEDULING}, {"node": NodeVerb.RESUME_SCHEDULING}]
            self.requests[at:at] = [pause[0]]
            self.requests.insert(draw.randrange(at + 1, len(self.requests) + 1), pause[1])

    def _ask_for_images(self, draw: random.Random) -> None:
        """In some of the schedules images are imported, and now and then not to the end."""
        if draw.random() < 0.7:
            return
        for number in range(draw.choice((1, 2))):
            at = draw.randrange(1, len(self.requests) + 1)
            self.requests.insert(at, {"fetch": number})
            if draw.random() < 0.5:
                self.requests.insert(at + 1, {"end_imports": True})
                self.requests.insert(at + 2, {"delete": ("Image", f"far{number}")})

    def _victim(self) -> tuple[str, str]:
        kinds = ["VirtualMachine"] * 5 + ["Volume", "Network", "Image"] + ["VolumeSnapshot"] * 3
        kind = self._random.choice(kinds)
        names = {
            "VolumeSnapshot": f"snap{self._random.choice([0, 1, 2, ALONE, ALONE, ALONE])}",
            "VirtualMachine": f"vm{self._random.randrange(VMS)}",
            "Volume": self._random.choice(
                [*(f"vol{n}" for n in range(VOLUMES)), *(f"clone{n}" for n in (0, 2, ALONE, ALONE))]
            ),
            "Network": f"net{self._random.randrange(NETWORKS)}",
            "Image": "tiny",
        }
        return kind, names[kind]

    def _some(self) -> list[dict[str, Any]]:
        vm = self._random.randrange(VMS)
        objects = [_object("Image", "tiny", {"builtin": "tiny"})]
        objects += [self._network(n) for n in range(NETWORKS)]
        objects += [self._volume(n) for n in range(VOLUMES)]
        objects += [self._group(n) for n in range(GROUPS)]
        chosen = objects if self._random.random() < 0.8 else []
        return [*chosen, self._vm(vm)]

    def _network(self, number: int) -> dict[str, Any]:
        spec: dict[str, Any] = {"subnet": f"10.{number + 1}.0.0/24"}
        if self._policy.random() < 0.3:
            spec["metadata"] = True
        return _object("Network", f"net{number}", spec)

    # --- groups, exposures

    def _policy_request(self) -> dict[str, Any]:
        number = self._policy.randrange(GROUPS)
        match self._policy.choice(
            ["group", "exposure", "exposure", "regroup", "network", "delete"]
        ):
            case "group":
                return {"apply": [self._group(n) for n in range(GROUPS)]}
            case "exposure":
                return {"apply": [self._exposure(self._policy.randrange(NETWORKS))]}
            case "network":
                return {"apply": [self._network(self._policy.randrange(NETWORKS))]}
            case "delete":
                victims = [("SecurityGroup", f"sg{number}"), ("Exposure", f"exp{number}")]
                return {"delete": self._policy.choice(victims)}
        return {"regroup": self._policy.randrange(VMS)}

    def _group(self, number: int) -> dict[str, Any]:
        """Groups that name each other, as those of two tiers do."""
        names = [f"sg{number}", f"sg{(number + 1) % GROUPS}"]
        port = self._policy.choice(["80", "443", "8000-8010"])
        rule = {"protocol": "TCP", "ports": [port], "securityGroups": names}
        return _object("SecurityGroup", f"sg{number}", {"ingress": [rule], "egress": [rule]})

    def _exposure(self, number: int) -> dict[str, Any]:
        vms = self._policy.choice([[0], [1], [0, 1], [0, 1, 2]])
        spec = {
            "network": f"net{number}",
            "addresses": ["192.0.2.1"],
            "port": 8000 + number,
            "sources": ["0.0.0.0/0"],
            "targets": [{"virtualMachine": f"vm{n}"} for n in vms],
        }
        return _object("Exposure", f"exp{number}", spec)

    def _groups_of_nic(self) -> list[str]:
        return self._policy.choice([[], [], ["sg0"], ["sg1"], ["sg0", "sg1"]])

    def _regrouped(self, engine: Engine, number: int) -> dict[str, Any]:
        """A VM as it is stored, but for what changes of its NICs while it runs."""
        try:
            spec = _stored(engine, f"vm{number}")["spec"]
        except NotFound:
            spec = self._specs.get(number) or self._vm(number)["spec"]
        interfaces = [
            {**each, "securityGroups": self._groups_of_nic()} for each in spec.get("interfaces", [])
        ]
        vm = _object("VirtualMachine", f"vm{number}", {**spec, "interfaces": interfaces})
        return {"apply": [vm]}

    def _volume(self, number: int) -> dict[str, Any]:
        spec: dict[str, Any] = {
            "size": f"{self._size(number)}Mi",
            "format": "raw",
            "pool": self._random.choice(["", "", "", "", "fast"]),
        }
        if self._random.random() < 0.2:
            spec["limits"] = {"iopsTotal": {"limit": self._random.choice([100, 200])}}
        return _object("Volume", f"vol{number}", spec)

    def _size(self, number: int) -> int:
        """Mostly as before or larger; now and then smaller, which is refused."""
        last = self._sizes.get(number, 64)
        size = last if self._random.random() < 0.6 else last + 64
        self._sizes[number] = size
        return 64 if self._random.random() < 0.04 else size

    # --- snapshots, clones, verbs on volumes

    def _storage(self) -> dict[str, Any]:
        number = self._random.choice([0, 1, ALONE, ALONE])
        known = number in self._snapshots
        draws = ["snapshot"] * (1 if known else 4) + ["verb"] * 3 + ["cancel"]
        draws += ["clone", "clone", "restore", "restore", "delete"] if known else []
        match self._random.choice(draws):
            case "snapshot":
                of = self._snapshots.setdefault(number, self._snapshot(number))
                return {"apply": [_object("VolumeSnapshot", f"snap{number}", of)]}
            case "clone":
                return {"apply": [self._clone(number)]}
            case "cancel":
                return {"cancel": self._random.randrange(100)}
            case "delete":
                return {"delete": ("VolumeSnapshot", f"snap{number}")}
            case "restore":
                verb = api.VolumeVerb.RESTORE
                return {"volume_verb": verb, "name": f"vol{number}", "snapshot": f"snap{number}"}
        verb = api.VolumeVerb(self._random.choice(["check", "repair", "backup", "grow_now"]))
        request: dict[str, Any] = {"volume_verb": verb, "name": f"vol{number}"}
        if verb is api.VolumeVerb.BACKUP:
            request |= {"target": "/backups", "incremental": self._random.random() < 0.5}
        return request

    def _snapshot(self, number: int) -> dict[str, Any]:
        of = [{"volume": f"vol{number}"}] * 2
        if number != ALONE:
            of.append({"virtualMachine": f"vm{number}"})
        spec = self._random.choice(of)
        return {**spec, "freeze": "5s"} if self._random.random() < 0.3 else spec

    def _clone(self, number: int) -> dict[str, Any]:
        mode = self._random.choice(["Linked", "Full"])
        source = {"snapshot": f"snap{number}", "mode": mode}
        spec = {"size": "1Gi", "format": "qcow2", "source": source}
        return _object("Volume", f"clone{number}", spec)

    def _vm(self, number: int) -> dict[str, Any]:
        # vol0 for vm0 and so on; vol3 is wanted by all, so that some are refused.
        volumes = self._random.choice([[], [number], [number], [number, VMS]])
        networks = self._random.choice([[0], [1], [0, 1], []])
        strategies = [*["Always", "RerunOnFailure"] * 4, "Manual", "Halted"]
        spec = {
            "runStrategy": self._random.choice(strategies),
            "cpus": self._random.choice([1, 2]),
            "maxCpus": self._random.choice([0, 4]),
            "memory": self._random.choice(["128Mi", "256Mi"]),
            "maxMemory": self._random.choice(["", "384Mi"]),
            "boot": {"image": "tiny"},
            "shutdownTimeout": self._random.choice(["3s", "20s"]),
            "disks": [{"name": f"d{n}", "volume": f"vol{n}"} for n in volumes],
            "interfaces": [
                {"name": f"eth{n}", "network": f"net{n}", "securityGroups": self._groups_of_nic()}
                for n in networks
            ],
            **self._order.choice([{}, {"startPriority": number}, {"startPriority": -1}]),
            **self._order.choice([{}, {}, {"startDelay": "5s"}]),
        }
        self._specs[number] = spec
        return _object("VirtualMachine", f"vm{number}", spec)

    def _settled(self, engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
        """Put what is asked for next in place of a change of disks: that, or what came after it.

        Disks change while VMs run; while none does, the change is put off behind what follows.
        """
        running = [n for n in range(VMS) if _is_running(engine, f"vm{n}")]
        others = range(self.position + 1, len(self.requests))
        following = next((n for n in others if "replug" not in self.requests[n]), None)
        if not running and following is not None:
            settled, self.requests[following] = self.requests[following], request
        else:
            settled = self._replugged(engine, self._random.choice(running or [request["replug"]]))
        self.requests[self.position] = settled
        return settled

    def _replugged(self, engine: Engine, number: int) -> dict[str, Any]:
        """A VM as it is stored, but for its disks: they may change while it runs."""
        if _is_running(engine, f"vm{number}"):
            spec = _stored(engine, f"vm{number}")["spec"]
        else:
            spec = self._specs.get(number) or self._vm(number)["spec"]
        has = {disk["volume"] for disk in spec.get("disks", [])}
        others = [[], [number], [VMS], [number, VMS], [VMS, number]]
        volumes = self._random.choice([v for v in others if {f"vol{n}" for n in v} != has])
        names = [f"d{n}" for n in (volumes if self._random.random() < 0.7 else [0, 1])]
        disks = [
            {"name": name, "volume": f"vol{n}"} for name, n in zip(names, volumes, strict=False)
        ]
        return {"apply": [_object("VirtualMachine", f"vm{number}", {**spec, "disks": disks})]}


def _stored(engine: Engine, name: str) -> dict[str, Any]:
    found = engine.get(api.ObjectRef(kind="VirtualMachine", name=name)).object
    stored: dict[str, Any] = msgspec.json.decode(found)
    return stored


def _is_running(engine: Engine, name: str) -> bool:
    try:
        stored = _stored(engine, name)
    except NotFound:
        return False
    return (stored.get("status") or {}).get("phase") == "Running"


def _object(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
