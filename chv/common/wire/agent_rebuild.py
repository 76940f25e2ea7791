"""The agent's API for rebuilding VMs."""

from __future__ import annotations

from chv.common.rpc import Method
from chv.common.wire.agent import Operation
from chv.common.wire.types import Message, Name, NameOrEmpty, Reply, ShortText


class RebuildVm(Message, frozen=True, kw_only=True):
    """Give VM `name` a new root disk; it stays itself, and its other disks stay as they are.

    `image`: what the disk is made from; empty: what the present one was made from. `keep_old`:
    the present root disk stays as a volume of another name. `force`: do not ask the guest to end.
    """

    name: Name
    namespace: Name = "default"
    requester: ShortText
    reason: ShortText = ""
    image: NameOrEmpty = ""
    keep_old: bool = False
    force: bool = False
    idempotency_key: ShortText = ""


class RebuildVmReply(Reply, frozen=True, kw_only=True):
    """`operation` is of the VM. `volume`: the root disk; `former`: what the present one becomes."""

    operation: Operation
    volume: str
    former: str
    joined: bool = False


REBUILD_VM = Method("RebuildVm", RebuildVm, RebuildVmReply)
REBUILD_METHODS = (REBUILD_VM,)
