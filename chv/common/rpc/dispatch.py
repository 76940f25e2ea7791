"""From a request to its handler and back to a reply, with every rule that stands between.

The order: known method, caller's uid, recovery gate, params, slot, deadline. No sockets here.
Whatever a handler raises becomes an error reply; only what must end the daemon (not an
`Exception`) passes.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import anyio
import anyio.lowlevel
from msgspec import UnsetType

from chv.common import logs
from chv.common.errors import (
    JSONRPC_METHOD_NOT_FOUND,
    Cancelled,
    ChvError,
    DeadlineExceeded,
    Internal,
    OutcomeUnknown,
    PermissionDenied,
    Unavailable,
    Unsupported,
)
from chv.common.rpc.channel import Peer, close_fds
from chv.common.rpc.envelope import (
    Request,
    RequestError,
    decode_params,
    encode_error,
    encode_event,
    encode_result,
)
from chv.common.rpc.framing import FRAME_BYTES_MAX
from chv.common.rpc.method import Method, R

log = logging.getLogger("chv.rpc")
Handler = Callable[..., Awaitable[Any]]
Send = Callable[[bytes], Awaitable[None]]
Stamp = Callable[[Any, Peer], Any]  # parameters with what only the server knows of the caller
STREAMS_MAX = 256


@dataclass(frozen=True)
class WithFds(Generic[R]):
    """A result with descriptors. They are the server's from the return on: sent, then closed."""

    result: R
    fds: Sequence[int]


@dataclass(frozen=True)
class Call:
    """One call of one peer: how to reach the peer, and how to stop the call."""

    request_id: int | str
    peer: Peer
    send: Send
    scope: anyio.CancelScope


@dataclass(frozen=True)
class CallContext:
    """What a handler may want to know about its call beyond the params."""

    method: Method[Any, Any]
    call: Call

    @property
    def peer(self) -> Peer:
        """The caller, told by the kernel."""
        return self.call.peer

    @property
    def peer_uid(self) -> int:
        """Uid of the caller."""
        return self.call.peer.uid

    @property
    def peer_pid(self) -> int:
        """Pid that the caller had when it connected; it may be another process by now."""
        return self.call.peer.pid

    async def emit(self, event: Any) -> None:
        """Send one event of this call. Waits for a slow reader, which is cut off in the end."""
        assert self.method.events, f"{self.method.name} declares no events"
        assert isinstance(event, self.method.events), f"{self.method.name} emits {type(event)}"
        frame = encode_event(self.method.event_name, self.call.request_id, event)
        assert len(frame) <= FRAME_BYTES_MAX, f"event of {self.method.name} is {len(frame)} bytes"
        await self.call.send(frame)
        await anyio.lowlevel.checkpoint()


@dataclass
class Answer:
    """The frame of a reply and the descriptors that go with it."""

    frame: bytes
    fds: Sequence[int] = ()


@dataclass
class Entry:
    """One served method."""

    method: Method[Any, Any]
    handler: Handler
    during_recovery: bool
    wants_context: bool
    uids: frozenset[int] | None = None


