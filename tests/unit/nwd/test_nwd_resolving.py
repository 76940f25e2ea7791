"""Answers of a DNS that anybody may have written."""

from __future__ import annotations

import random
import struct

import pytest

from chv.nwd.resolving import answers, query

A, AAAA = 1, 28


def answer(*records: tuple[int, bytes], flags: int = 0x8180, question: int = A) -> bytes:
    head = struct.pack("!HHHHHH", question, flags, 1, len(records), 0, 0)
    body = query("web.net.test", question)[12:]
    for kind, content in records:
        body += b"\xc0\x0c" + struct.pack("!HHIH", kind, 1, 60, len(content)) + content
    return head + body


def test_a_question_is_for_one_name_and_kind() -> None:
    assert query("web.net.test", A) == (
        b"\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00"
        b"\x03web\x03net\x04test\x00\x00\x01\x00\x01"
    )


def test_addresses_are_read_and_aliases_passed_over() -> None:
    data = answer((5, b"\x03web\xc0\x10"), (A, bytes((10, 7, 0, 2))), (A, bytes((10, 7, 0, 3))))
    assert answers(data, A) == ["10.7.0.2", "10.7.0.3"]
    six = answer((AAAA, bytes(15) + b"\x01"), question=AAAA)
    assert answers(six, AAAA) == ["::1"]


@pytest.mark.parametrize("flags", [0x0100, 0x8183, 0x8182])
def test_a_question_or_a_refusal_holds_no_address(flags: int) -> None:
    assert answers(answer((A, bytes(4)), flags=flags), A) == []


@pytest.mark.parametrize("content", [b"", b"\x01", bytes(5)])
def test_an_address_of_a_wrong_length_is_none(content: bytes) -> None:
    assert answers(answer((A, content)), A) == []


def test_whatever_comes_is_no_error_and_ends() -> None:
    chance = random.Random(7)
    whole = answer((A, bytes(4)), (5, b"\xc0\x0c"), (A, bytes(4)))
    for _ in range(2000):
        data = bytearray(whole[: chance.randrange(len(whole) + 1)])
        for _ in range(chance.randrange(4)):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
        for found in answers(bytes(data), A):
            assert found.count(".") == 3
