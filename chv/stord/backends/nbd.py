"""Volumes that are an export of an NBD server, by TCP or by a Unix socket of this node.

The export is somebody else's: it is never made, enlarged or wiped, and deletion forgets it. Who
else writes to it is the server's affair; one export is one volume on this node. A server that
goes away stalls the guest for `RECONNECT_S`, then its requests fail.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

from chv.common.config import StorageConfig
from chv.common.errors import InvalidArgument, NotFound
from chv.common.layout import Layout
from chv.common.wire.stord import NbdPlace, VolumeBackend, VolumeClass
from chv.stord import allow
from chv.stord.backends import disk_files
from chv.stord.backends.base import Inspection
from chv.stord.backends.remote import OnServer
from chv.stord.qsd.graph import Protocol as ProtocolNode

# A server that is started again in this time is not noticed by the guest.
RECONNECT_S = 15
# A server that is there is heard much sooner; one that is busy with its only client never is.
CONNECT_TIMEOUT_S = 0.5
HEARD_FOR_S = 5.0


class NbdBackend(OnServer):
    """Class `nbd`."""

    class_name = VolumeClass.NBD
    driver = "nbd"
    package = "qemu-utils"

    def __init__(self, layout: Layout, storage: StorageConfig) -> None:
        super().__init__(layout, storage)
        self._answers: dict[str, tuple[float, str]] = {}  # by volume: when asked, what was wrong

    def place(self, spec: VolumeBackend) -> NbdPlace:
        """Return the server's part of the spec."""
        assert spec.nbd is not None, "`check` refuses a spec without its place"
        return spec.nbd

    def permit(self, spec: VolumeBackend) -> None:
        """Refuse a server that is not allowed, or is described twice or not at all."""
        place = self.place(spec)
        if bool(place.host) == bool(place.socket):
            raise InvalidArgument("give either `host` or `socket`", field="backend.nbd")
        allow.check_remote(place, self._storage.remotes)
        if place.socket:
            _check_socket(Path(place.socket))

    def protocol(self, _volume_id: str, spec: VolumeBackend) -> ProtocolNode:
        """Describe how the storage daemon reaches the export."""
        place = self.place(spec)
        server: dict[str, object] = {"type": "inet", "host": place.host, "port": str(place.port)}
        if place.socket:
            server = {"type": "unix", "path": place.socket}
        options: dict[str, object] = {"server": server, "reconnect-delay": RECONNECT_S}
        if place.export:
            options["export"] = place.export
        # A Unix socket is reached without a network; who may connect is up to its mode.
        return ProtocolNode(
            driver=self.driver, options=options, direct=None, local=bool(place.socket)
        )

    def same_bytes(self, spec: VolumeBackend, other: VolumeBackend) -> bool:
        """Tell whether two volumes are the same export."""
        one, two = self.place(spec), self.place(other)
        return (allow.remote_of(one), one.export) == (allow.remote_of(two), two.export)

    async def served(self, volume_id: str, spec: VolumeBackend) -> Inspection:
        """Look at a served volume by a mere connection: a server may have one client at a time.

        Such a server would answer nobody but the storage daemon, so only a refusal tells anything.
        """
        location = self.location(spec)
        problem = await self._heard(volume_id, spec)
        if problem:
            problem = f"nbd server {location}: {problem}"
            return Inspection(location=location, state="broken", problem=problem)
        described = disk_files.described_bytes(self._layout.volume(volume_id))
        size_bytes = max(self.said_bytes.get(volume_id, 0), described)
        return Inspection(
            location=location, state="open", size_bytes=size_bytes, device_bytes=size_bytes
        )

    async def _heard(self, volume_id: str, spec: VolumeBackend) -> str:
        """Return what a connection told; not each time, for the server writes of each one."""
        await anyio.lowlevel.checkpoint()
        now = anyio.current_time()
        asked_at, problem = self._answers.get(volume_id, (-HEARD_FOR_S, ""))
        if now - asked_at >= HEARD_FOR_S:
            problem = await _refusal(self.place(spec))
            self._answers[volume_id] = now, problem
        return problem

    async def discard(self, volume_id: str, spec: VolumeBackend) -> None:
        """Forget the export and what its server said."""
        self._answers.pop(volume_id, None)
        await super().discard(volume_id, spec)

    def sockets(self, spec: VolumeBackend) -> list[Path]:
        """Return the Unix socket of the server."""
        place = self.place(spec)
        return [Path(place.socket)] if place.socket else []


async def _refusal(place: NbdPlace) -> str:
    """Return why nobody can connect; empty where somebody can, or where nothing is heard."""
    await anyio.lowlevel.checkpoint()
    try:
        with anyio.move_on_after(CONNECT_TIMEOUT_S):
            if place.socket:
                stream: ByteStream = await anyio.connect_unix(place.socket)
            else:
                stream = await anyio.connect_tcp(place.host, place.port)
            await stream.aclose()
    except BlockingIOError:
        return ""  # its queue is full, so it is there
    except OSError as error:
        return str(error.__cause__ or error)
    return ""


def _check_socket(path: Path) -> None:
    """The name must lead to a socket without a link, so that the list means what it says."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise NotFound(f"there is no socket {str(path)!r}", field="backend.nbd.socket") from error
    if real != path or not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise InvalidArgument(
            f"{str(path)!r} is not a socket but a link or another file", field="backend.nbd.socket"
        )


def make(layout: Layout, storage: StorageConfig) -> NbdBackend:
    """Return the backend of this class."""
    return NbdBackend(layout, storage)
