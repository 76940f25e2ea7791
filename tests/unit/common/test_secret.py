"""Secrets: no text form shows them, no serializer takes them."""

from __future__ import annotations

import copy
import pickle

import msgspec
import pytest

from chv.common.secret import Secret

CANARY = "hunter2-canary"


def test_no_text_form_shows_the_value() -> None:
    secret = Secret(CANARY)
    texts = [
        repr(secret),
        str(secret),
        f"{secret}",
        f"{secret!r:>9}",
        repr([secret]),
        "{}".format(secret),  # noqa: UP032  the old ways must hide it too
    ]
    assert not any(CANARY in text for text in texts)
    assert str(secret) == "***"


def test_reveal_returns_the_bytes() -> None:
    assert Secret(CANARY).reveal() == CANARY.encode()
    assert Secret(b"\0\xff").reveal() == b"\0\xff"


def test_equal_secrets_are_equal_and_never_equal_to_plain_text() -> None:
    assert Secret("a") == Secret("a")
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"


def test_a_secret_does_not_serialize() -> None:
    with pytest.raises(TypeError):
        msgspec.json.encode(Secret(CANARY))
    with pytest.raises(TypeError):
        pickle.dumps(Secret(CANARY))
    with pytest.raises(TypeError):
        copy.copy(Secret(CANARY))


def test_a_secret_is_no_key() -> None:
    with pytest.raises(TypeError):
        hash(Secret(CANARY))
