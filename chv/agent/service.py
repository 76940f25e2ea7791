"""The agent's local API: wire methods to the engine, the node and the daemons. No logic of its own.

Everything answers from memory or waits for nothing but the engine, so a hung VMM or daemon cannot
make a read hang.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import msgspec

from chv import VERSION
from chv.agent import log_reader
from chv.agent.chores import Came, Task, Tell, Way, Wish
from chv.agent.console.recording import FILE_NAME
from chv.agent.daemons import Daemons
from chv.agent.engine import Engine
from chv.agent.events_api import EventsApi
from chv.agent.history_api import HistoryApi
from chv.agent.image.callers import path_refused, refuse_paths
from chv.agent.network.watching import Watching
from chv.agent.node import Node
from chv.agent.node_record import NODE_UID, Hold, NodeRecord
from chv.agent.node_waiting import NodeWaiting
from chv.agent.probes import Probes
from chv.agent.seeds import Seeds
from chv.agent.side_verbs import RESET_NODE
from chv.agent.vmms import Vmms
from chv.common.clock import boot_id
from chv.common.config import Config
from chv.common.errors import FailedPrecondition, InvalidArgument
from chv.common.layout import Layout
from chv.common.rpc import CallContext, Server, WithFds
from chv.common.wire import agent as api
from chv.common.wire.agent import Operation
from chv.common.wire.agent_clone import CLONE_VM
from chv.common.wire.agent_node import ACT_ON_NODE, ActOnNode, NodeHold, NodeVerbReply
from chv.common.wire.agent_rebuild import REBUILD_VM
from chv.common.wire.hello import common_version
from chv.common.wire.nwd import OPEN_GUEST_CONNECTION, NwdHealth, OpenGuestConnection
from chv.common.wire.stord import GET_METRICS, LIST_JOBS, JobsReply, StorageMetrics
from chv.common.wire.types import (
    HELLO,
    PROTOCOL_VERSIONS,
    Done,
    Empty,
    Feature,
    HelloReply,
    HelloRequest,
)

DAEMON_LOGS = ("agent", "stord", "nwd", "console")
GUEST_USER = "root"  # whom our seed disk lets in


@dataclass(frozen=True)
class Parts:
    """What the service answers from."""

    config: Config
    layout: Layout
    node: Node
    engine: Engine
    daemons: Daemons
    probes: Probes
    vmms: Vmms
    seeds: Seeds


class Service:
    """Handlers of the agent's method table."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._engine = parts.engine
        self._layout = parts.layout

    def register(self, server: Server) -> None:
        """Give every method its handler."""
        engine = self._engine
        server.add(api.APPLY, self.apply)
        server.add(api.GET, self.get_object)
        server.add(api.LIST, self.list_objects)
        server.add(api.DELETE, engine.delete)
        server.add(api.ACT_ON_VM, engine.act)
        server.add(api.GET_OPERATION, engine.get_operation)
        server.add(api.LIST_OPERATIONS, engine.list_operations)
        server.add(api.WAIT_OPERATION, engine.wait_operation)
        server.add(api.WAIT_CONDITION, engine.wait_condition)
        server.add(api.NODE_STATUS, self.node_status, during_recovery=True)
        server.add(api.RESET_NODE, self.reset_node)
        server.add(ACT_ON_NODE, self.act_on_node)
        server.add(api.OPEN_GUEST, self.open_guest)
        server.add(api.GET_GUEST_ACCESS, self.guest_access)
        server.add(api.READ_LOGS, self.read_logs)
        server.add(api.IMPORT_IMAGE, self.import_image)
        server.add(api.FETCH_IMAGE, self.fetch_image)
        server.add(api.OPEN_UPLOAD, self.open_upload)
        server.add(api.FINISH_UPLOAD, self.finish_upload)
        server.add(api.COLLECT_IMAGES, engine.collect_images)
        engine.chores.teach(RESET_NODE, Way(self._reset))
        server.add(api.ACT_ON_VOLUME, engine.act_on_volume)
        server.add(api.BACK_UP_VM, engine.back_up_vm)
        server.add(CLONE_VM, engine.clone)
        server.add(REBUILD_VM, engine.rebuild)
        server.add(api.CANCEL_OPERATION, engine.cancel)
        server.add(api.PUT_KEY, engine.keys.put)
        server.add(api.DELETE_KEY, engine.keys.delete)
        server.add(api.LIST_KEYS, engine.keys.list_all)
        server.add(api.GET_STORAGE_METRICS, self.storage_metrics)
        server.add(api.LIST_JOBS, self.storage_jobs)
        NodeWaiting(self._parts.node, self._is_paused, engine.upstream.conditions).register(server)
        HistoryApi(engine.history, engine.why).register(server)
        EventsApi(engine.ledger, self._parts.config.node.name).register(server)
        Watching(self._parts.daemons.link("nwd"), engine.directory).register(server)

    def _is_paused(self) -> bool:
        return self._engine.node.record.paused is not None

    async def get_object(self, request: api.ObjectRef) -> api.ObjectReply:
        """One object, from memory."""
        return self._engine.get(request)

    async def list_objects(self, request: api.ListObjects) -> api.ListReply:
        """All objects of a kind, from memory."""
        return self._engine.list(request)

    async def node_status(self, request: Empty) -> api.NodeStatusReply:
        """State, daemons, VMMs and conditions of the node."""
        parts, node = self._parts, self._parts.node
        record = self._engine.node.record
        return api.NodeStatusReply(
            name=parts.config.node.name,
            instance=self._layout.instance,
            state=node.state,
            since=node.since,
            version=VERSION,
            pid=os.getpid(),
            boot_id=boot_id(),
            run_dir=str(self._layout.run),
            state_dir=str(self._layout.state),
            daemons=parts.daemons.statuses(),
            vmms=parts.probes.results(),
            conditions=[*node.conditions(), *self._others(record)],
            features=self._features(),
            counts=self._engine.counts(),
            transitions=list(node.transitions),
            hold=_hold(record.hold) if record.holds_vms else None,
            drain=self._engine.node.progress(),
            scheduling_paused=_hold(record.paused),
        )

    def _others(self, record: NodeRecord) -> list[api.NodeCondition]:
        """Return the conditions that are no predicates of the state."""
        upstream = self._engine.upstream.conditions()
        return [*upstream, *_scheduling(record.paused), *self._warnings()]

    def _features(self) -> list[Feature]:
        found: list[Feature] = []
        for name in ("stord", "nwd"):
            health = self._parts.daemons.health(name)
            if health is not None:
                found += health.features
        return found

    def _warnings(self) -> list[api.NodeCondition]:
        """What nwd finds in its way on the host: `HostForwardBlocked: chain ...`."""
        health = self._parts.daemons.health("nwd")
        found = []
        for text in health.warnings if isinstance(health, NwdHealth) else ():
            kind, _, message = text.partition(": ")
            found.append(
                api.NodeCondition(type=kind, status="True", reason="SeenByNwd", message=message)
            )
        return found

    async def reset_node(self, request: api.ResetNode) -> api.OperationReply:
        """Leave Failed; daemons that were given up on get another chance."""
        wish = Wish(
            verb=RESET_NODE,
            kind="Node",
            name=NODE_UID,
            requester=request.requester,
            reason=request.reason,
            idempotency_key=request.idempotency_key,
        )
        chores = self._engine.chores
        operation, joined = await chores.begin(wish, check=self._parts.node.refuse_reset)
        return api.OperationReply(operation=await chores.outcome(operation.id), joined=joined)

    async def _reset(self, task: Task) -> Came:
        if not task.again:  # a new agent has left Failed by itself
            self._parts.node.reset()
            self._parts.daemons.reset()
        return Came("the node begins anew")

    async def act_on_node(self, request: ActOnNode) -> NodeVerbReply:
        """Drain, maintenance, resume, pause and resume scheduling."""
        operation_id, joined = await self._engine.node.act(request)
        state = self._parts.node.state
        return NodeVerbReply(state=state, operation_id=operation_id, joined=joined)

    async def storage_metrics(self, request: Empty) -> StorageMetrics:
        """What stord counts, and what nobody does."""
        return await self._parts.daemons.link("stord").call(GET_METRICS, request)

    async def storage_jobs(self, request: Empty) -> JobsReply:
        """Jobs of stord under way, and the last ones that ended."""
        return await self._parts.daemons.link("stord").call(LIST_JOBS, request)

    async def open_guest(self, request: api.OpenGuest) -> WithFds[api.OpenGuestReply]:
        """Connect into the guest; the socket goes to the caller and no byte passes us."""
        access = self._engine.vm_access(request.name, request.namespace, request.interface)
        if request.port not in access.guest_ports:
            declared = ", ".join(str(port) for port in access.guest_ports) or "none"
            raise FailedPrecondition(
                f"port {request.port} is not declared by VM {request.name} (declared: {declared})",
                field="spec.guestPorts",
                hint=f"add {request.port} to spec.guestPorts",
            )
        reply, fds = await self._parts.daemons.link("nwd").call_fds(
            OPEN_GUEST_CONNECTION,
            OpenGuestConnection(
                nic_id=access.nic_id, port=request.port, timeout_s=request.timeout_s
            ),
        )
        return WithFds(api.OpenGuestReply(local=reply.local, remote=reply.remote), fds)

    async def guest_access(self, request: api.ObjectRef) -> api.GuestAccessReply:
        """Say how to log in, with the pinned host key."""
        if request.kind != "VirtualMachine":
            raise InvalidArgument(f"{request.kind} has no guest", field="kind")
        access = self._engine.vm_access(request.name, request.namespace)
        if not access.host_key:
            raise FailedPrecondition(
                f"VM {request.name} has no pinned host key yet", hint="it was never started"
            )
        return api.GuestAccessReply(
            user=GUEST_USER,
            port=22,
            address=access.address,
            host_key=access.host_key,
            identity_file=str(self._parts.seeds.operator_identity),
        )

    async def read_logs(self, request: api.ReadLogs, context: CallContext) -> Done:
        """Send the end of a log and, if asked, what is appended."""
        kind, _, name = request.target.partition("/")
        if kind == "vm":
            vm_uid = self._engine.vm_uid(name, request.namespace)
            path = self._layout.vm_state(vm_uid) / FILE_NAME
        elif name in DAEMON_LOGS:
            path = self._layout.logs / f"{name}.log"
        else:
            known = ", ".join(DAEMON_LOGS)
            raise InvalidArgument(f"no daemon {name!r}", field="target", hint=f"one of {known}")
        text, start = await log_reader.read(
            path, request.tail_lines, request.target, log_reader.moment(request.since)
        )
        for offset in range(0, len(text), log_reader.CHUNK_BYTES):
            await context.emit(api.LogChunk(text=text[offset : offset + log_reader.CHUNK_BYTES]))
        if request.follow:
            async for chunk in log_reader.follow(path, start):
                await context.emit(api.LogChunk(text=chunk))
        return Done()

    async def apply(self, request: api.Apply, context: CallContext) -> api.ApplyReply:
        """Apply; files of the node are root's to name."""
        if context.peer_uid != 0:
            for raw in request.objects:
                refuse_paths(raw)
        return await self._engine.apply(request)

    async def import_image(
        self, request: api.ImportImage, context: CallContext
    ) -> api.ImportImageReply:
        """Import a file of the node, telling progress."""
        if context.peer_uid != 0:
            raise path_refused(request.path, "path")
        return await self._engine.import_image(request, _teller(context, "importing"))

    async def fetch_image(
        self, request: api.FetchImage, context: CallContext
    ) -> api.ImportImageReply:
        """Import by URL, telling progress."""
        return await self._engine.import_image(request, _teller(context, "downloading"))

    async def open_upload(self, request: api.OpenUpload) -> WithFds[api.UploadReply]:
        """Hand out the end of a pipe."""
        upload_id, descriptor = await self._engine.open_upload(request)
        return WithFds(api.UploadReply(upload_id=upload_id), [descriptor])

    async def finish_upload(
        self, request: api.FinishUpload, context: CallContext
    ) -> api.ImportImageReply:
        """Take what was sent."""
        return await self._engine.import_image(request, _teller(context, "verifying"))


