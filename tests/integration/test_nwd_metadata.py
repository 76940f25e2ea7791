"""The metadata service as guests meet it: their own answers, nobody else's, and no way around."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio.to_thread
import pytest

from chv.common.wire.nwd import NicInfo, VmMetadata
from chv.nwd.metadata import ADDRESS, ADDRESS6
from chv.nwd.metadata_server import CONNECTIONS_OF_GUEST_MAX
from tests.helpers import wait_until
from tests.integration.nwd_helpers import (
    IDS,
    Guest,
    Node,
    inside,
    ip,
    leased,
    needs_nwd,
    open_guest,
    open_node,
)

pytestmark = [pytest.mark.root, needs_nwd]


def about(name: str) -> VmMetadata:
    return VmMetadata(name=name, namespace="default", hostname=name, user_data=f"I am {name}")


def exchange(data: bytes, address: str = ADDRESS, timeout_s: float = 3.0) -> bytes:
    """Send these bytes and read until the other end closes, in this thread's namespace."""
    with socket.create_connection((address, 80), timeout_s) as connection:
        connection.sendall(data)
        answer = b""
        while block := connection.recv(65536):
            answer += block
        return answer


def request(path: str, *headers: str, host: str = ADDRESS) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", f"Host: {host}", *headers, "", ""]).encode()


def body(answer: bytes) -> bytes:
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), answer
    return content


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


async def ask(guest: Guest, path: str = "/user-data") -> str:
    answer = await anyio.to_thread.run_sync(guest.run, lambda: exchange(request(path)))
    return body(answer).decode()


async def raw(guest: Guest, data: bytes) -> bytes:
    return await anyio.to_thread.run_sync(guest.run, lambda: exchange(data))


async def refused(guest: Guest, address: str = ADDRESS) -> bool:
    """Tell whether nobody answers."""

    def attempt() -> bool:
        try:
            exchange(request("/"), address, 0.5)
        except OSError:
            return True
        return False

    return await anyio.to_thread.run_sync(guest.run, attempt)


@asynccontextmanager
async def guest_of(node: Node, network: str, name: str) -> AsyncIterator[tuple[Guest, NicInfo]]:
    info = await node.attach(network, metadata=about(name))
    async with open_guest(node, info) as guest:
        guest.configure()
        yield guest, info


async def test_each_guest_is_told_about_itself_also_where_two_networks_have_equal_addresses() -> (
    None
):
    async with open_node() as node:
        one, two = IDS.uid(), IDS.uid()
        for network in (one, two):
            await node.ensure(network, metadata=True)
        async with (
            guest_of(node, one, "a") as (a, of_a),
            guest_of(node, one, "b") as (b, _),
            guest_of(node, two, "c") as (c, of_c),
        ):
            assert of_a.address == of_c.address
            assert [await ask(each) for each in (a, b, c)] == ["I am a", "I am b", "I am c"]
            tree = json.loads(await ask(a, "/chv/v1.json"))
            assert tree["name"] == "a"
            assert [each["addresses"] for each in tree["interfaces"]] == [[f"{of_a.address}/24"]]
            ip("-n", b.name, "route", "add", "169.254.0.0/16", "dev", "eth0")
            assert await ask(b) == "I am b", "also where it takes us for a neighbour"
            ip("-n", a.name, "address", "add", "10.7.0.3/24", "dev", "eth0")

            def as_b() -> bytes:
                connection = socket.create_connection((ADDRESS, 80), 0.5, ("10.7.0.3", 0))
                with connection:
                    connection.sendall(request("/user-data"))
                    return connection.recv(65536)

            with pytest.raises(OSError, match="timed out"):
                await anyio.to_thread.run_sync(a.run, as_b)
            assert await leased(node, await node.attach(one)), "DHCP does not mind the address"


async def test_what_changes_is_told_at_once_and_a_nic_that_is_gone_tells_nothing() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, metadata=True)
        async with guest_of(node, network, "a") as (guest, info):
            await node.attach(network, info.nic_id, 2, vm_id=info.vm_id, metadata=about("renamed"))
            assert await ask(guest) == "I am renamed"


async def test_nobody_answers_where_it_is_not_wanted() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        async with guest_of(node, network, "a") as (guest, _):
            assert await refused(guest)
            await node.ensure(network, 2, metadata=True)
            assert await ask(guest) == "I am a"
            await node.ensure(network, 3)
            assert await refused(guest)
            assert ADDRESS not in ip("-n", node.layout.netns(network), "address")


