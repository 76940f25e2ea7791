"""The proxy alone, before a real storage daemon and a peer that means it no good."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chv.stord.proxy.channel import HALF_MESSAGE_S_MAX
from tests.helpers import wait_until
from tests.integration.inflight_client import InflightDisk, StampedWriter
from tests.integration.proxy_rig import ProxyRig, open_rig
from tests.integration.stord_helpers import MIB, needs_qsd
from tests.integration.vhost_client import VhostDisk

pytestmark = [pytest.mark.root, needs_qsd]
IDLE_FDS = 5  # three standard ones, the listener, the storage daemon


@pytest.fixture
def rig() -> Iterator[ProxyRig]:
    with open_rig() as rig:
        yield rig


def connect(rig: ProxyRig) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(str(rig.front))  # waits where the backlog is full
    peer.settimeout(HALF_MESSAGE_S_MAX + 5)
    return peer


def is_dropped(peer: socket.socket) -> bool:
    """The other side has closed, with or without bytes of ours unread."""
    try:
        while peer.recv(65536):
            pass
    except ConnectionResetError:
        return True
    return True


def huge_payload(peer: socket.socket) -> None:
    peer.send(struct.pack("<III", 5, 1, 0xFFFFFFFF) + bytes(100))


def many_descriptors(peer: socket.socket) -> None:
    socket.send_fds(peer, [struct.pack("<III", 5, 1, 8) + bytes(8)], [0] * 200)


def half_then_gone(peer: socket.socket) -> None:
    peer.send(b"half")
    peer.shutdown(socket.SHUT_WR)


def half_then_silent(peer: socket.socket) -> None:
    socket.send_fds(peer, [b"half"], [0] * 8)


def noise(peer: socket.socket) -> None:
    try:
        peer.send(os.urandom(65536))
    except (BrokenPipeError, ConnectionResetError):
        return


def flood(peer: socket.socket) -> None:
    """Questions without end, and no answer read."""
    try:
        while True:
            peer.send(struct.pack("<III", 1, 1, 0) * 1000)
    except (BrokenPipeError, ConnectionResetError, TimeoutError):
        return


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack", [huge_payload, many_descriptors, half_then_gone, half_then_silent, noise, flood]
)
async def test_a_hostile_peer_loses_its_session_and_the_next_one_is_served(
    rig: ProxyRig, attack: Callable[[socket.socket], None]
) -> None:
    with connect(rig) as peer:
        attack(peer)
        if attack is flood:
            peer.close()  # it does not read, so it would wait for ever on its own doing
        else:
            assert is_dropped(peer)

    if rig.backend is not None and rig.backend.poll() is not None:
        rig.restart_backend()  # noise may be too much for the storage daemon; it is this VM's own
    with VhostDisk(rig.front) as disk:
        assert disk.write(0, b"x" * 512) == 0
        assert disk.read(0, 512) == b"x" * 512
    assert rig.proxy is not None
    assert rig.proxy.poll() is None
    await wait_until(lambda: rig.proxy_fds() == IDLE_FDS)
    assert rig.pss_bytes() <= 20 * MIB


async def test_a_peer_that_comes_and_goes_fills_neither_descriptors_nor_the_log(
    rig: ProxyRig,
) -> None:
    for _ in range(300):
        connect(rig).close()

    def served() -> bool:
        with contextlib.suppress(BlockingIOError), VhostDisk(rig.front) as disk:
            return disk.write_back
        return False  # the backlog is full of those who left

    await wait_until(served)
    await wait_until(lambda: rig.proxy_fds() == IDLE_FDS)
    assert len(rig.log.read_text().splitlines()) <= 1000


async def test_a_vmm_is_accepted_only_when_the_storage_daemon_answers(rig: ProxyRig) -> None:
    """A stopped process accepts connections in its backlog and says nothing."""
    assert rig.backend is not None
    await wait_until(lambda: rig.proxy_fds() == IDLE_FDS)
    rig.end_backend()
    with connect(rig) as peer:
        peer.send(struct.pack("<III", 1, 1, 0))
        peer.settimeout(0.3)
        with pytest.raises(TimeoutError):
            peer.recv(1)
        rig.start_backend()
        peer.settimeout(5)
        assert struct.unpack("<III", peer.recv(12))[0] == 1


async def test_the_write_cache_is_on_although_nobody_set_it_and_follows_the_guest(
    rig: ProxyRig,
) -> None:
    with VhostDisk(rig.front) as disk:
        assert disk.write_back
        disk._send(25, struct.pack("<III", 32, 1, 0) + b"\0")
    rig.restart_backend()
    with VhostDisk(rig.front) as disk:
        assert not disk.write_back


async def test_no_descriptor_is_left_after_many_sessions_with_all_their_descriptors(
    rig: ProxyRig,
) -> None:
    for _ in range(20):
        with InflightDisk(rig.front) as disk:
            writer = StampedWriter(disk, blocks=64)
            writer.run(lambda: writer.writes > 50)  # noqa: B023
    await wait_until(lambda: rig.proxy_fds() == IDLE_FDS)


async def test_a_storage_daemon_that_ends_while_no_vmm_is_there_is_followed_by_the_next(
    rig: ProxyRig,
) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        rig.restart_backend(number)
        with VhostDisk(rig.front) as disk:
            assert disk.write(0, b"x" * 512) == 0


async def test_wrong_arguments_are_one_line_and_a_code(rig: ProxyRig, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unbound:
        process = rig.spawn_proxy(unbound)
    assert process.wait(5) == 2
    assert "does not listen" in rig.log.read_text()
