"""JSON-RPC 2.0 envelopes: the bytes of one frame to typed members and back. No I/O.

Two members go beyond the standard: `deadline_s` of a request (the time the caller still has) and
`fds` of a reply (how many descriptors came with it). Requests are read strictly, replies
tolerantly. Whatever bytes come in, the only error that leaves is `ChvError`.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from chv.common.errors import (
    JSONRPC_CHV_ERROR,
    JSONRPC_INTERNAL_ERROR,
    JSONRPC_INVALID_PARAMS,
    JSONRPC_INVALID_REQUEST,
    JSONRPC_METHOD_NOT_FOUND,
    JSONRPC_PARSE_ERROR,
    ChvError,
    ErrorData,
    Internal,
    InvalidArgument,
    from_data,
)
from chv.common.rpc.framing import FRAME_BYTES_MAX
from chv.common.wording import reworded

# What msgspec lets through on hostile input: too deep and too many digits are not MsgspecErrors.
DECODE_ERRORS = (msgspec.MsgspecError, RecursionError, ValueError)
DETAIL_CHARS_MAX = 300
CANCEL = "Cancel"
_EMPTY_OBJECT = Raw(b"{}")

Id = Annotated[int, Meta(ge=-(2**53), le=2**53)] | Annotated[str, Meta(max_length=64)]


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client sends. Without an id it is a notification, which never gets an answer."""

    jsonrpc: Literal["2.0"]
    method: Annotated[str, Meta(max_length=128)]
    id: Id | UnsetType = UNSET
    params: Raw = _EMPTY_OBJECT
    deadline_s: Annotated[float, Meta(ge=0)] | UnsetType = UNSET


class ErrorBody(msgspec.Struct, frozen=True):
    """The `error` member."""

    code: int
    message: str
    data: ErrorData | UnsetType = UNSET


class Incoming(msgspec.Struct, frozen=True):
    """What a server sends: a reply (`id` with `result` or `error`) or an event (`method`)."""

    id: int | str | None = None
    result: Raw | UnsetType = UNSET
    error: ErrorBody | UnsetType = UNSET
    fds: Annotated[int, Meta(ge=0)] = 0
    method: str = ""
    params: Raw | UnsetType = UNSET


class EventParams(msgspec.Struct, frozen=True):
    """`params` of an event: which call it belongs to, and the typed event."""

    id: int | str
    event: Raw


class CancelParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`params` of the one notification that a server obeys: the caller left this call."""

    id: Id


class RequestError(Exception):
    """A frame or call that gets an error reply: the JSON-RPC code, our error, the id if known."""

    def __init__(self, jsonrpc_code: int, error: ChvError, request_id: int | str | None) -> None:
        super().__init__(str(error))
        self.jsonrpc_code = jsonrpc_code
        self.error = error
        self.request_id = request_id


class _IdOnly(msgspec.Struct):
    id: Id | None = None


_request_decoder = msgspec.json.Decoder(Request)
_incoming_decoder = msgspec.json.Decoder(Incoming)
_id_decoder = msgspec.json.Decoder(_IdOnly)
_encoder = msgspec.json.Encoder()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decoder_of(type_: type[Any]) -> msgspec.json.Decoder[Any]:
    """Return the one decoder of a type; the method tables bound their number."""
    decoder = _decoders.get(type_)
    if decoder is None:
        decoder = _decoders[type_] = msgspec.json.Decoder(type_)
    return decoder


# --- requests


def encode_request(
    method: str, params: msgspec.Struct, request_id: int | None, deadline_s: float = math.inf
) -> bytes:
    """Return the frame of a call, or of a notification where `request_id` is None."""
    message: dict[str, Any] = {"jsonrpc": "2.0", "method": method, "params": params}
    if request_id is not None:
        message["id"] = request_id
    if deadline_s != math.inf:
        message["deadline_s"] = deadline_s
    return _encoder.encode(message) + b"\n"


def decode_request(frame: bytes) -> Request:
    """Return the request in `frame`, or raise the RequestError that its sender is to see."""
    if frame.lstrip()[:1] == b"[":
        error = InvalidArgument("batches are not supported", hint="send one object a line")
        raise RequestError(JSONRPC_INVALID_REQUEST, error, None)
    try:
        return _request_decoder.decode(frame)
    except msgspec.ValidationError as error:
        wrong = _invalid("not a JSON-RPC 2.0 request", error)
        raise RequestError(JSONRPC_INVALID_REQUEST, wrong, _salvage_id(frame)) from error
    except DECODE_ERRORS as error:
        raise RequestError(JSONRPC_PARSE_ERROR, _invalid("not JSON", error), None) from error


def _salvage_id(frame: bytes) -> int | str | None:
    """Return the id of a frame that is wrong elsewhere, so that its sender learns of it."""
    try:
        return _id_decoder.decode(frame).id
    except DECODE_ERRORS:
        return None


def decode_params(type_: type[Any], request: Request) -> Any:
    """Return the typed params of `request`, or raise RequestError naming the field at fault."""
    try:
        return decoder_of(type_).decode(request.params)
    except DECODE_ERRORS as error:
        wrong = _invalid(f"params of {request.method}", error)
        request_id = None if isinstance(request.id, UnsetType) else request.id
        raise RequestError(JSONRPC_INVALID_PARAMS, wrong, request_id) from error


_PATH = re.compile(r" - at `\$?\.?(?P<path>[^`]*)`$")
_FIELD = re.compile(r"(?:unknown|missing required) field `(?P<name>[^`]*)`")


def _invalid(what: str, error: Exception) -> InvalidArgument:
    """Turn a decoder's complaint into ours, with the path in `field`."""
    if isinstance(error, RecursionError):
        return InvalidArgument(f"{what}: nested too deeply")
    text = reworded(str(error))[:DETAIL_CHARS_MAX]
    at = _PATH.search(text)
    named = _FIELD.search(text)
    parts = [at["path"] if at else "", named["name"] if named else ""]
    reason = text[: at.start()] if at else text
    return InvalidArgument(f"{what}: {reason}", field=".".join(part for part in parts if part))


