"""Envelopes: what goes in comes out, and hostile bytes raise nothing but the named error."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chv.common.errors import (
    ERRORS_BY_CODE,
    ChvError,
    Internal,
    InvalidArgument,
    OutcomeUnknown,
    Unavailable,
    Unsupported,
)
from chv.common.rpc import FRAME_BYTES_MAX, envelope
from chv.common.rpc.envelope import (
    ErrorBody,
    RequestError,
    decode_event,
    decode_incoming,
    decode_params,
    decode_request,
    decode_typed,
    encode_error,
    encode_event,
    encode_request,
    encode_result,
    error_of,
)
from tests.unit.common.rpc.sample_api import Nested, Ping, Pong, Tick

texts = st.text(st.characters(codec="utf-8"), max_size=40)
ids = st.one_of(st.integers(-(2**53), 2**53), st.text(st.characters(codec="utf-8"), max_size=64))


def body_of(frame: bytes) -> bytes:
    """Take the newline off, which must be the only one."""
    assert frame.count(b"\n") == 1
    assert frame.endswith(b"\n")
    return frame[:-1]


@settings(max_examples=200)
@given(texts, st.integers(0, 2**53), st.integers(0, 2**40), st.floats(0, 1e6))
def test_request_round_trip(text: str, call_id: int, n: int, deadline_s: float) -> None:
    frame = encode_request("Get", Ping(n=n, text=text), call_id, deadline_s)
    request = decode_request(body_of(frame))
    assert (request.method, request.id, request.deadline_s) == ("Get", call_id, deadline_s)
    assert decode_params(Ping, request) == Ping(n=n, text=text)
    assert json.loads(frame)["jsonrpc"] == "2.0"


def test_request_without_limit_names_no_deadline_and_notification_no_id() -> None:
    assert set(json.loads(encode_request("Get", Ping(), 1))) == {
        "jsonrpc",
        "method",
        "params",
        "id",
    }
    assert set(json.loads(encode_request("Get", Ping(), None))) == {"jsonrpc", "method", "params"}


@settings(max_examples=200)
@given(ids, st.integers(0, 2**53), texts, st.integers(0, 5))
def test_result_round_trip(call_id: int | str, n: int, text: str, fds: int) -> None:
    reply = decode_incoming(body_of(encode_result(call_id, Pong(n=n, text=text), fds)))
    assert (reply.id, reply.fds, reply.error) == (call_id, fds, msgspec.UNSET)
    assert decode_typed(Pong, reply.result, "reply") == Pong(n=n, text=text)


@settings(max_examples=200)
@given(ids, st.integers(0, 2**53))
def test_event_round_trip(call_id: int | str, n: int) -> None:
    message = decode_incoming(body_of(encode_event("Watch/event", call_id, Tick(n=n))))
    assert (message.method, message.id) == ("Watch/event", None)
    event = decode_event(message.params)
    assert event.id == call_id
    assert decode_typed(Tick, event.event, "event") == Tick(n=n)


@pytest.mark.parametrize("error_type", ERRORS_BY_CODE.values())
def test_every_error_keeps_its_class_and_members(error_type: type[ChvError]) -> None:
    sent = error_type("message", resource="vm/a", field="spec.x", hint="do y")
    reply = decode_incoming(body_of(encode_error(7, sent)))
    assert isinstance(reply.error, ErrorBody)
    got = error_of(reply.error)
    assert type(got) is error_type
    assert got.data() == sent.data()


def test_error_without_id_is_about_the_connection() -> None:
    frame = encode_error(None, Unavailable("x"))
    assert json.loads(frame)["id"] is None


def test_error_text_over_the_limit_is_cut_so_that_the_reply_can_be_read() -> None:
    frame = encode_error(1, OutcomeUnknown("x" * (FRAME_BYTES_MAX + 1), hint="y"))
    assert len(frame) < 1000
    assert json.loads(frame)["error"]["data"]["code"] == "OUTCOME_UNKNOWN"


@pytest.mark.parametrize(
    ("code", "expected"),
    [(-32700, InvalidArgument), (-32602, InvalidArgument), (-32601, Unsupported), (-1, Internal)],
)
def test_error_of_a_peer_without_data_is_typed_by_its_number(
    code: int, expected: type[ChvError]
) -> None:
    assert type(error_of(ErrorBody(code, "m"))) is expected


def test_reply_of_a_newer_server_may_have_more_members() -> None:
    reply = decode_incoming(b'{"jsonrpc":"2.0","id":1,"result":{"n":1,"new":2},"more":3}')
    assert decode_typed(Pong, reply.result, "reply") == Pong(n=1)


@pytest.mark.parametrize(
    ("frame", "code", "request_id", "text"),
    [
        (b"", -32700, None, "not JSON"),
        (b"{", -32700, None, "not JSON"),
        (b"\xff", -32700, None, "not JSON"),
        (b'{"jsonrpc":"2.0","method":"Get"}{}', -32700, None, "not JSON"),
        (b"[" * 100_000, -32600, None, "batches"),
        (b' [{"jsonrpc":"2.0","method":"Get","id":1}]', -32600, None, "batches"),
        (b'{"params":' + b'{"a":' * 100_000, -32700, None, "nested too deeply"),
        (b"3", -32600, None, "not a JSON-RPC 2.0 request"),
        (b"{}", -32600, None, "missing required field"),
        (b'{"method":"Get","id":5}', -32600, 5, "jsonrpc"),
        (b'{"jsonrpc":"1.0","method":"Get","id":"a"}', -32600, "a", "jsonrpc"),
        (b'{"jsonrpc":"2.0","method":"Get","id":5,"extra":1}', -32600, 5, "extra"),
        (b'{"jsonrpc":"2.0","method":"Get","id":1.5}', -32600, None, "id"),
        (b'{"jsonrpc":"2.0","method":"Get","id":null}', -32600, None, "id"),
        (b'{"jsonrpc":"2.0","method":"Get","id":' + b"9" * 400 + b"}", -32600, None, "id"),
        (b'{"jsonrpc":"2.0","method":"Get","id":' + b"9" * 5000 + b"}", None, None, ""),
        (b'{"jsonrpc":"2.0","method":"Get","id":1,"deadline_s":-1}', -32600, 1, "deadline_s"),
        (b'{"jsonrpc":"2.0","method":"' + b"m" * 129 + b'","id":1}', -32600, 1, "method"),
    ],
)
def test_bad_request_is_refused_with_its_reason(
    frame: bytes, code: int | None, request_id: int | str | None, text: str
) -> None:
    with pytest.raises(RequestError) as caught:
        decode_request(frame)
    assert isinstance(caught.value.error, InvalidArgument)
    assert text in str(caught.value.error)
    assert caught.value.request_id == request_id
    assert code is None or caught.value.jsonrpc_code == code


@pytest.mark.parametrize(
    ("type_", "params", "field"),
    [
        (Ping, '{"n":"1"}', "n"),
        (Ping, '{"m":1}', "m"),
        (Pong, "{}", "n"),
        (Nested, '{"inner":[{"n":1},{"n":true}]}', "inner[1].n"),
        (Nested, '{"inner":[{"z":1}]}', "inner[0].z"),
        (Ping, "[]", ""),
        (Ping, '{"n":' + "9" * 6000 + "}", None),
        (Ping, '{"n":' + '{"a":' * 200 + "1" + "}" * 201, "n"),
    ],
)
def test_bad_params_name_the_field(type_: Any, params: str, field: str | None) -> None:
    frame = '{"jsonrpc":"2.0","id":3,"method":"Get","params":' + params + "}"
    with pytest.raises(RequestError) as caught:
        decode_params(type_, decode_request(frame.encode()))
    assert caught.value.error.code == "INVALID_ARGUMENT"
    if field is not None:
        assert caught.value.error.field == field
        assert (caught.value.jsonrpc_code, caught.value.request_id) == (-32602, 3)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["jsonrpc", "id", "method", "params", "result", "error", "fds", "n"]),
            inner | st.sampled_from(["2.0", "Get"]),
            max_size=6,
        )
    ),
    max_leaves=12,
)
frames = st.binary(max_size=60) | json_like.map(lambda value: json.dumps(value).encode())


@settings(max_examples=500)
@given(frames)
def test_any_bytes_are_a_request_or_a_named_error(frame: bytes) -> None:
    try:
        request = decode_request(frame)
        decode_params(Ping, request)
    except RequestError as error:
        assert encode_error(error.request_id, error.error, error.jsonrpc_code)


@settings(max_examples=500)
@given(frames)
def test_any_bytes_from_a_server_are_a_message_or_internal(frame: bytes) -> None:
    try:
        message = decode_incoming(frame)
        decode_typed(Pong, message.result, "reply")
        decode_event(message.params)
    except Internal as error:
        assert "cannot be read" in error.message


def test_lone_surrogate_in_a_request_does_not_break_its_answer() -> None:
    frame = b'{"jsonrpc":"2.0","id":"\\ud800","method":"Get","params":{"text":"\\udfff"}}'
    try:
        request_id = decode_request(frame).id
    except RequestError as error:
        assert encode_error(error.request_id, error.error, error.jsonrpc_code)
    else:
        assert not isinstance(request_id, msgspec.UnsetType)
        assert encode_result(request_id, Pong(n=1))


def test_decoders_are_made_once() -> None:
    assert envelope.decoder_of(Ping) is envelope.decoder_of(Ping)
