"""The files that a VMM is given open at its start: listening sockets and files to append to.

Root makes them, 0600, so that the VMM's uid can neither name nor replace them. What an earlier
incarnation left under these names is removed first: the caller has proven that it is gone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from chv.common.layout import check_socket_path
from chv.vmm.driver import Launch

LISTEN_BACKLOG = 16
_APPEND_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


@contextmanager
def handed_over(launch: Launch) -> Iterator[dict[int, int]]:
    """Make and open the files of a launch: number in the child -> descriptor of ours.

    Our copies are closed at the end, so that a VMM that dies early shows as a hang-up. Raises
    OSError, and InvalidArgument for a socket path that is too long.
    """
    with ExitStack() as stack:
        opened = {}
        for number, path in launch.listeners.items():
            opened[number] = _listen(stack, check_socket_path(Path(path)))
        for number, path in launch.appended.items():
            Path(path).unlink(missing_ok=True)
            opened[number] = os.open(path, _APPEND_FLAGS, 0o600)
            stack.callback(os.close, opened[number])
        yield opened


def _listen(stack: ExitStack, path: Path) -> int:
    path.unlink(missing_ok=True)
    listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    os.fchmod(listener.fileno(), 0o600)  # the mode that bind gives to the path
    listener.bind(str(path))
    listener.listen(LISTEN_BACKLOG)
    return listener.fileno()
