"""Which agent a command speaks to, and who is asking.

The order is `--socket`, CHV_SOCKET, the path written in `./.chv/socket`, then the only instance
under /run/chv. Several instances are an error that lists them: guessing would act on the wrong
node.
"""

from __future__ import annotations

import getpass
import os
from pathlib import Path

from chv.common.errors import InvalidArgument, Unavailable
from chv.common.rpc.blocking import BlockingClient

RUN_ROOT = Path("/run/chv")
POINTER = Path(".chv/socket")


def find_socket(explicit: str | None) -> Path:
    """Return the agent's socket path; raises Unavailable or InvalidArgument, saying what to do."""
    if explicit:
        return Path(explicit)
    if from_environment := os.environ.get("CHV_SOCKET"):
        return Path(from_environment)
    if POINTER.is_file():
        return Path(POINTER.read_text().strip())
    found = sorted(RUN_ROOT.glob("*/api/agent.sock"))
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(str(path) for path in found)
        raise InvalidArgument(
            f"several nodes run here: {listed}", hint="choose one with --socket or CHV_SOCKET"
        )
    raise Unavailable(
        f"no node is running: nothing at {RUN_ROOT}/*/api/agent.sock",
        hint="start one with `chv up`",
    )


def client(explicit: str | None) -> BlockingClient:
    """Return a client of the agent that `find_socket` finds."""
    return BlockingClient(find_socket(explicit))


def requester() -> str:
    """Return who is recorded as the requester of an operation: user and real uid."""
    sudo_user = os.environ.get("SUDO_USER", "")
    try:
        user = sudo_user or getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"cli:{user}(uid={os.getuid()})"
