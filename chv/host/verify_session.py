"""The agent's side of `chv verify`: makes objects, listens to the guest, takes all away again.

What is made carries a label that names the process which will remove it (pid, start time, boot);
`sweep` removes what such a process left that is gone. Errors of the agent come out as they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import anyio
import msgspec

from chv.common.errors import ChvError, Internal, InUse, NotFound, from_data
from chv.common.pages import whole
from chv.common.process import procfs
from chv.common.rpc import Client
from chv.common.wire import agent
from chv.common.wire.resources import KINDS, Resource
from chv.host.verify_plan import LABEL
from chv.probe.events import Event
from chv.probe.lines import parse_line

OPERATION_S_MAX = 60.0
LINES_MAX = 2000
RETRY_S = 0.05
ROUNDS_MAX = 5
# What goes first: whoever uses something goes before it.
REMOVAL = ("VirtualMachine", "VolumeSnapshot", "Volume", "SecurityGroup", "Network", "Image")
_STAMP = re.compile(r"^\S+Z ")


def owner() -> str:
    """Return this process as a label: its pid, when it was started, in which boot."""
    return _as_label(os.getpid())


def _as_label(pid: int) -> str:
    seen = procfs.stat(pid)
    if seen is None or seen.dead:
        return ""
    return f"{pid}.{seen.start_time}.{procfs.boot_id()[:8]}"


def is_alive(label: str) -> bool:
    """Tell whether the process of a label still runs."""
    pid = label.partition(".")[0]
    return pid.isdigit() and _as_label(int(pid)) == label


class Session:
    """One connection to the agent, for one run of `chv verify`."""

    def __init__(self, client: Client, requester: str) -> None:
        self.client = client
        self.events: list[Event] = []
        self._requester = requester
        self._partial = ""
        self._heard = anyio.Event()

    # --- objects
    async def get(self, kind: str, name: str, namespace: str) -> Resource:
        """Return an object; NotFound where it is not there."""
        reply = await self.client.call(
            agent.GET, agent.ObjectRef(kind=kind, name=name, namespace=namespace)
        )
        return msgspec.json.decode(reply.object, type=KINDS[kind])

    async def all(self, kind: str, namespace: str = "") -> list[Resource]:
        """Return all objects of a kind, of one namespace where given."""
        request = agent.ListObjects(kind=kind, namespace=namespace)
        reply = await whole(self.client.call, agent.LIST, request, "items")
        return [msgspec.json.decode(item, type=KINDS[kind]) for item in reply.items]

    async def apply(self, documents: Sequence[dict[str, Any]]) -> list[agent.AppliedObject]:
        """Store manifests."""
        raw = [msgspec.Raw(msgspec.json.encode(document)) for document in documents]
        request = agent.Apply(objects=raw, requester=self._requester, reason="chv verify")
        return (await self.client.call(agent.APPLY, request)).results

    async def act(self, verb: agent.VmVerb, name: str, namespace: str) -> agent.Operation:
        """Do a verb on a VM; return its final operation."""
        request = agent.ActOnVm(
            verb=verb, name=name, namespace=namespace,
            requester=self._requester, reason="chv verify",
        )  # fmt: skip
        return await self.done((await self.client.call(agent.ACT_ON_VM, request)).operation.id)

    async def done(self, operation_id: str) -> agent.Operation:
        """Return a final operation; raises what it failed with."""
        request = agent.WaitOperation(operation_id=operation_id, timeout_s=OPERATION_S_MAX)
        reply = await self.client.call(agent.WAIT_OPERATION, request, timeout_s=OPERATION_S_MAX + 5)
        operation = reply.operation
        if operation.error is not None:
            raise from_data(operation.error)
        if operation.state is not agent.OperationState.SUCCEEDED:
            raise Internal(f"{operation.verb} of {operation.name}: {operation.message}")
        return operation

    # --- what the guest says
    async def follow(self, vm: str, namespace: str) -> None:
        """Hear the VM's console, for ever, from its first line on."""
        request = agent.ReadLogs(
            target=f"vm/{vm}", namespace=namespace, tail_lines=LINES_MAX, follow=True
        )
        while True:
            try:
                await self.client.stream(agent.READ_LOGS, request, self._hear)
            except NotFound:
                await anyio.sleep(RETRY_S)  # it has not said anything yet

    def _hear(self, chunk: agent.LogChunk) -> None:
        *lines, self._partial = (self._partial + chunk.text).split("\n")
        self.events += [parse_line(_STAMP.sub("", line)) for line in lines]
        self._heard.set()
        self._heard = anyio.Event()

    async def hear_until(self, holds: Callable[[list[Event]], bool], timeout_s: float) -> bool:
        """Wait until what was heard fulfils something; False when it takes too long."""
        with anyio.move_on_after(timeout_s):
            while not holds(self.events):
                await self._heard.wait()
        return holds(self.events)

    # --- taking away
    async def sweep(self) -> list[str]:
        """Remove what runs left that are gone; return the names."""
        left = [item for item in await self._labelled() if not is_alive(_label(item))]
        await self._remove(left)
        return [item.metadata.name for item in left]

    async def remove(self, label: str) -> list[str]:
        """Remove all of one run; return the names of what is there still."""
        await self._remove([item for item in await self._labelled() if _label(item) == label])
        return [item.metadata.name for item in await self._labelled() if _label(item) == label]

    async def _labelled(self) -> list[Resource]:
        found = [item for kind in REMOVAL for item in await self.all(kind)]
        return [item for item in found if _label(item)]

    async def _remove(self, items: Iterable[Resource]) -> None:
        """VMs go first, the rest together once they are gone; what is in use still, again."""
        pending = list(items)
        for _ in range(ROUNDS_MAX):
            vms = [item for item in pending if item.kind == REMOVAL[0]]
            now = vms or pending
            pending = [item for item in pending if item not in now]
            async with anyio.create_task_group() as tasks:
                for item in now:
                    tasks.start_soon(self._delete, item, pending)
            if not pending:
                return

    async def _delete(self, item: Resource, again: list[Resource]) -> None:
        if item.kind == REMOVAL[0]:
            await self._end(item)
        request = agent.DeleteObject(
            kind=item.kind, name=item.metadata.name, namespace=item.metadata.namespace,
            uid=item.metadata.uid, requester=self._requester, reason="chv verify",
        )  # fmt: skip
        try:
            await self.done((await self.client.call(agent.DELETE, request)).operation.id)
        except NotFound:
            return
        except InUse:
            again.append(item)
        except ChvError:
            # Whatever it is: the others go all the same, and this one is reported as left behind.
            return

    async def _end(self, vm: Resource) -> None:
        """End a VM without asking its guest, which has nothing to lose; deleting would ask."""
        request = agent.ActOnVm(
            verb=agent.VmVerb.STOP, name=vm.metadata.name, namespace=vm.metadata.namespace,
            requester=self._requester, reason="chv verify", force=True,
        )  # fmt: skip
        with suppress(ChvError):  # it is deleted all the same
            await self.client.call(agent.ACT_ON_VM, request)


def _label(item: Resource) -> str:
    return item.metadata.labels.get(LABEL, "")
