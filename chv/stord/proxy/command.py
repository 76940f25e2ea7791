"""How stord starts a proxy: its command line, and the listener that it is given. No effects
but the socket.

The only module of the package that the rest of stord imports, and that the proxy does not.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

WORKER_KIND = "proxy"
LISTENER_FD = 3
BACKLOG = 16
_PROGRAM = Path(__file__).with_name("__main__.py")


def argv(worker_id: str, live: Path) -> tuple[str, ...]:
    """Return the command line of the proxy for the export at `live`."""
    isolated = (sys.executable, "-I", "-S", "-E")
    return (*isolated, str(_PROGRAM), worker_id, str(LISTENER_FD), str(live))


def is_ours(executable: str) -> bool:
    """Tell whether a found process runs what `argv` starts."""
    return Path(executable) == Path(sys.executable).resolve()


def listen(path: Path) -> socket.socket:
    """Return a socket that listens at `path`, which must be free; the caller closes it."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
