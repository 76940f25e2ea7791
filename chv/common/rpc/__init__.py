"""Typed JSON-RPC 2.0 over Unix sockets: one JSON object a line, descriptors by SCM_RIGHTS.

`framing`, `envelope` and `method` are without I/O; `channel` and `listener` own the sockets;
`dispatch`, `session` and `server` answer, `client` asks. Nothing here knows a method by name
but Hello, which answers also during recovery. Every failure is a `ChvError`.

What needs an event loop is imported at first use: method tables and short-lived commands that
only want `Method` must not pay for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from chv.common.rpc.framing import FRAME_BYTES_MAX, FrameTooLong, LineFramer
from chv.common.rpc.method import Method

if TYPE_CHECKING:
    from chv.common.rpc.channel import Peer
    from chv.common.rpc.client import Client, connect
    from chv.common.rpc.dispatch import CallContext, WithFds
    from chv.common.rpc.server import Server

_LAZY = {
    "CallContext": "dispatch",
    "Client": "client",
    "Peer": "channel",
    "Server": "server",
    "WithFds": "dispatch",
    "connect": "client",
}

__all__ = [
    "FRAME_BYTES_MAX",
    "CallContext",
    "Client",
    "FrameTooLong",
    "LineFramer",
    "Method",
    "Peer",
    "Server",
    "WithFds",
    "connect",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
