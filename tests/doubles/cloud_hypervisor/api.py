"""Which path is which verb, and what an answer looks like."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from tests.doubles.cloud_hypervisor import shapes
from tests.doubles.cloud_hypervisor.http import Request, response
from tests.doubles.cloud_hypervisor.refusal import BACKTRACE, Malformed, Refusal
from tests.doubles.cloud_hypervisor.shapes import Shape
from tests.doubles.cloud_hypervisor.switches import backtraces
from tests.doubles.cloud_hypervisor.travelling import NESTED, TravellingMachine

ROOT = "/api/v1/"
GETS = {"vmm.ping": "", "vm.info": "The VM info is not available"}
GETS["vm.counters"] = GETS["vm.info"]
ACTIONS = {
    "vmm.shutdown": "The VMM could not shutdown",
    "vm.boot": "The VM could not boot",
    "vm.delete": "The VM could not be deleted",
    "vm.shutdown": "The VM could not shutdown",
    "vm.reboot": "The VM could not reboot",
    "vm.pause": "The VM could not be paused",
    "vm.resume": "The VM could not resume",
    "vm.power-button": "Error triggering power button",
    "vm.nmi": "Error triggering NMI",
}
ADDED = {"vm.add-disk": "disk", "vm.add-net": "net", "vm.add-vsock": "vsock"}
ABSENT = ("fs", "pmem", "vdpa", "device", "user-device", "generic-vhost-user")
BODIES: dict[str, tuple[Shape, str]] = {
    "vm.create": (shapes.VM, "The VM could not be created"),
    "vm.add-disk": (shapes.DISK, "The disk could not be added to the VM"),
    "vm.add-net": (shapes.NET, "The network device could not be added to the VM"),
    "vm.add-vsock": (shapes.VSOCK, "The vsock device could not be added to the VM"),
    "vm.remove-device": (shapes.REMOVE, "The device could not be removed from the VM"),
    "vm.resize": (shapes.RESIZE, "The VM could not be resized"),
    "vm.resize-disk": (shapes.RESIZE_DISK, "The disk could not be resized"),
    "vm.resize-zone": (shapes.RESIZE_ZONE, "The memory zone could not be resized"),
    "vm.snapshot": (shapes.SNAPSHOT, "The VM could not be snapshotted"),
    "vm.restore": (shapes.RESTORE, "The VM could not be restored"),
    "vm.send-migration": (shapes.SEND, "Error dispatching the migration worker"),
    "vm.receive-migration": (shapes.RECEIVE, "Error receiving migration"),
}
BODIES |= {
    f"vm.add-{kind}": (Shape("any", {}), f"The double has no {kind} devices") for kind in ABSENT
}
CORE_DUMP = (shapes.SNAPSHOT, "The VM could not be coredumped")


class Api:
    """Calls the machine, one request after the other."""

    def __init__(self, machine: TravellingMachine) -> None:
        self._machine = machine
        self._switches = machine.switches
        self._decoder = shapes.Decoder(self._switches.major)
        self._bodies = dict(BODIES)
        if self._switches.guest_debug:
            self._bodies["vm.coredump"] = CORE_DUMP

    def handle(self, request: Request) -> bytes:
        """Return the whole answer."""
        name = request.path.removeprefix(ROOT) if request.path.startswith(ROOT) else ""
        if name not in GETS and name not in ACTIONS and name not in self._bodies:
            return _errors(404, "Not Found")
        if request.method == "PATCH":
            return response(400, b"")
        self._misbehave(name)
        if request.method == "GET":
            return self._get(name)
        if name == "vm.create" and request.body is None:
            return response(400, b"")
        if name == "vmm.shutdown":
            request.body = None  # a body changes nothing here
        wants_body = name in self._bodies
        if name in GETS or wants_body != (request.body is not None):
            return _errors(400, "Bad Request")
        return self._put(name, request)

    def _misbehave(self, name: str) -> None:
        time.sleep(self._switches.slow.get(name, 0))
        if name in self._switches.crash:
            os.kill(os.getpid(), self._switches.crash[name])

    def _get(self, name: str) -> bytes:
        machine = self._machine
        verbs: dict[str, Callable[[], Any]] = {
            "vmm.ping": self._ping,
            "vm.info": machine.info,
            "vm.counters": machine.counters,
        }
        if name not in verbs:
            return _errors(400, "Bad Request")
        return self._answer(name, GETS[name], verbs[name])

    def _ping(self) -> dict[str, Any]:
        version = self._switches.version
        features = ["guest_debug"] if self._switches.guest_debug else []
        return {
            "build_version": f"v{version}",
            "version": version,
            "pid": os.getpid(),
            "features": [*features, "io_uring", "kvm"],
        }

    def _put(self, name: str, request: Request) -> bytes:
        if name in ACTIONS:
            answer = self._answer(name, ACTIONS[name], self._action(name))
            return response(200, b"") if name == "vmm.shutdown" and b" 204 " in answer else answer
        shape, phrase = self._bodies[name]
        try:
            body = self._decoder.decode(shape, request.body or b"")
        except Malformed as error:
            return _errors(400, "Failed to deserialize JSON", str(error))
        if name == "vm.restore":
            expected = sum(nic["num_fds"] for nic in body.get("net_fds") or ())
            if "net_fds" in body and expected != len(request.fds):
                return _errors(400, "Bad Request")
        return self._answer(name, phrase, lambda: self._with_body(name, body, request.fds))

    def _action(self, name: str) -> Callable[[], Any]:
        machine = self._machine
        return {
            "vmm.shutdown": machine.end,
            "vm.boot": machine.boot,
            "vm.delete": machine.delete,
            "vm.shutdown": machine.shutdown,
            "vm.reboot": machine.reboot,
            "vm.pause": machine.pause,
            "vm.resume": machine.resume,
            "vm.power-button": machine.power_button,
            "vm.nmi": machine.nmi,
        }[name]

    def _with_body(self, name: str, body: dict[str, Any], fds: list[int]) -> Any:
        machine = self._machine
        if name in ADDED:
            return machine.add(ADDED[name], body, fds)
        match name:
            case "vm.create":
                machine.create(body)
            case "vm.remove-device":
                machine.remove(body["id"])
            case "vm.resize":
                machine.resize(body)
            case "vm.resize-disk":
                machine.resize_disk(body["id"], body["desired_size"])
            case "vm.resize-zone":
                machine.resize_zone()
            case "vm.snapshot":
                machine.snapshot(body["destination_url"])
            case "vm.coredump":
                machine.core_dump(body["destination_url"])
            case "vm.restore":
                machine.restore(body, fds)
            case "vm.send-migration":
                machine.send(body["destination_url"])
            case "vm.receive-migration":
                machine.receive(body["receiver_url"])
            case _:
                raise Refusal("not in the double")
        return None

    def _answer(self, name: str, phrase: str, verb: Callable[[], Any]) -> bytes:
        try:
            found = verb()
        except Refusal as error:
            return self._refusal(name, phrase, error)
        if found is None:
            return response(204, None)
        return response(200, json.dumps(found, separators=(",", ":")).encode())

    def _refusal(self, name: str, phrase: str, error: Refusal) -> bytes:
        if error.status == 429:
            return _errors(429, "Too Many Requests")
        messages = [phrase, *error.messages]
        if backtraces() and messages[-1] == NESTED:
            messages[-1] = messages[-1].removesuffix(")") + BACKTRACE + ")"
        status = error.status if self._switches.major >= 53 else 500
        return _errors(status, "Error from API", *messages)


def _errors(status: int, *messages: str) -> bytes:
    return response(status, json.dumps(messages, separators=(",", ":")).encode())
