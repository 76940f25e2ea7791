"""What is said once more to the next storage daemon, and when that would not do."""

from __future__ import annotations

import struct

import pytest

from chv.stord.proxy import prelude
from chv.stord.proxy.message import (
    GET_FEATURES,
    REPLY,
    SET_CONFIG,
    SET_PROTOCOL_FEATURES,
    VERSION,
    Message,
)
from chv.stord.proxy.prelude import Prelude

SET_BACKEND_REQ_FD = 21
U32, U64 = struct.Struct("<II"), struct.Struct("<Q")


def reply(request: int, payload: bytes = b"") -> Message:
    return Message(request, payload, flags=VERSION | REPLY)


def introduced() -> Prelude:
    """A VMM that has made its handshake."""
    said = Prelude()
    said.said(Message(prelude.SET_OWNER))
    said.said(Message(GET_FEATURES))
    said.answered(reply(GET_FEATURES))
    said.said(Message(prelude.SET_FEATURES, b"a" * 8))
    said.said(Message(SET_PROTOCOL_FEATURES, b"b" * 8))
    said.said(Message(SET_CONFIG, b"c"))
    return said


def again(said: Prelude) -> list[tuple[int, bytes]]:
    return [(each.request, each.payload) for each in said.again()]


def kept(said: Prelude) -> bool:
    return said.is_all


def start(said: Prelude, *rings: int) -> None:
    said.said(Message(prelude.SET_MEM_TABLE, b"", (3,)))
    for ring in rings:
        said.said(Message(prelude.SET_VRING_NUM, U32.pack(ring, 128)))
        said.said(Message(prelude.SET_VRING_CALL, U64.pack(ring), (4,)))
        said.said(Message(prelude.SET_VRING_KICK, U64.pack(ring), (5,)))


def stop(said: Prelude, ring: int) -> None:
    said.said(Message(prelude.GET_VRING_BASE, U32.pack(ring, 0)))
    said.answered(reply(prelude.GET_VRING_BASE, U32.pack(ring, 7)))


def test_settings_are_said_again_in_their_order_and_questions_that_were_answered_are_not() -> None:
    said = introduced()
    assert kept(said)
    assert again(said) == [
        (prelude.SET_OWNER, b""),
        (prelude.SET_FEATURES, b"a" * 8),
        (SET_PROTOCOL_FEATURES, b"b" * 8),
        (SET_CONFIG, b"c"),
    ]


def test_the_latest_of_a_setting_counts() -> None:
    said = introduced()
    said.said(Message(prelude.SET_FEATURES, b"z" * 8))
    assert again(said)[1] == (prelude.SET_FEATURES, b"z" * 8)


def test_a_question_that_is_open_is_asked_again() -> None:
    said = introduced()
    said.said(Message(prelude.GET_QUEUE_NUM))
    assert again(said)[-1] == (prelude.GET_QUEUE_NUM, b"")


def test_an_acknowledgement_is_asked_for_again_only_where_it_has_not_come() -> None:
    said, flags = introduced(), VERSION | prelude.NEED_REPLY
    said.said(Message(prelude.SET_FEATURES, b"z" * 8, flags=flags))
    assert [each.flags for each in said.again()] == [VERSION] * 4 + [flags]
    said.answered(reply(prelude.SET_FEATURES))
    assert [each.flags for each in said.again()] == [VERSION] * 4


def test_a_vmm_whose_rings_run_is_not_kept_until_all_of_them_have_stopped() -> None:
    said = introduced()
    start(said, 0, 1)
    assert not kept(said)
    stop(said, 0)
    assert not kept(said)
    stop(said, 1)
    assert kept(said)
    assert len(again(said)) == 4


def test_a_ring_that_is_being_stopped_still_runs() -> None:
    said = introduced()
    start(said, 0)
    said.said(Message(prelude.GET_VRING_BASE, U32.pack(0, 0)))
    assert not kept(said)


@pytest.mark.parametrize("request_number", [prelude.SET_VRING_CALL, SET_BACKEND_REQ_FD])
def test_a_vmm_that_hands_over_descriptors_before_it_starts_is_never_kept(
    request_number: int,
) -> None:
    said = introduced()
    said.said(Message(request_number, U64.pack(0), (3,)))
    assert not kept(said)
    start(said, 0)
    stop(said, 0)
    assert not kept(said)