# --- replies and events


def encode_result(request_id: int | str, result: msgspec.Struct, fds: int = 0) -> bytes:
    """Return the frame of a successful reply."""
    message: dict[str, Any] = {"jsonrpc": "2.0", "id": request_id, "result": result}
    if fds:
        message["fds"] = fds
    return _encoder.encode(message) + b"\n"


def encode_error(
    request_id: int | str | None, error: ChvError, jsonrpc_code: int | None = None
) -> bytes:
    """Return the frame of an error reply; id None speaks of the connection as a whole."""
    if jsonrpc_code is None:
        internal = isinstance(error, Internal)
        jsonrpc_code = JSONRPC_INTERNAL_ERROR if internal else JSONRPC_CHV_ERROR
    body = ErrorBody(jsonrpc_code, error.message, error.data())
    frame = _encoder.encode({"jsonrpc": "2.0", "id": request_id, "error": body}) + b"\n"
    if len(frame) > FRAME_BYTES_MAX:
        short = type(error)(f"{error.message[:DETAIL_CHARS_MAX]}...")
        return encode_error(request_id, short, jsonrpc_code)
    return frame


def encode_event(event_name: str, request_id: int | str, event: Any) -> bytes:
    """Return the frame of one notification of a running call."""
    params = {"id": request_id, "event": event}
    return _encoder.encode({"jsonrpc": "2.0", "method": event_name, "params": params}) + b"\n"


def decode_incoming(frame: bytes) -> Incoming:
    """Return what a server sent; raise Internal when it is not JSON-RPC."""
    message: Incoming = _decode_from_server(_incoming_decoder, frame, "frame")
    return message


def decode_event(params: Raw | UnsetType) -> EventParams:
    """Return the members of an event notification."""
    raw = _EMPTY_OBJECT if isinstance(params, UnsetType) else params
    event: EventParams = _decode_from_server(decoder_of(EventParams), raw, "event")
    return event


def decode_typed(type_: type[Any], raw: Raw | UnsetType, what: str) -> Any:
    """Return a result or an event as its declared type."""
    body = _EMPTY_OBJECT if isinstance(raw, UnsetType) else raw
    return _decode_from_server(decoder_of(type_), body, what)


def _decode_from_server(decoder: msgspec.json.Decoder[Any], body: bytes | Raw, what: str) -> Any:
    try:
        return decoder.decode(body)
    except DECODE_ERRORS as error:
        detail = str(error)[:DETAIL_CHARS_MAX]
        raise Internal(f"the server's {what} cannot be read: {detail}") from error


def error_of(body: ErrorBody) -> ChvError:
    """Rebuild the error of a reply. A peer that sends no `data` still gets a typed error."""
    if not isinstance(body.data, UnsetType):
        return from_data(body.data)
    if body.code in (JSONRPC_INVALID_PARAMS, JSONRPC_INVALID_REQUEST, JSONRPC_PARSE_ERROR):
        return InvalidArgument(body.message)
    if body.code == JSONRPC_METHOD_NOT_FOUND:
        return from_data(ErrorData("UNSUPPORTED", body.message))
    return Internal(body.message)