def wants_context(handler: Handler) -> bool:
    """Whether `handler` takes a CallContext after the params."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(handler).parameters.values()
    return sum(parameter.kind in kinds for parameter in parameters) >= 2


@dataclass
class Dispatcher:
    """The served methods and the limits that all connections share."""

    name: str
    calls_max: int
    entries: dict[str, Entry] = field(default_factory=dict)
    recovering: str | None = None
    stamp: Stamp | None = None

    def __post_init__(self) -> None:
        self._call_slots = anyio.Semaphore(self.calls_max, fast_acquire=True)
        # Apart, so that watchers who stay for hours cannot use up the slots of ordinary calls.
        self._stream_slots = anyio.Semaphore(STREAMS_MAX, fast_acquire=True)

    def admit(self, request: Request, request_id: int | str, peer: Peer) -> Entry:
        """Return the entry that serves `request`, or raise RequestError."""
        entry = self.entries.get(request.method)
        if entry is None:
            unknown = Unsupported(f"{self.name} has no method {request.method!r}", field="method")
            raise RequestError(JSONRPC_METHOD_NOT_FOUND, unknown, request_id)
        if entry.uids is not None and peer.uid not in entry.uids:
            raise PermissionDenied(f"uid {peer.uid} may not call {request.method}")
        if self.recovering is not None and not entry.during_recovery:
            raise Unavailable(f"recovering: {self.recovering}", resource=self.name)
        return entry

    async def answer(self, request: Request, call: Call) -> Answer:
        """Return the reply to `request`; never raises an Exception."""
        try:
            entry = self.admit(request, call.request_id, call.peer)
            params = decode_params(entry.method.params, request)
            if self.stamp is not None:
                params = self.stamp(params, call.peer)
            result = await self._logged(entry, params, call, _budget_s(entry, request))
            return _success(entry.method, call.request_id, result)
        except RequestError as error:
            return Answer(encode_error(call.request_id, error.error, error.jsonrpc_code))
        except Exception as error:  # noqa: BLE001  the firewall: no handler harms the server
            known = self._for_the_wire(request.method, error)
            return Answer(encode_error(call.request_id, known))

    async def _logged(self, entry: Entry, params: Any, call: Call, budget_s: float) -> Any:
        """Run, and log what a call in the name of an operation came to."""
        operation_id = getattr(getattr(params, "meta", None), "operation_id", "")
        if not operation_id:
            return await self._run(entry, params, call, budget_s)
        began_s, outcome = anyio.current_time(), "cancelled"
        try:
            with logs.operation(operation_id):
                result = await self._run(entry, params, call, budget_s)
            outcome = "done"
        except Exception as error:
            known = _only_chv_error(error)
            outcome = str(known.code) if known is not None else "INTERNAL"
            raise
        finally:
            taken_ms = round((anyio.current_time() - began_s) * 1000, 3)
            extra = {"method": entry.method.name, "operation_id": operation_id, "outcome": outcome}
            log.info("rpc.done", extra={**extra, "duration_ms": taken_ms})
        return result

    async def _run(self, entry: Entry, params: Any, call: Call, budget_s: float) -> Any:
        slots = self._stream_slots if entry.method.events else self._call_slots
        started = False
        deadline = call.scope.deadline = anyio.current_time() + budget_s
        with call.scope:
            async with slots:
                started = True
                if entry.wants_context:
                    return await entry.handler(params, CallContext(entry.method, call))
                return await entry.handler(params)
        if anyio.current_time() < deadline:
            raise Cancelled(f"{entry.method.name} was stopped: its caller left")
        text = f"{entry.method.name} was not done within {budget_s:g} s"
        if started and entry.method.mutating:
            raise OutcomeUnknown(text, hint="observe, then decide")
        raise DeadlineExceeded(text)

    def _for_the_wire(self, method: str, error: Exception) -> ChvError:
        """Return the error that the caller is told; what is not ours is logged and kept here."""
        known = _only_chv_error(error)
        if known is not None:
            return known
        log.exception(
            "rpc.handler_failed", exc_info=error, extra={"server": self.name, "method": method}
        )
        return Internal(f"{method} failed inside {self.name}", hint="see the daemon's log")


def _budget_s(entry: Entry, request: Request) -> float:
    """Return the caller's remaining time or the method's own limit, whichever is less."""
    if isinstance(request.deadline_s, UnsetType):
        return entry.method.timeout_s
    return min(entry.method.timeout_s, request.deadline_s)


def _only_chv_error(error: BaseException) -> ChvError | None:
    """Return the ChvError that `error` is; of a task group's, the first if there are no others."""
    if isinstance(error, BaseExceptionGroup):
        leaves = [_only_chv_error(leaf) for leaf in error.exceptions]
        return leaves[0] if all(leaves) else None
    return error if isinstance(error, ChvError) else None


def _success(method: Method[Any, Any], request_id: int | str, result: Any) -> Answer:
    """Encode a handler's result, or raise Internal when it is not what the table promises."""
    fds: Sequence[int] = ()
    if isinstance(result, WithFds):
        result, fds = result.result, result.fds
    try:
        assert isinstance(result, method.result), f"{method.name} returned {type(result)}"
        assert len(fds) <= method.fds, f"{method.name} returned {len(fds)} descriptors"
        frame = encode_result(request_id, result, len(fds))
        assert len(frame) <= FRAME_BYTES_MAX, f"{method.name} returned {len(frame)} bytes"
    except BaseException:
        close_fds(fds)
        raise
    return Answer(frame, fds)
