"""Waiting for operations, with a line per step for people."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from chv.cli.output import note
from chv.common.errors import DeadlineExceeded, Internal, InvalidArgument, from_data
from chv.common.quantity import format_bytes
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire.agent import (
    GET_OPERATION,
    WAIT_OPERATION,
    Operation,
    OperationRef,
    OperationReply,
    OperationState,
    WaitOperation,
)

_DURATION = re.compile(r"^(\d+(?:\.\d+)?)(ms|s|m|h)\Z")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
WAIT_S_MAX = 3600.0
PROGRESS_S = 1.0
LINE_MAX = 100


def seconds(text: str, field: str = "--timeout") -> float:
    """Return a duration such as `90s` or `5m` in seconds."""
    match = _DURATION.match(text)
    if not match:
        raise InvalidArgument(f"{text!r} is not a duration", field=field, hint="write 90s or 5m")
    value = float(match[1]) * _UNIT_S[match[2]]
    if not 0 < value <= WAIT_S_MAX:
        raise InvalidArgument(f"{text!r} is not between 1ms and 1h", field=field)
    return value


def wait(client: BlockingClient, operation_id: str, timeout_s: float) -> Operation:
    """Return the final operation; raises what it failed with, or DeadlineExceeded."""
    operation = final(client, operation_id, timeout_s)
    if operation.state in (OperationState.FAILED, OperationState.CANCELLED):
        if operation.error is not None:
            raise from_data(operation.error)
        if operation.state is OperationState.FAILED:
            raise Internal(f"{operation.id} failed: {operation.message}")
    return operation


def final(client: BlockingClient, operation_id: str, timeout_s: float) -> Operation:
    """Return the operation once it has ended, however; how far it is is shown meanwhile.

    Interrupted, it says that the operation goes on.
    """
    deadline = time.monotonic() + timeout_s
    line = ProgressLine()
    try:
        with going_on(lambda: operation_id):
            return _until_final(client, operation_id, deadline, line)
    finally:
        line.clear()


def _until_final(
    client: BlockingClient, operation_id: str, deadline: float, line: ProgressLine
) -> Operation:
    began = time.monotonic()
    while True:
        rest_s = max(0.01, deadline - time.monotonic())
        slice_s = min(rest_s, PROGRESS_S) if line.shown_to_a_person else rest_s
        request = WaitOperation(operation_id=operation_id, timeout_s=slice_s)
        try:
            return client.call(WAIT_OPERATION, request, timeout_s=slice_s + 5).operation
        except DeadlineExceeded as error:
            if time.monotonic() >= deadline:
                raise _late(client, operation_id, deadline - began) from error
        line.show(client.call(GET_OPERATION, OperationRef(operation_id=operation_id)))


@contextmanager
def going_on(operation_id: Callable[[], str]) -> Iterator[None]:
    """Say on an interruption that the operation, where there is one by then, goes on."""
    try:
        yield
    except KeyboardInterrupt:
        if known := operation_id():
            note(f"\n{known} goes on; `chv ops cancel {known}` asks for its end")
        raise


def how_far(operation: Operation) -> str:
    """Return how far an operation is and what it waits for: `40%`, `queue 2`; '' if not known."""
    words = []
    if operation.queue is not None:
        words.append(f"queue {operation.queue.position}, for {operation.queue.waits_for}")
    known = operation.progress
    if known is not None and known.unit != "bytes":
        words.append(f"{known.done} of {known.total} {known.unit}")
    elif known is not None:
        words.append(_bytes(known.done, known.total))
    return "; ".join(words)


def _bytes(done: int, total: int) -> str:
    if not total:
        return f"{done >> 20} MiB"
    return f"{100 * done // total}% of {format_bytes(total)}"


def _late(client: BlockingClient, operation_id: str, timeout_s: float) -> DeadlineExceeded:
    """Return the error of a wait that is over, with what the operation waits for itself."""
    reply = client.call(GET_OPERATION, OperationRef(operation_id=operation_id))
    said = reply.operation.message
    return DeadlineExceeded(
        f"{operation_id} is still running after {timeout_s:g} s" + (f": {said}" if said else ""),
        hint=f"it goes on; see `chv ops show {operation_id}`",
    )


class ProgressLine:
    """One line on a terminal, written over and over; nothing where nobody looks."""

    def __init__(self) -> None:
        self.shown_to_a_person = sys.stderr.isatty()
        self._width = 0

    def show(self, reply: OperationReply) -> None:
        """Show how far an operation is."""
        operation = reply.operation
        said = operation.message or operation.state.lower()
        far = how_far(operation)
        text = f"{operation.verb} {far + ': ' if far else ''}{said}"[:LINE_MAX]
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)

    def clear(self) -> None:
        """Take the line away."""
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
            self._width = 0


def label(kind: str, name: str, namespace: str) -> str:
    """Return how an object is named to people: the namespace only where it is not the default."""
    where = "" if namespace == "default" else f"{namespace}/"
    return f"{kind}/{where}{name}"


def announce(operation: Operation) -> None:
    """Tell how a final operation went."""
    target = label(operation.kind, operation.name, operation.namespace)
    state = "done" if operation.state is OperationState.SUCCEEDED else operation.state.lower()
    detail = f": {operation.message}" if operation.message else ""
    note(f"{target} {operation.verb} {state}{detail}")
