"""Shorthand for security groups and exposures of a node under test, and streams that stand."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio

from chv.common.wire import nwd_policy as wire
from chv.common.wire.types import ListPage
from tests.integration.nwd_helpers import IDS, Node, inside, meta

ANYWHERE = ["0.0.0.0/0"]


def rule(direction: str, protocol: str, ports: list[str] | None = None, **peers: Any) -> Any:
    peers = peers or {"cidrs": ANYWHERE}
    return wire.SecurityRule(
        direction=wire.Direction(direction),
        protocol=wire.IpProtocol(protocol),
        ports=ports or [],
        **peers,
    )


OUT = rule("egress", "any")


async def set_group(
    node: Node,
    group_id: str,
    *rules: Any,
    generation: int = 1,
    existing: str = "drop",
    tenant: str = "default",
) -> wire.SecurityGroupInfo:
    group = wire.SecurityGroup(group_id=group_id, name="group", tenant=tenant, rules=list(rules))
    info: wire.SecurityGroupInfo = await node.call(
        wire.SET_GROUP,
        wire.SetSecurityGroup(meta=meta(generation), group=group, existing=wire.Existing(existing)),
    )
    return info


async def delete_group(node: Node, group_id: str, generation: int = 1) -> None:
    await node.call(wire.DELETE_GROUP, wire.GroupRef(meta=meta(generation), group_id=group_id))


async def groups(node: Node) -> dict[str, wire.SecurityGroupInfo]:
    reply: wire.SecurityGroupsReply = await node.call(wire.LIST_GROUPS, ListPage())
    return {each.group_id: each for each in reply.groups}


async def set_exposure(
    node: Node,
    network_id: str,
    exposure_id: str,
    generation: int = 1,
    existing: str = "drop",
    **changes: Any,
) -> wire.ExposureInfo:
    fields: dict[str, Any] = {
        "exposure_id": exposure_id,
        "name": "web",
        "network_id": network_id,
        "protocol": wire.IpProtocol.TCP,
        "sources": ANYWHERE,
    }
    info: wire.ExposureInfo = await node.call(
        wire.SET_EXPOSURE,
        wire.SetExposure(
            meta=meta(generation),
            exposure=wire.Exposure(**(fields | changes)),
            existing=wire.Existing(existing),
        ),
    )
    return info


async def delete_exposure(
    node: Node, exposure_id: str, generation: int = 1, existing: str = "drop"
) -> None:
    await node.call(
        wire.DELETE_EXPOSURE,
        wire.ExposureRef(
            meta=meta(generation), exposure_id=exposure_id, existing=wire.Existing(existing)
        ),
    )


async def exposure(node: Node, exposure_id: str) -> wire.ExposureInfo:
    reply: wire.ExposuresReply = await node.call(wire.LIST_EXPOSURES, ListPage())
    return next(each for each in reply.exposures if each.exposure_id == exposure_id)


async def until(check: Callable[[], Any], timeout_s: float = 5.0) -> float:
    """Wait until an async check holds; return how long that took."""
    started = anyio.current_time()
    with anyio.fail_after(timeout_s):
        while not await check():
            await anyio.sleep(0.01)
    return anyio.current_time() - started


@contextmanager
def echoing(
    name: str, port: int, word: bytes = b"", host: str = "0.0.0.0"
) -> Iterator[Callable[[], None]]:
    """In a namespace: a server that sends `word` first and then echoes. Yields what ends it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = inside(name, lambda: socket.create_server((host, port), family=family))
    open_: list[socket.socket] = []

    def stop() -> None:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()

    def serve_one(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(word)
            while data := connection.recv(4096):
                connection.sendall(data)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                open_.append(connection)
                threading.Thread(target=serve_one, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        stop()
        for connection in open_:
            connection.close()
        thread.join(2)


@contextmanager
def chattering(name: str, port: int) -> Iterator[None]:
    """In a namespace: a server that never stops sending to whoever connects."""
    listener = inside(name, lambda: socket.create_server(("0.0.0.0", port)))
    ended = threading.Event()

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                while not ended.wait(0.02):
                    connection.sendall(b".")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        listener.close()
        thread.join(2)


class Stream:
    """A connection that stands: `lives` sends something and waits for it to come back."""

    def __init__(self, name: str, address: str, port: int, timeout_s: float = 1.0) -> None:
        self.word = b""
        self._socket = inside(name, lambda: socket.create_connection((address, port), timeout_s))
        self._socket.settimeout(0.7)

    def lives(self) -> bool:
        token = IDS.nonce().encode()
        try:
            self._socket.sendall(token)
            answer = b""
            while token not in answer:
                more = self._socket.recv(4096)
                if not more:
                    return False
                answer += more
        except OSError:
            return False
        return True

    def hears(self) -> bool:
        """Tell whether something comes, once what was on its way is read."""
        self._socket.settimeout(0.5)
        try:
            for _ in range(20):
                if not self._socket.recv(4096):
                    return False
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


def word(name: str, address: str, port: int, timeout_s: float = 1.0) -> bytes:
    """Connect and return the first thing that the server says, empty where nobody answers."""

    def ask() -> bytes:
        try:
            with socket.create_connection((address, port), timeout_s) as connection:
                return connection.recv(64)
        except OSError:
            return b""

    return inside(name, ask)
