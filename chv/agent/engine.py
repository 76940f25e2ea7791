"""The engine: the one door to desired state, operations and reconcilers.

The service (RPC handlers) and the agent's main module talk to this class and to nothing below
it. Reads answer from memory and never wait for a VMM. Mutations return once they are durable;
`wait_operation` and `wait_condition` wait for the world to follow. No task of the engine lives
outside of `run`; when it ends nothing in the world is touched.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from chv.agent.ports import OnProgress, World
from chv.common.wire import agent as api
from chv.common.wire.stord import StorageEvent


@dataclass(kw_only=True)
class RecoveryReport:
    """What the census before the first action found. Names are `namespace/name`."""

    adopted: list[str] = field(default_factory=list)  # a VMM that lives, intent or record
    gone: list[str] = field(default_factory=list)  # recorded, proven dead
    unknown: list[str] = field(default_factory=list)  # in doubt: phase Unknown, never spawned
    orphans: list[str] = field(default_factory=list)  # worker ids that no record explains


class VmAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach into a VM."""

    vm_uid: str
    nic_id: str
    address: str
    host_key: str
    guest_ports: tuple[int, ...]


class Engine:
    """See the module. Made with a store and a world; works inside `run`."""

    def __init__(self, store: object, world: World) -> None: ...

    async def load(self) -> None:
        """Read the store into memory: from here on reads answer. No effect on the world."""
        raise NotImplementedError

    async def recover(self) -> RecoveryReport:
        """Judge every worker record and open spawn intent before any action; adopt what lives."""
        raise NotImplementedError

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Reconcile until cancelled. Call `load`, then `recover`, then start this in a group."""
        raise NotImplementedError

    # --- mutations: durable when they return
    async def apply(self, request: api.Apply) -> api.ApplyReply:
        """Check all objects, then store all in one transaction, an operation per change."""
        raise NotImplementedError

    async def delete(self, request: api.DeleteObject) -> api.OperationReply:
        """Mark for deletion; IN_USE names who still needs it."""
        raise NotImplementedError

    async def act(self, request: api.ActOnVm) -> api.OperationReply:
        """Start, stop, restart or reset."""
        raise NotImplementedError

    async def import_image(
        self, request: api.ImportImage, on_progress: OnProgress | None = None
    ) -> api.ImportImageReply:
        """Store an artifact and (re)define the Image that has it."""
        raise NotImplementedError

    # --- reads: from memory
    def get(self, request: api.ObjectRef) -> api.ObjectReply:
        """One object."""
        raise NotImplementedError

    def list(self, request: api.ListObjects) -> api.ListReply:
        """All objects of a kind, by namespace and name."""
        raise NotImplementedError

    async def get_operation(self, request: api.OperationRef) -> api.OperationReply:
        """One operation with its steps."""
        raise NotImplementedError

    async def list_operations(self, request: api.ListOperations) -> api.ListOperationsReply:
        """Newest first, without steps."""
        raise NotImplementedError

    async def wait_operation(self, request: api.WaitOperation) -> api.OperationReply:
        """The operation once it is final; DeadlineExceeded before."""
        raise NotImplementedError

    async def wait_condition(self, request: api.WaitCondition) -> api.ObjectReply:
        """The object once the condition holds; FailedPrecondition when it no longer can."""
        raise NotImplementedError

    def vm_access(self, name: str, namespace: str, interface: str = "") -> VmAccess:
        """NIC, address and pinned host key of a VM; NotFound, FailedPrecondition."""
        raise NotImplementedError

    def vm_uid(self, name: str, namespace: str) -> str:
        """The uid of a VM by name; NotFound."""
        raise NotImplementedError

    def counts(self) -> dict[str, int]:
        """Objects by kind, and VMs by phase (`vm.Running`), for the node's status."""
        raise NotImplementedError

    # --- hints from outside; safe at any time, in any order, any number of times
    def notify_vmm_exit(self, vm_uid: str) -> None:
        """A VMM seems to have ended or changed: look at that VM now."""
        raise NotImplementedError

    def notify_storage_event(self, event: StorageEvent) -> None:
        """A storage daemon was lost or is back: look at that VM now."""
        raise NotImplementedError

    def notify_daemon_ready(self, name: str) -> None:
        """stord or nwd (or the node's readiness) came back: look at everything now."""
        raise NotImplementedError
