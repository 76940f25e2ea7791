"""What an operator wants of the node, kept over every end of the agent. Pure types.

The one row of its kind in the store. A node whose record says anything but SERVE starts no VM,
whatever state it is in: the intent of a spawn and this record are under the same lock.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from chv.common.wire.types import FrozenMeta

NODE_UID = "node"  # stands for the node where operations name an object


class NodeIntent(StrEnum):
    """What the node is to do with its VMs."""

    SERVE = "serve"
    DRAIN = "drain"  # each is stopped, none is started; once none is left: MAINTAIN
    MAINTAIN = "maintain"  # none is started


class Hold(msgspec.Struct, metaclass=FrozenMeta):
    """Who asked for it, why, and since when (RFC 3339). `operation_id`: what it is recorded as."""

    requester: str
    reason: str = ""
    since: str = ""
    operation_id: str = ""

    @property
    def words(self) -> str:
        """Return who and why in one line."""
        return f"by {self.requester}" + (f": {self.reason}" if self.reason else "")


class NodeRecord(msgspec.Struct, metaclass=FrozenMeta):
    """The record. `hold` belongs to the intent, `paused` to scheduling that is paused.

    `stopped`: how many VMs had a VMM when the drain was asked for. `until_boot`: the id of the boot
    after which it serves again by itself; empty: when somebody says so.
    """

    intent: NodeIntent = NodeIntent.SERVE
    hold: Hold | None = None
    paused: Hold | None = None
    stopped: int = 0
    until_boot: str = ""

    @property
    def holds_vms(self) -> bool:
        """Tell whether no VM may run."""
        return self.intent is not NodeIntent.SERVE

    @property
    def words(self) -> str:
        """Return in one line why VMs are held; empty where they are not."""
        if not self.holds_vms:
            return ""
        state = "Draining" if self.intent is NodeIntent.DRAIN else "in Maintenance"
        if self.until_boot:
            state += " until the host boots"
        return f"the node is {state}" + (f" ({self.who})" if self.who else "")

    @property
    def who(self) -> str:
        """Return who wants it so and why."""
        return self.hold.words if self.hold is not None else ""


class PutNode(msgspec.Struct, metaclass=FrozenMeta):
    """Store the record of the node."""

    record: NodeRecord
