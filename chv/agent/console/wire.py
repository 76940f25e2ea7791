"""The holder's API: attach and detach serial lines. Local to the agent."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from chv.common.rpc.method import Method
from chv.common.wire.agent_console import OPEN_LINE
from chv.common.wire.types import HELLO, Done, Empty, Message, PathText, Reply, Uid


class AttachConsole(Message, frozen=True, kw_only=True):
    """Connect to a VMM's serial socket and record it. Connected already: no effect.

    The VMM's end closes the connection, so an incarnation never inherits the line of the last.
    """

    vm_id: Uid
    socket: PathText
    directory: PathText


class DetachConsole(Message, frozen=True, kw_only=True):
    """Let go; unknown VMs are fine."""

    vm_id: Uid


class BoundRecordings(Message, frozen=True, kw_only=True):
    """Keep all recordings of the node within so many bytes from now on."""

    bytes_max: Annotated[int, Meta(ge=0, le=2**50)]


class AttachedConsoles(Reply, frozen=True, kw_only=True):
    """VM ids whose serial line is connected right now."""

    vm_ids: list[str] = []


ATTACH_CONSOLE = Method("AttachConsole", AttachConsole, Done)
DETACH_CONSOLE = Method("DetachConsole", DetachConsole, Done)
BOUND_RECORDINGS = Method("BoundRecordings", BoundRecordings, Done)
LIST_CONSOLES = Method("ListConsoles", Empty, AttachedConsoles, mutating=False)
SHUT_DOWN = Method("ShutDown", Empty, Done)

METHODS = (
    HELLO, ATTACH_CONSOLE, BOUND_RECORDINGS, DETACH_CONSOLE, LIST_CONSOLES, OPEN_LINE, SHUT_DOWN,
)  # fmt: skip
