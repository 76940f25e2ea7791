"""What the proxy changes: one bit of one reply, and the write cache of a fresh export."""

from __future__ import annotations

import struct

import pytest

from chv.stord.proxy.message import (
    GET_CONFIG,
    GET_PROTOCOL_FEATURES,
    REPLY,
    SET_CONFIG,
    SET_PROTOCOL_FEATURES,
    U64,
    Malformed,
    Message,
)
from chv.stord.proxy.rewrite import PROTOCOL_CONFIG, PROTOCOL_INFLIGHT, Rewriter, WriteCache

ANSWER = 1 | REPLY


def set_config(offset: int, data: bytes) -> Message:
    return Message(SET_CONFIG, struct.pack("<III", offset, len(data), 0) + data)


def sent(rewriter: Rewriter, message: Message) -> list[tuple[int, bytes]]:
    return [(each.request, each.payload) for each in rewriter.to_backend(message)]


def test_the_inflight_bit_is_added_to_what_the_storage_daemon_offers() -> None:
    offered = Message(GET_PROTOCOL_FEATURES, U64.pack(0x2BF), (5,), ANSWER)

    told = Rewriter(WriteCache()).to_vmm(offered)

    assert U64.unpack(told.payload)[0] == 0x2BF | PROTOCOL_INFLIGHT
    assert (told.request, told.flags, told.fds) == (GET_PROTOCOL_FEATURES, ANSWER, (5,))


@pytest.mark.parametrize("request_number", [1, 11, 24, 31, 36])
def test_every_other_reply_passes_as_it_is(request_number: int) -> None:
    message = Message(request_number, U64.pack(7), flags=ANSWER)
    assert Rewriter(WriteCache()).to_vmm(message) is message


def test_the_write_cache_is_set_once_and_before_the_config_can_be_read() -> None:
    rewriter = Rewriter(WriteCache())
    prime = (SET_CONFIG, struct.pack("<III", 32, 1, 0) + b"\1")
    get = Message(GET_CONFIG, bytes(72))

    assert sent(rewriter, get) == [prime, (GET_CONFIG, bytes(72))]
    assert sent(rewriter, get) == [(GET_CONFIG, bytes(72))]


def test_a_vmm_that_reads_no_config_after_a_reconnect_has_it_set_all_the_same() -> None:
    chosen = Message(SET_PROTOCOL_FEATURES, U64.pack(PROTOCOL_CONFIG | PROTOCOL_INFLIGHT))
    requests = [each[0] for each in sent(Rewriter(WriteCache()), chosen)]
    assert requests == [SET_PROTOCOL_FEATURES, SET_CONFIG]
    unable = Message(SET_PROTOCOL_FEATURES, U64.pack(PROTOCOL_INFLIGHT))
    assert [each[0] for each in sent(Rewriter(WriteCache()), unable)] == [SET_PROTOCOL_FEATURES]


@pytest.mark.parametrize(
    ("message", "value"),
    [
        (set_config(32, b"\0"), 0),
        (set_config(0, bytes(60)), 0),
        (set_config(32, b"\1"), 1),
        (set_config(33, b"\0"), 1),
        (set_config(0, bytes(32)), 1),
        (Message(SET_CONFIG, b"short"), 1),
        (Message(SET_CONFIG, struct.pack("<III", 32, 1, 0)), 1),
        (Message(SET_CONFIG, struct.pack("<III", 0, 0xFFFFFFFF, 0) + b"\0"), 1),
    ],
)
def test_what_the_guest_chose_is_set_in_the_next_session(message: Message, value: int) -> None:
    cache = WriteCache()
    assert Rewriter(cache).to_backend(message) == [message]
    prime = Rewriter(cache).to_backend(Message(GET_CONFIG))[0]
    assert prime.payload[-1] == value


@pytest.mark.parametrize("payload", [b"", bytes(7), bytes(9)])
def test_features_of_another_size_end_the_session(payload: bytes) -> None:
    with pytest.raises(Malformed):
        Rewriter(WriteCache()).to_vmm(Message(GET_PROTOCOL_FEATURES, payload, flags=ANSWER))
    with pytest.raises(Malformed):
        Rewriter(WriteCache()).to_backend(Message(SET_PROTOCOL_FEATURES, payload))
