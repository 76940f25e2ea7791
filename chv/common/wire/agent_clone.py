"""The agent's API for cloning VMs."""

from __future__ import annotations

from chv.common.rpc import Method
from chv.common.wire.agent import Operation
from chv.common.wire.resources import CloneModeName
from chv.common.wire.types import Message, Name, Reply, ShortText
from chv.common.wire.volume_resources import Freeze


class CloneVm(Message, frozen=True, kw_only=True):
    """Make VM `new_name` like `name`, with its disks as they are in one instant.

    `start`: whether it runs; null: as the source is wanted to. `freeze`: the source's guest is
    frozen for at most that long (`5s`), so that its file systems are whole.
    """

    name: Name
    new_name: Name
    namespace: Name = "default"
    requester: ShortText
    reason: ShortText = ""
    mode: CloneModeName = CloneModeName.LINKED
    start: bool | None = None
    freeze: Freeze = ""
    idempotency_key: ShortText = ""


class CloneVmReply(Reply, frozen=True, kw_only=True):
    """`operation` is of the new VM; `left_out`: what was not copied, in words.

    `joined`: the very same clone was asked for before, and this is it.
    """

    operation: Operation
    left_out: list[str] = []
    joined: bool = False


CLONE_VM = Method("CloneVm", CloneVm, CloneVmReply)
CLONE_METHODS = (CLONE_VM,)
