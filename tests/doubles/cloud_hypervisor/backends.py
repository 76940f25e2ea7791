"""What a disk stands on: a locked file, or a vhost-user socket that is connected again when lost.

The handshake goes as far as asking for the features, which is where a dying back end shows: the
real program connects again for a minute, but gives a disk up for good whose handshake fails.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from typing import Any

from tests.doubles.cloud_hypervisor.loop import Loop
from tests.doubles.cloud_hypervisor.refusal import Refusal, device_error, os_error

F_OFD_SETLK = 37
GET_FEATURES = struct.pack("<III", 1, 1, 0)
RETRY_S = 0.1
HANDSHAKE_S = 2.0


class FileDisk:
    """An image that is open, and locked as two VMs must not have it."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.path = path = config.get("path") or ""
        write = not config["readonly"]
        try:
            self.fd = os.open(path, os.O_RDWR if write else os.O_RDONLY)
        except OSError as error:
            raise device_error(
                "Cannot open disk path", f"I/O error (path={path} op=open)", os_error(error)
            ) from error
        self._write = write

    def lock(self, outermost: str) -> None:
        """Take the lock, or raise with `outermost` as the first message."""
        kind = fcntl.F_WRLCK if self._write else fcntl.F_RDLCK
        wanted = struct.pack("hhxxxxqqixxxx", kind, os.SEEK_SET, 0, 0, 0)
        try:
            fcntl.fcntl(self.fd, F_OFD_SETLK, wanted)
        except OSError:
            raise Refusal(
                outermost,
                "Cannot lock images of all block devices",
                f"Failed to get {'Write' if self._write else 'Read'} lock for disk image:"
                f" {self.path}",
                "The file is already locked",
            ) from None

    def resize(self, size_bytes: int) -> None:
        if size_bytes % 512:
            raise device_error("Disk resize error", "Disk image size is not a multiple of 512")
        os.ftruncate(self.fd, size_bytes)

    def close(self) -> None:
        os.close(self.fd)


class VhostDisk:
    """A connection to a storage daemon."""

    def __init__(self, loop: Loop, path: str, connect_s: float) -> None:
        self._loop, self._path, self._connect_s = loop, path, connect_s
        self._channel: socket.socket | None = None
        self.dead = False
        self._lost_s = 0.0
        self._first()

    def _first(self) -> None:
        deadline_s = time.monotonic() + self._connect_s
        while True:
            try:
                channel = self._connect()
                break
            except OSError as error:
                if time.monotonic() >= deadline_s:
                    raise _unreachable(f"can't connect to peer: {os_error(error)}") from error
                time.sleep(min(RETRY_S, self._connect_s / 10))
        if not _greets(channel):
            channel.close()
            raise _unreachable("peer disconnected")
        self._take(channel)

    def _connect(self) -> socket.socket:
        channel = socket.socket(socket.AF_UNIX)
        try:
            channel.connect(self._path)
        except OSError:
            channel.close()
            raise
        return channel

    def _take(self, channel: socket.socket) -> None:
        self._channel = channel
        self._loop.watch(channel.fileno(), self._readable)

    def _readable(self) -> None:
        assert self._channel is not None
        try:
            if self._channel.recv(4096):
                return
        except OSError:
            pass
        self._lost_s = time.monotonic()
        self._drop()
        self._again()

    def _again(self) -> None:
        if self.dead or self._channel is not None:
            return
        try:
            channel = self._connect()
        except OSError:
            self.dead = time.monotonic() - self._lost_s > self._connect_s
            self._loop.later(RETRY_S, self._again)
            return
        if _greets(channel):
            self._take(channel)
        else:
            channel.close()
            self.dead = True

    def _drop(self) -> None:
        if self._channel is not None:
            self._loop.forget(self._channel.fileno())
            self._channel.close()
            self._channel = None

    def resize(self, size_bytes: int) -> None:
        raise AssertionError("a vhost-user disk is not found by resize-disk")

    def close(self) -> None:
        self.dead = True
        self._drop()


def _greets(channel: socket.socket) -> bool:
    """Tell whether the back end answers the first question of the handshake."""
    channel.settimeout(HANDSHAKE_S)
    try:
        channel.sendall(GET_FEATURES)
        return len(channel.recv(20)) > 0
    except OSError:
        return False


def _unreachable(what: str) -> Refusal:
    return device_error(
        "Cannot create vhost-user-blk device",
        "Connection to socket failed",
        f"vhost-user: {what}",
    )
