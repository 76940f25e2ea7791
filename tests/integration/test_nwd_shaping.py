"""Rates of a NIC, measured on a stream through its tap, and what the kernel holds of them."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

import anyio.to_thread
import pytest

from chv.common.errors import InUse, InvalidArgument
from chv.common.wire.nwd import NicInfo, Shape
from chv.nwd.kernel import links, tap
from tests.integration.nwd_helpers import (
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

pytestmark = [pytest.mark.root, needs_nwd]
MBIT = 1_000_000
WARM_UP_S, MEASURED_S = 0.5, 1.2
PORT = 5201


class Stream:
    """A TCP stream from `sender` to `receiver`, both connected sockets; counts what arrives."""

    def __init__(self, sender: socket.socket, receiver: socket.socket) -> None:
        self._sender, self._receiver = sender, receiver
        self._stop = threading.Event()
        self.received = 0
        self.errors: list[OSError] = []
        self._threads = [threading.Thread(target=each) for each in (self._send, self._receive)]

    def __enter__(self) -> Stream:
        for each in (self._sender, self._receiver):
            each.settimeout(5)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for each in (self._sender, self._receiver):
            each.close()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        block = bytes(65536)
        while not self._stop.is_set():
            try:
                self._sender.sendall(block)
            except OSError as error:
                self._note(error)
                return

    def _receive(self) -> None:
        while not self._stop.is_set():
            try:
                self.received += len(self._receiver.recv(1 << 20))
            except OSError as error:
                self._note(error)
                return

    def _note(self, error: OSError) -> None:
        if not self._stop.is_set():
            self.errors.append(error)

    async def rate_bps(self) -> float:
        """What passes now, of the payload alone."""
        await anyio.sleep(WARM_UP_S)
        before, start = self.received, time.monotonic()
        await anyio.sleep(MEASURED_S)
        return (self.received - before) * 8 / (time.monotonic() - start)


async def pair(node: Node, guest: Guest) -> tuple[socket.socket, socket.socket]:
    """A connection from the guest to the world: (the guest's end, the other)."""

    def connect() -> tuple[socket.socket, socket.socket]:
        with inside(node.sandbox.wan, lambda: socket.create_server(("0.0.0.0", PORT))) as server:
            ours = guest.run(lambda: socket.create_connection((WAN_ADDRESS, PORT), 5))
            return ours, server.accept()[0]

    return await anyio.to_thread.run_sync(connect)


async def shaped(node: Node, network: str, **shape: Any) -> NicInfo:
    return await node.attach(network, shape=Shape(**shape))


async def reshape(node: Node, nic: NicInfo, generation: int, **shape: Any) -> NicInfo:
    return await node.attach(
        nic.network_id, nic.nic_id, generation, vm_id=nic.vm_id, shape=Shape(**shape)
    )


def within(measured: float, wanted: float) -> bool:
    """±10 %; a payload is 1398 of the 1464 bytes that a bucket counts of a frame here."""
    return abs(measured * 1464 / 1398 / wanted - 1) < 0.1


def queues_of(nic: NicInfo) -> str:
    """What tc shows of shaping in the network's namespace."""
    listing = ip("netns", "exec", nic.netns, "tc", "qdisc")
    lines = [line for line in listing.splitlines() if "tbf" in line or "ingress" in line]
    return "\n".join(line.split(" refcnt")[0] for line in lines)


def ifbs_of(nic: NicInfo) -> list[str]:
    found = inside(nic.netns, links.read_all)
    return [link.name for link in found.values() if link.kind == "ifb"]


async def test_what_a_guest_receives_and_sends_is_held_to_its_rates_each_way() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await shaped(node, network, ingress_bps=40 * MBIT, egress_bps=20 * MBIT)
        async with open_guest(node, nic) as guest:
            guest.configure()
            ours, theirs = await pair(node, guest)
            with Stream(theirs, ours) as stream:
                assert within(rate := await stream.rate_bps(), 40 * MBIT), rate
            ours, theirs = await pair(node, guest)
            with Stream(ours, theirs) as stream:
                assert within(rate := await stream.rate_bps(), 20 * MBIT), rate


async def test_a_rate_changes_below_a_running_stream_and_may_be_taken_away() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await shaped(node, network, egress_bps=16 * MBIT)
        async with open_guest(node, nic) as guest:
            guest.configure()
            ours, theirs = await pair(node, guest)
            with Stream(ours, theirs) as stream:
                assert within(rate := await stream.rate_bps(), 16 * MBIT), rate
                node.forget_log()
                await reshape(node, nic, 2, egress_bps=32 * MBIT)
                assert node.applied() == ["set_shape"]
                assert within(rate := await stream.rate_bps(), 32 * MBIT), rate
                await reshape(node, nic, 3)
                assert await stream.rate_bps() > 40 * MBIT
                assert (stream.errors, queues_of(nic), ifbs_of(nic)) == ([], "", [])


async def test_a_nic_tells_the_rates_that_the_kernel_has() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        wanted = Shape(ingress_bps=40 * MBIT, egress_bps=MBIT, burst_bytes=100_000)
        nic = await node.attach(network, shape=wanted)
        assert (await node.nic(nic.nic_id)).shape == wanted
        slower = (
            f"qdisc replace dev {nic.tap} root handle 1: tbf rate 8mbit burst 99999 limit 500000"
        )
        ip("netns", "exec", nic.netns, "tc", *slower.split())
        assert (await node.nic(nic.nic_id)).shape.ingress_bps == 8 * MBIT


DAMAGE = {
    "bucket of the tap gone": "tc qdisc del dev {tap} root",
    "bucket of the tap changed": "tc qdisc replace dev {tap} root handle 1: tbf rate 1mbit"
    " burst 50000 limit 90000",
    "another queue on the tap": "tc qdisc replace dev {tap} root handle 7: htb",
    "redirection gone": "tc qdisc del dev {tap} ingress",
    "filter gone": "tc filter del dev {tap} ingress",
    "a second filter": "tc filter add dev {tap} ingress prio 5 protocol ip u32 match u32 0 0"
    " action mirred egress redirect dev lo",
    "ifb gone": "ip link del {ifb}",
    "ifb down": "ip link set {ifb} down",
    "ifb renamed in its alias": "ip link set {ifb} alias somebody",
    "bucket of the ifb gone": "tc qdisc del dev {ifb} root",
    "tap gone": "ip link del {tap}",
}


async def test_every_damage_to_rates_is_repaired_by_one_pass() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await shaped(node, network, ingress_bps=40 * MBIT, egress_bps=20 * MBIT)
        truth = queues_of(nic)
        assert truth.count("tbf") == 2
        ifb = node.layout.ifb(nic.nic_id)
        for generation, (name, damage) in enumerate(DAMAGE.items()):
            command = damage.format(tap=nic.tap, ifb=ifb).split()
            ip("netns", "exec", nic.netns, *command)
            node.forget_log()
            if generation % 2:  # the look at one NIC sees it as well as that at the network
                await node.attach(network, nic.nic_id, vm_id=nic.vm_id, shape=nic.shape)
            else:
                await node.ensure(network)
            assert node.applied(), name
            assert sorted(queues_of(nic).split("\n")) == sorted(truth.split("\n")), name
            node.forget_log()
            await node.ensure(network)
            assert node.applied() == [], name


async def test_nothing_is_left_of_the_rates_of_a_nic_that_goes() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        stays = await shaped(node, network, egress_bps=20 * MBIT)
        nic = await shaped(node, network, ingress_bps=40 * MBIT, egress_bps=20 * MBIT)
        assert len(ifbs_of(nic)) == 2
        await node.detach(nic.nic_id)
        assert ifbs_of(stays) == [node.layout.ifb(stays.nic_id)]
        node.forget_log()
        await node.ensure(network)
        assert node.applied() == []


async def test_a_tap_with_queues_gives_a_descriptor_for_each_and_to_one_vmm_alone() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network, queues=4)
        node.forget_log()
        await node.ensure(network)
        assert node.applied() == []
        async with node.client() as client:
            _, fds = await client.call_fds(*open_call(nic))
            try:
                assert len(fds) == 4
                with pytest.raises(InUse):
                    await client.call_fds(*open_call(nic))
                with pytest.raises(InUse):
                    await node.attach(network, nic.nic_id, 2, vm_id=nic.vm_id, queues=1)
            finally:
                for fd in fds:
                    os.close(fd)
        nic = await node.attach(network, nic.nic_id, 3, vm_id=nic.vm_id, queues=1)
        assert not inside(nic.netns, lambda: links.read([nic.tap]))[nic.tap].multi_queue
        os.close(await node.open(nic.nic_id))


def open_call(nic: NicInfo) -> tuple[Any, Any]:
    from chv.common.wire import nwd as wire

    return wire.OPEN_NIC, wire.OpenVmNic(nic_id=nic.nic_id)


async def test_a_rate_that_is_nonsense_is_refused() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        with pytest.raises(InvalidArgument, match="too few"):
            await shaped(node, network, ingress_bps=100)
        assert await node.nics() == []


def test_a_tap_that_is_not_there_gives_no_descriptor() -> None:
    with pytest.raises(Exception, match="there is no tap"):
        tap.open_for_vmm("tnothere", 2)
    assert "tnothere" not in links.read(["tnothere"])
