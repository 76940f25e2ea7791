"""Exposures in real namespaces: who gets in, who answers, and what a change does to streams."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.to_thread
import pytest

from chv.common.errors import AlreadyExists, InUse, StaleGeneration
from chv.common.wire.nwd import NicInfo
from chv.common.wire.nwd_policy import Algorithm, HealthCheck, HealthProtocol, IpProtocol
from tests.integration.nwd_helpers import (
    HOST_ADDRESS,
    IDS,
    WAN_ADDRESS,
    Guest,
    Node,
    inside,
    ip,
    needs_nwd,
    open_guest,
    open_node,
)
from tests.integration.nwd_objects import (
    Stream,
    delete_exposure,
    echoing,
    exposure,
    set_exposure,
    until,
    word,
)

pytestmark = [pytest.mark.root, needs_nwd]
VIRTUAL = "10.7.0.200"
TCP_CHECK = HealthCheck(protocol=HealthProtocol.TCP, interval_s=0.2, timeout_s=0.2, rise=2, fall=2)


@dataclass
class Farm:
    """A network with guests that say their number, and a client that only asks."""

    node: Node
    network: str
    servers: list[Guest]
    client: Guest
    exposure_id: str = field(default_factory=IDS.uid)
    stops: list[Callable[[], None]] = field(default_factory=list)

    @property
    def ids(self) -> list[str]:
        return [guest.info.nic_id for guest in self.servers]

    async def expose(self, generation: int = 1, **changes: Any) -> object:
        fields: dict[str, Any] = {"addresses": [HOST_ADDRESS], "port": 8080, "target_port": 80}
        fields["targets"] = self.ids
        return await set_exposure(
            self.node, self.network, self.exposure_id, generation, **(fields | changes)
        )

    async def states(self) -> list[str]:
        found = await exposure(self.node, self.exposure_id)
        return [target.state for target in found.targets]

    async def all_healthy(self) -> bool:
        """It is recorded before the rules follow: whoever answers is asked as well."""
        if set(await self.states()) != {"healthy"}:
            return False
        answers = {await ask(self.wan) for _ in range(4 * len(self.servers))}
        return answers == {str(number).encode() for number in range(len(self.servers))}

    @property
    def wan(self) -> str:
        return self.node.sandbox.wan

    @property
    def host(self) -> str:
        return self.node.sandbox.host


async def ask(name: str, address: str = HOST_ADDRESS, port: int = 8080) -> bytes:
    return await anyio.to_thread.run_sync(lambda: word(name, address, port))


async def stream(name: str, address: str = HOST_ADDRESS, port: int = 8080) -> Stream:
    made = await anyio.to_thread.run_sync(lambda: Stream(name, address, port))
    assert await lives(made)
    return made


async def lives(made: Stream) -> bool:
    return await anyio.to_thread.run_sync(made.lives)


@asynccontextmanager
async def open_farm(node: Node, count: int = 2) -> AsyncIterator[Farm]:
    network = IDS.uid()
    await node.ensure(network)
    infos = [await node.attach(network) for _ in range(count + 1)]
    async with anyio.create_task_group() as tasks:
        guests: list[Guest] = []
        async with _opened(node, infos, guests):
            for guest in guests:
                guest.configure()
            farm = Farm(node, network, guests[:-1], guests[-1])
            with ExitStack() as stack:
                for number, guest in enumerate(farm.servers):
                    answer = echoing(guest.name, 80, str(number).encode())
                    farm.stops.append(stack.enter_context(answer))
                yield farm
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def _opened(node: Node, infos: list[NicInfo], guests: list[Guest]) -> AsyncIterator[None]:
    if not infos:
        yield
        return
    async with open_guest(node, infos[0]) as guest:
        guests.append(guest)
        async with _opened(node, infos[1:], guests):
            yield


async def test_an_exposure_is_reached_from_everywhere_and_nothing_else_is() -> None:
    async with open_node() as node, open_farm(node, 1) as farm:
        await farm.expose()
        server = farm.servers[0].name
        assert await ask(farm.wan) == b"0", "from outside"
        assert await ask(farm.host) == b"0", "from the node itself"
        assert await ask(farm.client.name) == b"0", "from another guest"
        assert await ask(server) == b"0", "from the target itself"
        assert await ask(farm.wan, port=8081) == b""
        assert await ask(farm.client.name, farm.servers[0].info.address, 80) == b""


async def test_an_address_of_the_subnet_is_for_those_inside() -> None:
    async with open_node() as node, open_farm(node, 1) as farm:
        await farm.expose(addresses=[VIRTUAL], port=80)
        assert await ask(farm.client.name, VIRTUAL, 80) == b"0"
        assert await ask(farm.servers[0].name, VIRTUAL, 80) == b"0"
        with pytest.raises(InUse, match=farm.exposure_id):
            await node.attach(farm.network, address=VIRTUAL)
        await delete_exposure(node, farm.exposure_id)
        assert await ask(farm.client.name, VIRTUAL, 80) == b""
        await node.attach(farm.network, address=VIRTUAL)


async def test_a_public_address_is_routed_to_the_network_and_marks_what_leaves() -> None:
    public = "198.51.100.7"
    async with open_node() as node:
        network, vm_id = IDS.uid(), IDS.uid()
        await node.ensure(network, public_addresses=[public, "198.51.100.8"])
        info = await node.attach(network, vm_id=vm_id)
        ip("-n", node.sandbox.wan, "route", "add", "198.51.100.0/24", "via", HOST_ADDRESS)
        async with open_guest(node, info) as guest:
            guest.configure()
            with echoing(guest.name, 80, b"0"):
                await set_exposure(
                    node,
                    network,
                    exposure_id := IDS.uid(),
                    addresses=[public],
                    port=80,
                    targets=[info.nic_id],
                )
                assert await ask(node.sandbox.wan, public, 80) == b"0"
                assert await ask(guest.name, public, 80) == b"0", "hairpin"
                assert await anyio.to_thread.run_sync(_source_seen, node, guest) == public
                await node.attach(
                    network, info.nic_id, 2, vm_id=vm_id, public_address="198.51.100.8"
                )
                seen = await anyio.to_thread.run_sync(_source_seen, node, guest)
                assert seen == "198.51.100.8"
                with pytest.raises(InUse, match=exposure_id):
                    await node.ensure(network, 2, public_addresses=["198.51.100.8"])


def _source_seen(node: Node, guest: Guest) -> str:
    """Let a guest connect to the outside; return whom the outside sees."""
    listener = inside(node.sandbox.wan, lambda: socket.create_server((WAN_ADDRESS, 0)))
    with listener:
        port = listener.getsockname()[1]
        made = guest.run(lambda: socket.create_connection((WAN_ADDRESS, port), 1))
        with made:
            accepted, (source, _) = listener.accept()
            accepted.close()
    return str(source)


async def test_ipv6_is_exposed_to_those_inside_as_ipv4_is() -> None:
    virtual = "fd00:7::200"
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, subnet6="fd00:7::/64")
        server_nic, client_nic = await node.attach(network), await node.attach(network)
        assert server_nic.address6
        assert server_nic.gateway6 == "fd00:7::1"
        async with open_guest(node, server_nic) as server, open_guest(node, client_nic) as client:
            server.configure6()
            client.configure6()
            check = HealthCheck(protocol=HealthProtocol.TCP, interval_s=0.1, rise=1, fall=1)
            exposure_id = IDS.uid()
            with echoing(server.name, 80, b"0", host="::"):
                await set_exposure(
                    node,
                    network,
                    exposure_id,
                    addresses=[virtual],
                    port=80,
                    targets=[server_nic.nic_id],
                    sources=["::/0"],
                    health=check,
                )

                async def answers() -> bool:
                    return await ask(client.name, virtual, 80) == b"0"

                await until(answers)
                assert (await exposure(node, exposure_id)).targets[0].state == "healthy"
                assert await ask(server.name, virtual, 80) == b"0", "hairpin"
                standing = await stream(client.name, virtual, 80)
                await delete_exposure(node, exposure_id)
                assert not await lives(standing)


async def test_the_client_is_seen_and_sources_decide() -> None:
    async with open_node() as node, open_farm(node, 1) as farm:
        await farm.expose(sources=["198.18.7.1/32"])
        listener = inside(farm.servers[0].name, lambda: socket.create_server(("0.0.0.0", 81)))
        with listener:
            await farm.expose(2, sources=["198.18.7.1/32"], target_port=81)
            made = await anyio.to_thread.run_sync(
                lambda: inside(farm.wan, lambda: socket.create_connection((HOST_ADDRESS, 8080), 1))
            )
            with made:
                accepted, (source, _) = listener.accept()
                accepted.close()
            assert source == "198.18.7.1"
            assert await ask(farm.client.name) == b""
            assert await ask(farm.host) == b""


async def test_withdrawing_ends_connections_or_keeps_them() -> None:
    async with open_node() as node, open_farm(node, 1) as farm:
        await farm.expose()
        kept = await stream(farm.wan)
        await delete_exposure(node, farm.exposure_id, existing="keep")
        assert await lives(kept)
        assert await ask(farm.wan) == b""
        with pytest.raises(StaleGeneration):
            await farm.expose()
        await farm.expose(2)
        dropped = await stream(farm.wan)
        await delete_exposure(node, farm.exposure_id, 2)
        assert not await lives(dropped)
        assert not await lives(kept), "the first went with them"
        assert (await node.health()).exposures == 0


async def test_a_source_that_is_shut_out_loses_its_connections_and_others_do_not() -> None:
    async with open_node() as node, open_farm(node, 1) as farm:
        await farm.expose()
        outside, guest = await stream(farm.wan), await stream(farm.client.name)
        await farm.expose(2, sources=[f"{farm.client.info.address}/32"])
        assert await lives(guest)
        assert not await lives(outside)


async def test_a_target_that_ends_is_left_out_in_time_and_comes_back() -> None:
    async with open_node() as node, open_farm(node, 2) as farm:
        await farm.expose(health=TCP_CHECK)
        assert await ask(farm.wan) == b"", "nobody is known to be healthy yet"
        await until(farm.all_healthy)
        answers = {await ask(farm.wan) for _ in range(8)}
        assert answers == {b"0", b"1"}
        standing = [await stream(farm.wan) for _ in range(2)]
        farm.stops[0]()

        async def only_one() -> bool:
            return await farm.states() == ["unhealthy", "healthy"]

        took = await until(only_one)
        assert took <= TCP_CHECK.fall * TCP_CHECK.interval_s + 0.3
        assert {await ask(farm.wan) for _ in range(6)} == {b"1"}
        assert all([await lives(each) for each in standing]), "they lose new ones only"
        found = await exposure(node, farm.exposure_id)
        assert found.targets[0].message
        assert found.targets[0].since.endswith("Z")
        with echoing(farm.servers[0].name, 80, b"0"):
            await until(farm.all_healthy)
            assert {await ask(farm.wan) for _ in range(8)} == {b"0", b"1"}


async def test_without_a_healthy_target_a_connection_is_refused_at_once() -> None:
    async with open_node() as node, open_farm(node, 1) as farm:
        await farm.expose(health=TCP_CHECK)
        await until(farm.all_healthy)
        farm.stops[0]()

        async def unhealthy() -> bool:
            return await farm.states() == ["unhealthy"]

        await until(unhealthy)
        started = anyio.current_time()
        with pytest.raises(ConnectionRefusedError):
            await anyio.to_thread.run_sync(
                lambda: inside(farm.wan, lambda: socket.create_connection((HOST_ADDRESS, 8080), 3))
            )
        assert anyio.current_time() - started < 1.0
        assert (await exposure(node, farm.exposure_id)).status == "degraded"


async def test_http_checks_read_the_status() -> None:
    async with open_node() as node, open_farm(node, 1) as farm:
        check = HealthCheck(
            protocol=HealthProtocol.HTTP, port=8000, path="/ready", interval_s=0.1, rise=1, fall=1
        )
        with Http(farm.servers[0].name, 8000) as statuses:
            await farm.expose(health=check)
            await until(farm.all_healthy)
            statuses.append(b"503 Busy")

            async def told() -> bool:
                target = (await exposure(node, farm.exposure_id)).targets[0]
                return (target.state, target.message) == ("unhealthy", "HTTP status 503")

            await until(told)
            statuses.append(b"302 Elsewhere")
            await until(farm.all_healthy)


class Http:
    """A server that answers `/ready` with the last of its statuses."""

    def __init__(self, name: str, port: int) -> None:
        self._listener = inside(name, lambda: socket.create_server(("0.0.0.0", port)))
        self._statuses = [b"200 OK"]

    def __enter__(self) -> list[bytes]:
        threading.Thread(target=self._serve, daemon=True).start()
        return self._statuses

    def _serve(self) -> None:
        try:
            while True:
                connection, _ = self._listener.accept()
                with connection:
                    request = connection.recv(4096)
                    is_asked = request.startswith(b"GET /ready HTTP/1.1\r\n")
                    status = self._statuses[-1] if is_asked else b"404 Not Found"
                    connection.sendall(b"HTTP/1.1 " + status + b"\r\n\r\n")
        except OSError:
            return

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


async def test_a_target_that_is_taken_out_drains_and_then_ends_also_through_a_restart() -> None:
    async with open_node() as node, open_farm(node, 2) as farm:
        await farm.expose(algorithm=Algorithm.ROUND_ROBIN)
        streams = [await stream(farm.wan) for _ in range(2)]
        answered = [await ask(farm.wan) for _ in range(2)]
        assert set(answered) == {b"0", b"1"}
        await farm.expose(2, targets=farm.ids[1:], drain_s=8.0)
        assert await farm.states() == ["unknown", "draining"]
        assert {await ask(farm.wan) for _ in range(4)} == {b"1"}
        assert all([await lives(each) for each in streams])
        await node.end()
        await node.start()
        assert await farm.states() == ["unknown", "draining"]
        assert all([await lives(each) for each in streams])

        async def over() -> bool:
            return await farm.states() == ["unknown"]

        await until(over, 60.0)
        assert sorted([await lives(each) for each in streams]) == [False, True]


async def test_a_drain_without_time_ends_at_once() -> None:
    async with open_node() as node, open_farm(node, 2) as farm:
        await farm.expose()
        streams = [await stream(farm.wan) for _ in range(2)]
        await farm.expose(2, targets=farm.ids[:1], drain_s=0.0)

        async def over() -> bool:
            return await farm.states() == ["unknown"]

        await until(over, 1.0)
        assert sorted([await lives(each) for each in streams]) == [False, True]


async def test_a_restart_in_the_middle_loses_no_stream_and_knows_who_is_healthy() -> None:
    async with open_node() as node, open_farm(node, 2) as farm:
        await farm.expose(health=TCP_CHECK)
        await until(farm.all_healthy)
        made = await stream(farm.wan)
        await node.end()
        assert await ask(farm.wan) in (b"0", b"1")
        node.forget_log()
        await node.start()
        assert await farm.states() == ["healthy", "healthy"]
        assert node.applied() == []
        assert await ask(farm.wan) in (b"0", b"1")
        assert await lives(made)
        farm.stops[0]()

        async def one_left() -> bool:
            return sorted(await farm.states()) == ["healthy", "unhealthy"]

        await until(one_left)


async def test_udp_that_flowed_before_is_led_to_the_target_and_back_again() -> None:
    async with open_node() as node, open_farm(node, 1) as farm:
        fields: dict[str, Any] = {"protocol": IpProtocol.UDP, "port": 5353, "target_port": 53}
        client = inside(farm.wan, lambda: socket.socket(type=socket.SOCK_DGRAM))
        server = inside(farm.servers[0].name, lambda: socket.socket(type=socket.SOCK_DGRAM))
        with client, server:
            server.bind(("0.0.0.0", 53))
            server.settimeout(0.4)
            client.settimeout(0.4)
            client.connect((HOST_ADDRESS, 5353))

            def arrives() -> bool:
                for _ in range(2):  # the answer to an earlier one may be an error
                    try:
                        client.send(b"?")
                        server.recv(16)
                    except OSError:
                        continue
                    return True
                return False

            assert not arrives()
            await farm.expose(**fields)
            assert await anyio.to_thread.run_sync(arrives), "the same socket, tracked before"
            await delete_exposure(node, farm.exposure_id)
            assert not await anyio.to_thread.run_sync(arrives)
            await farm.expose(2, **fields)
            assert await anyio.to_thread.run_sync(arrives)


async def test_a_range_keeps_its_ports() -> None:
    async with open_node() as node, open_farm(node, 1) as farm:
        await farm.expose(port=79, port_end=81, target_port=0)
        assert await ask(farm.wan, port=80) == b"0"
        assert await ask(farm.wan, port=81) == b""


def listening(name: str, address: str, port: int, kind: int) -> socket.socket:
    def make() -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        found = socket.socket(family, kind)
        found.bind((address, port))
        if kind == socket.SOCK_STREAM:
            found.listen()
        return found

    return inside(name, make)


@pytest.mark.parametrize(
    ("address", "kind", "protocol"),
    [
        ("0.0.0.0", socket.SOCK_STREAM, IpProtocol.TCP),
        (HOST_ADDRESS, socket.SOCK_STREAM, IpProtocol.TCP),
        ("::", socket.SOCK_STREAM, IpProtocol.TCP),
        ("0.0.0.0", socket.SOCK_DGRAM, IpProtocol.UDP),
    ],
)
async def test_a_port_that_the_node_listens_on_stays_its_own(
    address: str, kind: int, protocol: IpProtocol
) -> None:
    async with open_node() as node:
        network, exposure_id = IDS.uid(), IDS.uid()
        await node.ensure(network)
        wanted: dict[str, Any] = {"addresses": [HOST_ADDRESS], "protocol": protocol}
        with listening(node.sandbox.host, address, 2222, kind):
            for changes in ({"port": 2222}, {"port": 2000, "port_end": 2300}):
                with pytest.raises(InUse, match=f"port 2222 of {HOST_ADDRESS}"):
                    await set_exposure(node, network, IDS.uid(), **(wanted | changes))
            await set_exposure(node, network, exposure_id, port=2223, **wanted)
        with listening(node.sandbox.host, address, 2223, kind):  # who comes later finds it taken
            await set_exposure(node, network, exposure_id, 2, port=2223, drain_s=1, **wanted)
        with listening(node.sandbox.host, "127.0.0.1", 2224, kind):  # another address
            await set_exposure(node, network, exposure_id, 3, port=2224, **wanted)


async def test_an_address_of_an_exposure_is_no_guests_however_it_is_written() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, subnet6="fd00:7::/64")
        await set_exposure(node, network, IDS.uid(), addresses=["fd00:7::fa"], port=80)
        with pytest.raises(InUse, match="exposure"):
            await node.attach(network, address6="fd00:7:0::fa")


async def test_what_is_taken_is_refused_and_a_network_with_exposures_stays() -> None:
    async with open_node() as node, open_farm(node, 1) as farm:
        await farm.expose()
        other = IDS.uid()
        await node.ensure(other)
        with pytest.raises(AlreadyExists, match=farm.exposure_id):
            await set_exposure(node, other, IDS.uid(), addresses=[HOST_ADDRESS], port=8080)
        for nic_id in (*farm.ids, farm.client.info.nic_id):
            await node.detach(nic_id)
        assert await farm.states() == ["absent"]
        with pytest.raises(InUse, match=farm.exposure_id):
            await node.delete(farm.network)
        await delete_exposure(node, farm.exposure_id)
        await node.delete(farm.network)
