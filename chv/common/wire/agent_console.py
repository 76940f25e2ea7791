"""`OpenConsole`, and the frames on the socket that it hands out.

The socket is SOCK_SEQPACKET and comes from the console holder, so no daemon relays a byte and a
viewer outlives the agent. Every packet is one frame: a kind of one byte, then its payload.
"""

from __future__ import annotations

from chv.common.rpc.method import Method
from chv.common.wire.types import Message, Name, Reply, Uid

OUTPUT, INPUT = b"o", b"i"  # bytes of the line, unchanged
WRITER, READER = b"w", b"r"  # who this viewer is from now on, with words for its user
ENDED, DROPPED = b"e", b"d"  # the last frame: the line ended | this viewer was too slow

INPUT_BYTES_MAX = 4096
FRAME_BYTES_MAX = 16384 + 1


class OpenConsole(Message, frozen=True, kw_only=True):
    """View a VM's serial line; one viewer writes. `take`: be it, though another is."""

    name: Name
    namespace: Name = "default"
    read_only: bool = False
    take: bool = False


class OpenLine(Message, frozen=True, kw_only=True):
    """The same between the agent and the holder."""

    vm_id: Uid
    read_only: bool = False
    take: bool = False


class ConsoleReply(Reply, frozen=True, kw_only=True):
    """Whether this viewer writes as it begins, and how many view."""

    writer: bool
    viewers: int


OPEN_CONSOLE = Method("OpenConsole", OpenConsole, ConsoleReply, mutating=False, fds=1)
OPEN_LINE = Method("OpenLine", OpenLine, ConsoleReply, mutating=False, fds=1)
CONSOLE_METHODS = (OPEN_CONSOLE,)
