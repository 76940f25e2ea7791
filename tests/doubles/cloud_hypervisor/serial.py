"""The serial port: a socket with one viewer and a memory of 1 MiB, a file, or nothing.

The socket is bound when the VM is created and not before its path is free; it is unlinked when
the VM object goes. A new viewer takes the place of the old one and is told what nobody has had
(v53). Each character is a write of its own, and what a viewer has no room for waits for the next:
a viewer that does not read is stuck after a few hundred characters until the guest says more.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.doubles.cloud_hypervisor.loop import Loop
from tests.doubles.cloud_hypervisor.refusal import Refusal, os_error

RING_BYTES_MAX = 1 << 20


class Serial:
    """`typed` is called with what a viewer sends."""

    def __init__(self, loop: Loop, config: dict[str, Any], *, replays: bool) -> None:
        self._loop, self._replays = loop, replays
        self._kept = b""
        self._listener: socket.socket | None = None
        self._viewer: socket.socket | None = None
        self._file: int | None = None
        self._path = ""
        self.typed: Callable[[bytes], None] = lambda data: None
        try:
            self._open(config)
        except OSError as error:
            raise Refusal(
                "Error creating console devices", "Error creating console device", os_error(error)
            ) from error

    def _open(self, config: dict[str, Any]) -> None:
        if config["mode"] == "Socket":
            self._path = config["socket"]
            listener = socket.socket(socket.AF_UNIX)
            try:
                listener.bind(self._path)
            except OSError:
                listener.close()
                raise
            listener.listen(1)
            self._listener = listener
        elif config["mode"] == "File":
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            self._file = os.open(config["file"], flags, 0o600)

    def start(self) -> None:
        """Take viewers: the VM object is there."""
        if self._listener is not None:
            self._loop.watch(self._listener.fileno(), self._accept)

    def say(self, data: bytes) -> None:
        """Put out what the guest wrote."""
        if self._file is not None:
            os.write(self._file, data)
        self._kept = (self._kept + data)[-RING_BYTES_MAX:]
        self._flush()

    def _flush(self) -> None:
        sent = 0
        with contextlib.suppress(OSError):  # no room, or nobody there any more
            while self._viewer is not None and sent < len(self._kept):
                self._viewer.send(self._kept[sent : sent + 1])
                sent += 1
        self._kept = self._kept[sent:] if self._replays else b""

    def _accept(self) -> None:
        assert self._listener is not None
        self._drop_viewer()
        self._viewer, _ = self._listener.accept()
        self._viewer.setblocking(False)
        self._loop.watch(self._viewer.fileno(), self._readable)
        self._flush()

    def _readable(self) -> None:
        assert self._viewer is not None
        try:
            data = self._viewer.recv(4096)
        except ConnectionResetError:  # left without having read all: the thread is no more
            self._loop.forget(self._viewer.fileno())
            if self._listener is not None:
                self._loop.forget(self._listener.fileno())
            return
        if data:
            self.typed(data)
        else:
            self._drop_viewer()
            self.typed(b"\0")  # what the guest reads where nothing came but the end

    def _drop_viewer(self) -> None:
        if self._viewer is not None:
            self._loop.forget(self._viewer.fileno())
            self._viewer.close()
            self._viewer = None

    def abandon(self) -> None:
        """Let go of the socket and leave its path: nobody ran on it."""
        self._drop_viewer()
        if self._listener is not None:
            self._loop.forget(self._listener.fileno())
            self._listener.close()
        if self._file is not None:
            os.close(self._file)
        self._listener = self._file = None

    def close(self) -> None:
        """Go with the VM object, and take the path along, whoever has bound it since."""
        self.abandon()
        if self._path:
            Path(self._path).unlink(missing_ok=True)