def _hold(hold: Hold | None) -> NodeHold | None:
    """Return a hold for the status."""
    return None if hold is None else NodeHold(**msgspec.structs.asdict(hold))


def _scheduling(paused: Hold | None) -> list[api.NodeCondition]:
    """Return the condition that new VMs are kept away, where they are."""
    if paused is None:
        return []
    return [
        api.NodeCondition(
            type="SchedulingPaused",
            status="True",
            reason="AskedFor",
            message=paused.words,
            since=paused.since,
        )
    ]


def _teller(context: CallContext, step: str) -> Tell:
    async def tell(operation: Operation) -> None:
        known, queue = operation.progress, operation.queue
        event = api.Progress(
            step=step if queue is None else f"waiting, position {queue.position}",
            operation_id=operation.id,
            done=known.done if known is not None else 0,
            total=known.total if known is not None else 0,
        )
        await context.emit(event)

    return tell


def hello(layout: Layout, state: str, protocol: int = PROTOCOL_VERSIONS[-1]) -> HelloReply:
    """Return the agent's Hello."""
    return HelloReply(
        daemon="agent",
        version=VERSION,
        protocol=protocol,
        instance=layout.instance,
        boot_id=boot_id(),
        pid=os.getpid(),
        state=state,
    )


def add_hello(server: Server, layout: Layout) -> None:
    """Serve Hello from the first moment on."""

    async def answer(request: HelloRequest) -> HelloReply:
        state = "recovering" if server.recovering else "ready"
        return hello(layout, state, common_version(request))

    server.add(HELLO, answer, during_recovery=True)
