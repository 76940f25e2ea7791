"""The part of the agent's API about what no record explains, and about the daemons themselves.

Served beside the table in `chv.common.wire.agent`.
"""

from __future__ import annotations

from typing import Literal

from chv.common.rpc import Method
from chv.common.wire.agent import DaemonStatus
from chv.common.wire.types import Empty, Message, Reply, ShortText

LOOK_TIMEOUT_S = 150.0


class ListLeaks(Message, frozen=True, kw_only=True):
    """`look`: look now, twice where something new is seen, instead of telling the last look."""

    look: bool = False


class Leak(Reply, frozen=True, kw_only=True):
    """One thing of this instance that no record explains, seen twice and the same both times.

    `id`: stays the same as long as it is the same thing. `owner`: the uid that its name carries,
    `title`: the object with that uid, where there is one. `daemon`: who saw it. `since`: when this
    agent first did. `data`: it may be a tenant's data. `actions`: `reap`, `adopt`; `note` says why
    one is not offered.
    """

    id: str
    kind: str  # process | socket | link | netns | nft | mount | cgroup | file
    name: str
    owner: str = ""
    title: str = ""
    daemon: str = ""
    since: str = ""
    evidence: dict[str, str] = {}
    data: bool = False
    actions: list[str] = []
    note: str = ""


class LeaksReply(Reply, frozen=True, kw_only=True):
    """`looked_at`: of the last look. `unread`: who did not answer then, and why: what was known of
    theirs is still shown. `watching`: things seen once, or in the middle of an operation.
    `unused`: how much of what is recorded, and so no leak, nothing needs: image artifacts, keys.
    """

    leaks: list[Leak] = []
    looked_at: str = ""
    unread: dict[str, str] = {}
    watching: int = 0
    unused: dict[str, int] = {}


class LeakRef(Message, frozen=True, kw_only=True):
    """One leak, and who acts on it. `data`: remove it though it may be a tenant's data."""

    id: ShortText  # ten characters of 0-9 and a-f
    requester: ShortText
    reason: ShortText = ""
    data: bool = False
    idempotency_key: ShortText = ""


class LeakDone(Reply, frozen=True, kw_only=True):
    """What was removed, or taken up again."""

    leak: Leak
    operation_id: str = ""


class RestartDaemon(Message, frozen=True, kw_only=True):
    """Start one daemon anew, as for an upgrade of it. VMs go on and calls to it wait."""

    name: Literal["stord", "nwd", "console"]
    requester: ShortText
    reason: ShortText = ""
    idempotency_key: ShortText = ""


class RestartDaemonReply(Reply, frozen=True, kw_only=True):
    """The daemon before and after."""

    before: DaemonStatus
    after: DaemonStatus
    operation_id: str = ""


class DaemonsReply(Reply, frozen=True, kw_only=True):
    """stord, nwd and the console holder as the agent supervises them."""

    daemons: list[DaemonStatus] = []


LIST_LEAKS = Method("ListLeaks", ListLeaks, LeaksReply, timeout_s=LOOK_TIMEOUT_S, mutating=False)
# NOT_FOUND: no such leak, or gone. CONFLICT: it is explained by now, or another thing.
REAP_LEAK = Method("ReapLeak", LeakRef, LeakDone, timeout_s=60.0)
# UNSUPPORTED with the reason where there is nothing to take up.
ADOPT_LEAK = Method("AdoptLeak", LeakRef, LeakDone, timeout_s=60.0)
LIST_DAEMONS = Method("ListDaemons", Empty, DaemonsReply, mutating=False)
RESTART_DAEMON = Method("RestartDaemon", RestartDaemon, RestartDaemonReply, timeout_s=60.0)

LEAK_METHODS = (LIST_LEAKS, REAP_LEAK, ADOPT_LEAK, LIST_DAEMONS, RESTART_DAEMON)
