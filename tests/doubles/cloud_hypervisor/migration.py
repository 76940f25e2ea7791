"""A VM on its way from one double to another: a line of JSON on a socket, and a word back."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.doubles.cloud_hypervisor.refusal import Refusal, os_error
from tests.doubles.cloud_hypervisor.snapshots import RECEIVED, SENT

Parcel = dict[str, Any]


def path_of(url: str, direction: str) -> str:
    """Return the socket that a URL names."""
    if url.startswith("unix:"):
        return url.removeprefix("unix:")
    key = "destination_url" if direction == "send" else "receiver_url"
    raise Refusal(
        SENT if direction == "send" else RECEIVED,
        f"Invalid {direction} migration configuration",
        f"Error validating {direction} migration parameters: {key} must use tcp:<host>:<port> or"
        " unix:<path>.",
    )


class Sending:
    """Sends in a thread, and rings at `bell` (a descriptor) when it knows how it went."""

    def __init__(self, path: str, parcel: Parcel, *, takes_s: float) -> None:
        self.bell, self._ring = os.pipe()
        self.accepted = False
        self._thread = threading.Thread(target=self._run, args=(path, parcel, takes_s), daemon=True)
        self._thread.start()

    def _run(self, path: str, parcel: Parcel, takes_s: float) -> None:
        try:
            with socket.socket(socket.AF_UNIX) as channel:
                channel.connect(path)
                channel.sendall(json.dumps(parcel).encode() + b"\n")
                time.sleep(takes_s)
                channel.sendall(b"go\n")
                self.accepted = channel.recv(3) == b"ok\n"
        except OSError:
            self.accepted = False
        os.write(self._ring, b"!")

    def close(self) -> None:
        self._thread.join()
        os.close(self.bell)
        os.close(self._ring)


def receive(
    path: str,
    ready: Callable[[], None],
    take: Callable[[Parcel], None],
    go: Callable[[Parcel], None],
) -> None:
    """Wait for ever for a VM, `take` it, and let it `go` when all of it is here.

    What taking it raises goes to the sender as a no.
    """
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        try:
            listener.bind(path)
        except OSError as error:
            raise Refusal(RECEIVED, "Error binding to UNIX socket", os_error(error)) from error
        listener.listen(1)
        ready()
        channel, _ = listener.accept()
        with channel, channel.makefile("rb") as lines:
            line = lines.readline()
            try:
                if not line:
                    raise Refusal("nothing came")
                parcel = json.loads(line)
                take(parcel)
                if not lines.readline():
                    raise Refusal("the sender has gone")
                go(parcel)
            except Refusal as error:
                channel.sendall(b"no\n")
                raise Refusal(
                    "Failed to complete migration for migratable component",
                    "Migration was aborted",
                ) from error
            channel.sendall(b"ok\n")
