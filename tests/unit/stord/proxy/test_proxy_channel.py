"""One side of a session over a real socket pair: limits, back-pressure, no descriptor left."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from chv.stord.proxy import channel as module
from chv.stord.proxy.channel import Channel, Left, close_all
from chv.stord.proxy.message import FDS_MAX, HEADER, Malformed, Message


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    before = open_fds()
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()
    assert open_fds() == before


def pipes(count: int) -> list[int]:
    return [fd for _ in range(count) for fd in os.pipe()]


def test_a_message_passes_with_its_descriptors_and_our_copies_are_closed(
    pair: tuple[Channel, socket.socket],
) -> None:
    channel, peer = pair
    fds = pipes(1)
    socket.send_fds(peer, [Message(5, b"x").encode()], fds)
    message = channel.receive()
    assert message is not None
    assert len(message.fds) == 2
    assert all(not os.get_inheritable(fd) for fd in message.fds)
    before = open_fds()

    channel.send(message)

    assert open_fds() == before - 2
    data, got, _, _ = socket.recv_fds(peer, 100, 8)
    assert data == Message(5, b"x").encode()
    assert os.fstat(got[0]).st_ino == os.fstat(fds[0]).st_ino
    close_all((*got, *fds))


def test_nothing_to_read_is_none_and_a_closed_peer_has_left(
    pair: tuple[Channel, socket.socket],
) -> None:
    channel, peer = pair
    assert channel.receive() is None
    peer.close()
    with pytest.raises(Left):
        channel.receive()


@pytest.mark.parametrize("size", [5, 4000])
def test_more_descriptors_than_allowed_are_refused_and_closed(
    pair: tuple[Channel, socket.socket], size: int
) -> None:
    """Whole and half messages alike."""
    channel, peer = pair
    fds = pipes(FDS_MAX)
    socket.send_fds(peer, [HEADER.pack(5, 1, size) + b"12345"], fds)
    with pytest.raises(Malformed, match="descriptors"):
        channel.receive()
    close_all(tuple(fds))


def test_descriptors_spread_over_a_message_are_counted_together(
    pair: tuple[Channel, socket.socket],
) -> None:
    channel, peer = pair
    fds = pipes(3)
    socket.send_fds(peer, [HEADER.pack(5, 1, 100)], fds)
    socket.send_fds(peer, [b"x"], fds)
    with pytest.raises(Malformed, match="descriptors"):
        channel.receive()
    close_all(tuple(fds))


def test_half_a_message_has_a_deadline_and_a_whole_one_has_none(
    pair: tuple[Channel, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, peer = pair
    assert channel.patience_s() is None
    peer.send(b"half")
    assert channel.receive() is None
    left_s = channel.patience_s()
    assert left_s is not None
    assert 0 < left_s <= module.HALF_MESSAGE_S_MAX
    monkeypatch.setattr(module, "HALF_MESSAGE_S_MAX", 0.0)
    assert channel.patience_s() == 0
    peer.send(Message(0x666C6168, b"").encode()[4:])
    assert channel.receive() is not None
    assert channel.patience_s() is None


def test_a_flood_of_messages_ends_the_session(
    pair: tuple[Channel, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, peer = pair
    monkeypatch.setattr(module, "MESSAGES_MAX", 10)
    peer.send(Message(1).encode() * 11)
    for _ in range(10):
        assert channel.receive() is not None
    with pytest.raises(Malformed, match="more than 10 messages"):
        channel.receive()


def test_what_the_peer_does_not_take_waits_in_order_with_its_descriptors(
    pair: tuple[Channel, socket.socket],
) -> None:
    channel, peer = pair
    peer.settimeout(5)
    before = open_fds()
    sent = 0
    while len(channel._output) == 0:
        channel.send(Message(sent, bytes(4000)))
        sent += 1
    reader, writer = os.pipe()
    channel.send(Message(sent, b"last", (reader, writer)))
    assert open_fds() == before + 2

    data, fds = b"", list[int]()
    while not data.endswith(b"last"):
        part, more, _, _ = socket.recv_fds(peer, 65536, 8)
        data, fds = data + part, fds + more
        channel.flush()

    assert not channel.is_blocked
    assert [HEADER.unpack_from(data, 4012 * index)[0] for index in range(sent)] == [*range(sent)]
    assert len(fds) == 2
    close_all(tuple(fds))


def test_closing_closes_what_was_not_sent(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    while not channel.is_blocked:
        channel.send(Message(1, bytes(4000)))
    channel.send(Message(1, b"", os.pipe()))
    fds = pipes(1)
    socket.send_fds(peer, [b"half"], fds)
    assert channel.receive() is None
    close_all(tuple(fds))
    # the fixture counts
