"""The one error tree of CHV, a class per code, and its mapping to JSON-RPC and exit codes.

Callers branch on the class, never on the text. `message` names the value that was wrong,
`field` the path to it (`spec.memory`), `hint` what to do instead. Nothing here does I/O.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

# JSON-RPC 2.0 reserves -32768..-32000; everything of ours is one number, the code is in `data`.
JSONRPC_PARSE_ERROR = -32700
JSONRPC_INVALID_REQUEST = -32600
JSONRPC_METHOD_NOT_FOUND = -32601
JSONRPC_INVALID_PARAMS = -32602
JSONRPC_INTERNAL_ERROR = -32603
JSONRPC_CHV_ERROR = -32000


class ErrorData(msgspec.Struct, frozen=True, omit_defaults=True):
    """`error.data` of a JSON-RPC error, and the shape in which errors are stored and shown."""

    code: str
    message: str
    resource: str = ""
    field: str = ""
    hint: str = ""
    retriable: bool = False


class ChvError(Exception):
    """Base of every error that crosses a boundary. `retriable`: the same call may work later."""

    code: ClassVar[str] = "INTERNAL"
    retriable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 70

    def __init__(
        self, message: str, *, resource: str = "", field: str = "", hint: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.resource = resource
        self.field = field
        self.hint = hint

    def data(self) -> ErrorData:
        """Return the wire form."""
        return ErrorData(
            code=self.code,
            message=self.message,
            resource=self.resource,
            field=self.field,
            hint=self.hint,
            retriable=self.retriable,
        )

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        subject = f"{self.resource}: " if self.resource else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{subject}{where}{self.message}{hint}"


class InvalidArgument(ChvError):
    """The request itself is wrong, whatever the state of the world."""

    code = "INVALID_ARGUMENT"
    exit_code = 2


class Unauthenticated(ChvError):
    """The caller is not known."""

    code = "UNAUTHENTICATED"
    exit_code = 77


class PermissionDenied(ChvError):
    """The caller is known and may not do this."""

    code = "PERMISSION_DENIED"
    exit_code = 77


class NotFound(ChvError):
    """No such object."""

    code = "NOT_FOUND"
    exit_code = 4


class AlreadyExists(ChvError):
    """An object of that name is there and is not the one asked for."""

    code = "ALREADY_EXISTS"
    exit_code = 5


class Conflict(ChvError):
    """Compare-and-set failed, or another operation holds the object."""

    code = "CONFLICT"
    exit_code = 5


class StaleGeneration(ChvError):
    """A newer generation of the object is already known."""

    code = "STALE_GENERATION"
    exit_code = 5


class InUse(ChvError):
    """Something else still needs the object."""

    code = "IN_USE"
    exit_code = 5


class Unsupported(ChvError):
    """This node, VMM or backend cannot do it; nothing was changed."""

    code = "UNSUPPORTED"
    exit_code = 6


class FailedPrecondition(ChvError):
    """Right request, wrong state of the object or node."""

    code = "FAILED_PRECONDITION"
    exit_code = 6


class ResourceExhausted(ChvError):
    """Out of space, memory, addresses, descriptors or slots."""

    code = "RESOURCE_EXHAUSTED"
    retriable = True
    exit_code = 8


class OwnershipConflict(ChvError):
    """The thing exists and belongs to somebody else; it was not touched."""

    code = "OWNERSHIP_CONFLICT"
    exit_code = 5


class Unavailable(ChvError):
    """The other side is not there or still recovering."""

    code = "UNAVAILABLE"
    retriable = True
    exit_code = 69


class DeadlineExceeded(ChvError):
    """Time ran out before the effect was applied."""

    code = "DEADLINE_EXCEEDED"
    retriable = True
    exit_code = 9


class OutcomeUnknown(ChvError):
    """The request may or may not have been applied: observe, then decide. Never retry blindly."""

    code = "OUTCOME_UNKNOWN"
    exit_code = 10


class Cancelled(ChvError):
    """Stopped on request before it was done."""

    code = "CANCELLED"
    exit_code = 130


class DataLoss(ChvError):
    """Data is gone or unreadable; a person must look."""

    code = "DATA_LOSS"
    exit_code = 11


class Internal(ChvError):
    """A bug of ours."""

    code = "INTERNAL"
    exit_code = 70


ERRORS_BY_CODE: dict[str, type[ChvError]] = {
    error.code: error
    for error in (
        InvalidArgument,
        Unauthenticated,
        PermissionDenied,
        NotFound,
        AlreadyExists,
        Conflict,
        StaleGeneration,
        InUse,
        Unsupported,
        FailedPrecondition,
        ResourceExhausted,
        OwnershipConflict,
        Unavailable,
        DeadlineExceeded,
        OutcomeUnknown,
        Cancelled,
        DataLoss,
        Internal,
    )
}


def from_data(data: ErrorData) -> ChvError:
    """Rebuild the error that `data` describes; a code we do not know becomes `Internal`."""
    error = ERRORS_BY_CODE.get(data.code, Internal)
    return error(data.message, resource=data.resource, field=data.field, hint=data.hint)


def condition_reason(code: str) -> str:
    """Return the Kubernetes condition reason of a code: `IN_USE` becomes `InUse`."""
    return "".join(word.capitalize() for word in code.split("_"))
