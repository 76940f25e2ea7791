"""Who is at the other end of a Unix socket: its path lies where a storage daemon can change it."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from chv.common.errors import Internal

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


def check_peer(peer: socket.socket, path: Path, uid: int) -> None:
    """Raise Internal unless a process of `uid` listens where `peer` is connected to."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, found, _gid = _CREDENTIALS.unpack(raw)
    if found != uid:
        raise Internal(f"the socket {path} belongs to uid {found}, not to {uid}")
