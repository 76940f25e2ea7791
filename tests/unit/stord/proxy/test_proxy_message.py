"""The framing of the proxy: every split of the bytes, and what no peer may send."""

from __future__ import annotations

import pytest

from chv.stord.proxy.message import (
    FDS_MAX,
    GET_FEATURES,
    HEADER,
    PAYLOAD_BYTES_MAX,
    REPLY,
    Malformed,
    Message,
    Reader,
)


def feed_all(reader: Reader, data: bytes, step: int) -> list[Message]:
    """Feed in steps of at most `step` bytes, never more than the reader wants."""
    messages = []
    while data:
        size = min(step, reader.wants, len(data))
        message = reader.feed(data[:size])
        data = data[size:]
        if message is not None:
            messages.append(message)
    return messages


@pytest.mark.parametrize("step", [1, 2, 5, 11, 12, 13, 4096])
def test_messages_come_out_as_they_went_in_however_they_are_split(step: int) -> None:
    sent = [Message(1), Message(24, b"x" * 60, flags=5), Message(5, bytes(PAYLOAD_BYTES_MAX))]

    got = feed_all(Reader(), b"".join(each.encode() for each in sent), step)

    assert [(each.request, each.flags, each.payload) for each in got] == [
        (each.request, each.flags, each.payload) for each in sent
    ]


def test_descriptors_of_header_and_payload_belong_to_the_message_under_way() -> None:
    reader = Reader()
    data = Message(5, b"regions!").encode()

    assert reader.feed(data[:12], (7,)) is None
    first = reader.feed(data[12:], (8, 9))
    second = reader.feed(Message(1).encode())

    assert first is not None
    assert second is not None
    assert (first.fds, second.fds) == ((7, 8, 9), ())


def test_a_reader_never_wants_bytes_of_the_next_message() -> None:
    reader = Reader()
    assert reader.wants == HEADER.size
    reader.feed(HEADER.pack(24, 1, 60))
    assert reader.wants == 60
    reader.feed(bytes(59))
    assert reader.wants == 1
    reader.feed(b"\0")
    assert reader.wants == HEADER.size


@pytest.mark.parametrize("size", [PAYLOAD_BYTES_MAX + 1, 0xFFFFFFFF])
def test_a_payload_over_the_limit_is_refused_before_any_of_it_is_read(size: int) -> None:
    with pytest.raises(Malformed, match=str(size)):
        Reader().feed(HEADER.pack(1, 1, size))


def test_too_many_descriptors_are_refused_and_given_back_for_closing() -> None:
    reader = Reader()
    reader.feed(HEADER.pack(5, 1, 100), tuple(range(FDS_MAX)))
    with pytest.raises(Malformed, match="descriptors"):
        reader.feed(b"x", (99,))
    assert reader.drop() == (*range(FDS_MAX), 99)
    assert reader.wants == HEADER.size


def test_a_reply_is_told_from_a_request_by_its_flag() -> None:
    assert Message(GET_FEATURES, flags=1 | REPLY).is_reply(GET_FEATURES)
    assert not Message(GET_FEATURES).is_reply(GET_FEATURES)
    assert not Message(2, flags=1 | REPLY).is_reply(GET_FEATURES)