async def test_the_gateway_itself_and_the_world_are_told_nothing() -> None:
    async with open_node() as node:
        network = IDS.uid()
        info = await node.ensure(network, metadata=True)
        answer = await anyio.to_thread.run_sync(
            lambda: inside(info.netns, lambda: exchange(request("/user-data")))
        )
        assert status(answer) == 403
        ip("-n", node.sandbox.host, "route", "add", f"{ADDRESS}/32", "via", info.uplink_address)

        def from_host() -> bytes:
            return exchange(request("/"), timeout_s=0.5)

        with pytest.raises(OSError, match="timed out"):
            await anyio.to_thread.run_sync(lambda: inside(node.sandbox.host, from_host))


async def test_it_is_served_again_at_once_after_a_restart_and_not_at_all_in_between() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, metadata=True)
        async with guest_of(node, network, "a") as (guest, _):
            await node.end()
            assert await refused(guest)
            await node.start()
            assert await ask(guest) == "I am a"


async def test_a_namespace_that_was_made_anew_is_served_and_the_old_one_goes() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, metadata=True)
        info = await node.attach(network, metadata=about("a"))
        ip("netns", "delete", info.netns)
        await node.ensure(network, metadata=True)
        async with open_guest(node, info) as guest:
            guest.configure()
            assert await ask(guest) == "I am a"
        await node.detach(info.nic_id)
        await node.delete(network)
        assert node.namespaces() == []


REFUSED: dict[str, tuple[bytes, int]] = {
    "not HTTP": (b"\x16\x03\x01" * 30 + b"\r\n\r\n", 400),
    "by a proxy": (request("/", "X-Forwarded-For: 10.7.0.3"), 403),
    "by another name": (request("/", host="evil.test"), 403),
    "with a body": (request("/", "Content-Length: 3") + b"abc", 400),
    "no such path": (request("/latest/meta-data/iam"), 404),
    "a head without end": (b"GET / HTTP/1.1\r\nA: " + b"b" * 20_000, 431),
    "another method": (request("/").replace(b"GET", b"POST"), 405),
}


async def test_hostile_requests_get_an_answer_and_no_content_and_others_are_served_meanwhile() -> (
    None
):
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, metadata=True)
        async with (
            guest_of(node, network, "a") as (guest, _),
            guest_of(node, network, "b") as (other, _),
        ):
            for name, (data, expected) in REFUSED.items():
                assert status(await raw(guest, data)) == expected, name
            with contextlib.ExitStack() as stack:
                held = [
                    stack.enter_context(guest.run(connection))
                    for _ in range(CONNECTIONS_OF_GUEST_MAX * 3)
                ]
                for each in held[::2]:
                    with contextlib.suppress(OSError):
                        each.sendall(b"GET / HT")
                assert await ask(other) == "I am b", "one guest's connections are its own"

            async def served() -> bool:
                try:
                    return await ask(guest) == "I am a"
                except OSError:
                    return False

            await wait_until(served, timeout_s=5)


def connection() -> socket.socket:
    return socket.create_connection((ADDRESS, 80), 2)


async def test_an_answer_lives_for_one_hop() -> None:
    """What a router in the guest would forward to somebody behind it is dropped there."""
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, metadata=True)
        async with guest_of(node, network, "a") as (guest, _):

            def ttl() -> int:
                with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP) as seen:
                    seen.settimeout(3)
                    exchange(request("/"))
                    while True:
                        packet, sender = seen.recvfrom(65536)
                        if sender[0] == ADDRESS:
                            return packet[8]

            assert await anyio.to_thread.run_sync(guest.run, ttl) == 1


async def test_a_guest_with_ipv6_alone_in_use_is_answered() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, metadata=True, subnet6="fd00:7::/64")
        info = await node.attach(network, metadata=about("six"))
        async with open_guest(node, info) as guest:
            ip("-n", guest.name, "address", "add", f"{info.address6}/64", "dev", "eth0", "nodad")
            ip("-n", guest.name, "route", "add", "default", "via", info.gateway6, "dev", "eth0")

            def six() -> bytes:
                return exchange(request("/user-data", host=f"[{ADDRESS6}]"), ADDRESS6)

            ask_six: Callable[[], bytes] = lambda: guest.run(six)  # noqa: E731
            assert body(await anyio.to_thread.run_sync(ask_six)) == b"I am six"
