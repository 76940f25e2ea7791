"""Waiting for operations, with a line per step for people."""

from __future__ import annotations

import re

from chv.cli.output import note
from chv.common.errors import DeadlineExceeded, Internal, InvalidArgument, from_data
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire.agent import WAIT_OPERATION, Operation, OperationState, WaitOperation

_DURATION = re.compile(r"^(\d+(?:\.\d+)?)(ms|s|m|h)\Z")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
WAIT_S_MAX = 3600.0


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
    request = WaitOperation(operation_id=operation_id, timeout_s=timeout_s)
    try:
        operation = client.call(WAIT_OPERATION, request, timeout_s=timeout_s + 5).operation
    except DeadlineExceeded as error:
        raise DeadlineExceeded(
            f"{operation_id} is still running after {timeout_s:g} s",
            hint=f"it goes on; see `chv ops show {operation_id}`",
        ) from error
    if operation.state is OperationState.FAILED:
        if operation.error is not None:
            raise from_data(operation.error)
        raise Internal(f"{operation.id} failed: {operation.message}")
    return operation


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
