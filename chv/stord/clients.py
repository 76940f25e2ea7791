"""Who is connected to the exports of a storage daemon, and whether all of them can be told news.

A client that is to hear of a new size hands the storage daemon a channel, one end of a socket
pair, for requests the other way. Nothing reports that, but the kernel does: the channel is a
connected socket without a name among the storage daemon's descriptors, beside one connection per
client, which has the name of its export. Where the two do not come to the same number, somebody
cannot be told. A storage daemon without a network of its own makes no such sockets where we look.

Reads only. What cannot be seen counts as not there, so whoever asks for proof gets none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

# Num RefCount Protocol Flags Type St Inode Path
STATE_FIELD, INODE_FIELD, PATH_FIELD, CONNECTED = 5, 6, 7, b"03"
STANDARD_FDS = frozenset("012")
SOCKET = "socket:["
PROC = Path("/proc")


class Connected(msgspec.Struct, frozen=True, kw_only=True):
    """The clients of one storage daemon. `exports`: those that have one, once for each."""

    exports: tuple[Path, ...] = ()
    channels: int = 0

    @property
    def can_all_be_told(self) -> bool:
        """Tell whether every client has handed over its channel."""
        return 0 < len(self.exports) == self.channels


def look(pid: int, exports: Iterable[Path], proxies: Iterable[int] = ()) -> Connected:
    """Return who is connected to process `pid` at `exports`, the names that it bound.

    The kernel lists a socket in the network namespace of the process that connected or made it,
    under the name that the listener was bound to, also when the file was renamed since: a VMM's
    in ours, a proxy's in that of the proxy.
    """
    own = _sockets(pid)
    tables = (PROC / "net" / "unix", *(PROC / str(proxy) / "net" / "unix" for proxy in proxies))
    names = dict(row for table in tables for row in _connected(table) if row[0] in own)
    bound = {os.fsencode(path): path for path in exports}
    return Connected(
        exports=tuple(sorted(bound[name] for name in names.values() if name in bound)),
        channels=sum(not name for name in names.values()),
    )


def _sockets(pid: int) -> frozenset[bytes]:
    """Return the inodes of the sockets of a process; its standard streams may be some: not ours."""
    found = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for name in os.listdir(PROC / str(pid) / "fd"):  # noqa: PTH208
            with contextlib.suppress(FileNotFoundError):
                target = os.readlink(PROC / str(pid) / "fd" / name)  # noqa: PTH115
                if target.startswith(SOCKET) and name not in STANDARD_FDS:
                    found.add(os.fsencode(target[len(SOCKET) : -1]))
    return frozenset(found)


def _connected(table: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield inode and name, empty where it has none, of every connected socket."""
    try:
        lines = table.read_bytes().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return
    for line in lines:
        fields = line.split(None, PATH_FIELD)
        if len(fields) > INODE_FIELD and fields[STATE_FIELD] == CONNECTED:
            yield fields[INODE_FIELD], b"".join(fields[PATH_FIELD:])
