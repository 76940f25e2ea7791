"""Answers guests that ask for their metadata: listening sockets in namespaces, one event loop.

A socket belongs to the namespace that it was opened in, so each network that wants it has its own,
and an address is one guest's within it. An answer lives for one hop. Connections, the time each
takes and what it may send are bounded, by guest and by network; what one guest does is no other's
concern. While nwd is down nobody answers; the sockets stand again before it says it is ready. An
open socket would keep a namespace alive, so `stop` comes before the namespace goes.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio
import anyio.abc
import anyio.to_thread

from chv.common import logs
from chv.nwd import metadata
from chv.nwd.kernel import netns
from chv.nwd.kernel.errors import translated
from chv.nwd.metadata_http import Reader, Refused, Request, respond
from chv.nwd.parts import Parts
from chv.nwd.records import Network

log = logs.get(__name__)
PORT = 80
CONNECTIONS_MAX = 256  # of a network
CONNECTIONS_OF_GUEST_MAX = 8
REQUEST_S_MAX = 5.0
ANSWER_S_MAX = 10.0
LINGER_S_MAX = 1.0
LINGER_BYTES_MAX = 1 << 16
BACKLOG = 64
BUSY_S = 1.0


@dataclass
class _Place:
    """The sockets of one network. `inode` is the namespace that they are in."""

    inode: int
    addresses: frozenset[str]
    sockets: list[socket.socket]
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)
    connections: Counter[str] = field(default_factory=Counter)


class MetadataServer:
    """The metadata service of every network of this node."""

    def __init__(self, parts: Parts, tasks: anyio.abc.TaskGroup) -> None:
        self._parts = parts
        self._tasks = tasks
        self._places: dict[str, _Place] = {}

    async def follow(self, network: Network) -> None:
        """Serve a network that stands as its record says, or do not; the caller holds its lock."""
        network_id = network.network_id
        wanted = metadata.addresses_of(network)
        place = self._places.get(network_id)
        if place is None and not wanted:
            return
        path = self._parts.netns_path(network_id)
        inode = await anyio.to_thread.run_sync(netns.inode, path)
        if place is not None and (place.inode, place.addresses) == (inode, wanted):
            return
        await self.stop(network_id)
        if not wanted:
            return
        with translated("listening for questions about metadata"):
            sockets = await netns.inside(path, lambda: _listen(wanted))
        place = self._places[network_id] = _Place(inode, wanted, sockets)
        self._tasks.start_soon(self._serve, network_id, place)

    async def stop(self, network_id: str) -> None:
        """Serve a network no longer; nothing of it is open afterwards."""
        place = self._places.pop(network_id, None)
        if place is not None:
            place.scope.cancel()
            await place.ended.wait()

    async def _serve(self, network_id: str, place: _Place) -> None:
        try:
            with place.scope:
                async with anyio.create_task_group() as tasks:
                    for listener in place.sockets:
                        tasks.start_soon(self._accept, network_id, place, listener, tasks)
        finally:
            _close(place.sockets)
            place.ended.set()

    async def _accept(
        self,
        network_id: str,
        place: _Place,
        listener: socket.socket,
        tasks: anyio.abc.TaskGroup,
    ) -> None:
        while True:
            await anyio.wait_readable(listener)
            try:
                connection, peer = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue  # the other end has gone
            except OSError as error:  # such as too many open files
                log.warning("metadata_not_accepted", network_id=network_id, error=error)
                await anyio.sleep(BUSY_S)
                continue
            connection.setblocking(False)
            source = str(peer[0])
            full = place.connections.total() >= CONNECTIONS_MAX
            if full or place.connections[source] >= CONNECTIONS_OF_GUEST_MAX:
                connection.close()
                continue
            place.connections[source] += 1
            tasks.start_soon(self._answer, network_id, place, connection, source)

    async def _answer(
        self, network_id: str, place: _Place, connection: socket.socket, source: str
    ) -> None:
        try:
            with connection:
                await self._converse(network_id, connection, source)
        except OSError:
            log.debug("metadata_cut_short", network_id=network_id, source=source)
        except Exception as error:  # noqa: BLE001  the firewall of one guest's question
            log.error("metadata_failed", network_id=network_id, source=source, error=error)
        finally:
            place.connections[source] -= 1
            if not place.connections[source]:
                del place.connections[source]

    async def _converse(self, network_id: str, connection: socket.socket, source: str) -> None:
        try:
            request = await _request(connection)
            if request is None:
                return
            content, kind = metadata.document(self._asked(network_id, source), request.path)
            answer = respond(200, content, kind, has_body=request.method != "HEAD")
        except Refused as refusal:
            log.debug("metadata_refused", network_id=network_id, source=source, why=str(refusal))
            answer = respond(refusal.status, f"{refusal}\n".encode(), metadata.TEXT)
        with anyio.move_on_after(ANSWER_S_MAX):
            await _send(connection, answer)
            await _linger(connection)

    def _asked(self, network_id: str, source: str) -> metadata.Asked:
        """Return who asks; nobody else than a NIC of this very network is told anything."""
        nic = metadata.who(self._parts.nics_due(network_id), source)
        if nic is None:
            raise Refused(403, "not known here")
        records = self._parts.records
        interfaces = [
            metadata.Interface(each, records.networks[each.network_id])
            for each in records.nics.values()
            if each.vm_id == nic.vm_id and self._parts.is_due(each)
        ]
        return metadata.Asked(nic, interfaces)


def _listen(addresses: frozenset[str]) -> list[socket.socket]:
    """In the namespace: listen, whether the addresses are there yet or not."""
    opened: list[socket.socket] = []
    try:
        for cidr in sorted(addresses):
            opened.append(_listener(cidr.partition("/")[0]))
    except BaseException:
        _close(opened)
        raise
    return opened


def _listener(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, 1)
        else:
            listener.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, 1)
        listener.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
        listener.bind((address, PORT))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


_IP_FREEBIND = 15  # of both families


def _close(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()


async def _request(connection: socket.socket) -> Request | None:
    """Return the request, None where the other end has left."""
    reader = Reader(metadata.HOSTS)
    with anyio.move_on_after(REQUEST_S_MAX):
        while True:
            data = await _receive(connection)
            if not data:
                return None
            request = reader.feed(data)
            if request is not None:
                return request
    raise Refused(408, f"no whole request within {REQUEST_S_MAX:g} s")


async def _receive(connection: socket.socket) -> bytes:
    while True:
        try:
            return connection.recv(4096)
        except BlockingIOError:
            await anyio.wait_readable(connection)


async def _send(connection: socket.socket, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[connection.send(left) :]
        except BlockingIOError:
            await anyio.wait_writable(connection)


async def _linger(connection: socket.socket) -> None:
    """Read what else was sent: closing on it would take the answer away again."""
    connection.shutdown(socket.SHUT_WR)
    left = LINGER_BYTES_MAX
    with anyio.move_on_after(LINGER_S_MAX):
        while left > 0:
            data = await _receive(connection)
            if not data:
                return
            left -= len(data)
