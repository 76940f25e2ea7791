"""The listening side's socket file: made under a temporary name, renamed in when it is ready.

So nobody ever meets it with a looser mode than asked for, or before it listens. Taking the place
of a stale socket is safe only under the daemon's lock, which the caller holds; a socket that
still answers is refused all the same. Fails with `ChvError`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

import anyio

from chv.common.errors import (
    AlreadyExists,
    FailedPrecondition,
    OwnershipConflict,
)
from chv.common.layout import check_socket_path

log = logging.getLogger("chv.rpc")
BACKLOG_MAX = 1024
ACCEPT_PAUSE_S = 0.1


@dataclass(frozen=True)
class Listener:
    """A bound, listening socket and the identity of its file."""

    sock: socket.socket
    path: Path
    inode: tuple[int, int]

    async def accept(self) -> socket.socket:
        """Return the next connection. Out of descriptors or memory: wait, never give up."""
        starved = False
        while True:
            await anyio.wait_readable(self.sock)
            try:
                return self.sock.accept()[0]
            except (BlockingIOError, ConnectionAbortedError):
                continue
            except OSError as error:
                if not starved:
                    log.warning("rpc.accept_failed", extra={"error": str(error)})
                starved = True
                await anyio.sleep(ACCEPT_PAUSE_S)

    def close(self) -> None:
        """Stop listening and remove the file, unless another server has taken the name since."""
        self.sock.close()
        with contextlib.suppress(FileNotFoundError):
            if _inode(self.path) == self.inode:
                self.path.unlink()


def listen_unix(path: Path, *, mode: int, gid: int | None) -> Listener:
    """Bind `path` with exactly `mode` and group `gid`, whatever the umask is."""
    check_socket_path(path)
    _refuse_occupied(path)
    temporary = check_socket_path(path.with_name(path.name + "~"))
    temporary.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.bind(str(temporary))
        if gid is not None:
            os.chown(temporary, -1, gid)
        temporary.chmod(mode)
        sock.listen(BACKLOG_MAX)
        inode = _inode(temporary)
        temporary.rename(path)
    except OSError as error:
        sock.close()
        temporary.unlink(missing_ok=True)
        raise FailedPrecondition(
            f"cannot listen on {str(path)!r}: {error.strerror}",
            hint="the directory must exist and be writable for the daemon",
        ) from error
    return Listener(sock, path, inode)


def _inode(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def _refuse_occupied(path: Path) -> None:
    """Raise where `path` is something other than free or a socket that nobody serves."""
    try:
        kind = path.lstat().st_mode
    except OSError:
        return  # free, or the bind will say what is wrong with the directory
    if not stat.S_ISSOCK(kind):
        raise OwnershipConflict(f"{str(path)!r} exists and is not a socket; it was not touched")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except BlockingIOError:
            pass  # its queue is full, so it is served
        except OSError:
            return
    raise AlreadyExists(f"another server answers on {str(path)!r}; it was left alone")
