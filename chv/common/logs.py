"""Logs: one JSON object a line on a stream, an event name and fields, no interpolation.

`setup` once a process, `get(__name__)` once a module: `log.info("vm.started", vm_id=uid)`.
Levels: error = someone must act, warning = recovered, info = life cycle, debug = the rest.
A `Secret` in any field is written as `***`. Logging never fails the caller: a line that cannot
be written is counted and reported as `dropped` in the next one that can. A log file that has the
daemon's name is rotated by size (log_rotation.py).
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import IO, Any

import msgspec

from chv.common.clock import timestamp
from chv.common.errors import ChvError
from chv.common.log_rotation import rotate_if_full

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
TEXT_CHARACTERS_MAX = 8_192
LINE_BYTES_MAX = 65_536
_ROOT = "chv"
_RESERVED = frozenset({"time", "level", "daemon", "pid", "logger", "event", "dropped"})
_operation_id: ContextVar[str] = ContextVar("operation_id", default="")

# What every record of `logging` has; anything else in one is an `extra` of its writer.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class Logger:
    """Writes events of one module; `bind` adds fields that every later event carries."""

    def __init__(self, logger: logging.Logger, fields: dict[str, object] | None = None) -> None:
        self._logger = logger
        self._fields = fields or {}

    def bind(self, **fields: object) -> Logger:
        """Return a logger that adds these fields to each of its events."""
        return Logger(self._logger, {**self._fields, **fields})

    def debug(self, event: str, **fields: object) -> None:
        """Detail for whoever searches a fault."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Life cycle."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Something went wrong and was recovered."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Someone must act."""
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, error: BaseException, **fields: object) -> None:
        """As `error`, with the traceback: for firewalls, where a bug of ours was caught."""
        trace = "".join(traceback.format_exception(error))
        # The end of a traceback says what happened; it is what a long one keeps.
        fields = {"error": error, "traceback": trace[-TEXT_CHARACTERS_MAX:], **fields}
        self._write(logging.ERROR, event, fields)

    def _write(self, level: int, event: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"chv_fields": {**self._fields, **fields}})


def get(name: str) -> Logger:
    """Return the logger of a module; names outside `chv.` are put below it."""
    inside = name == _ROOT or name.startswith(f"{_ROOT}.")
    return Logger(logging.getLogger(name if inside else f"{_ROOT}.{name}"))


@contextmanager
def operation(operation_id: str) -> Iterator[None]:
    """Let each line that is written within, and by tasks begun within, name its operation."""
    token = _operation_id.set(operation_id or _operation_id.get())
    try:
        yield
    finally:
        _operation_id.reset(token)


def setup(daemon: str, level: str = "info", stream: IO[str] | None = None) -> None:
    """Send this process's logs to `stream` (default: standard error); may be called again."""
    handler = _JsonHandler(daemon, sys.stderr if stream is None else stream)
    root = logging.getLogger()
    root.handlers = [handler]
    # Libraries speak only when something is wrong; our own level is the configured one.
    root.setLevel(logging.WARNING)
    logging.getLogger(_ROOT).setLevel(LEVELS[level])
    logging.captureWarnings(capture=True)


class _JsonHandler(logging.Handler):
    def __init__(self, daemon: str, stream: IO[str]) -> None:
        super().__init__()
        self._daemon = daemon
        self._stream = stream
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; what cannot be written is counted."""
        line = _line(self._daemon, record, self._dropped)
        try:
            self._stream.write(line)
            self._stream.flush()
        except (OSError, ValueError):  # a full disk, a gone reader, a closed stream
            self._dropped += 1
        else:
            self._dropped = 0
            self._bound()

    def _bound(self) -> None:
        # A log that cannot be rotated (a full disk) is still a log; the next line tries again.
        with suppress(OSError, ValueError):
            rotate_if_full(self._stream.fileno(), f"{self._daemon}.log")


def _line(daemon: str, record: logging.LogRecord, dropped: int) -> str:
    fields = getattr(record, "chv_fields", None)
    head: dict[str, Any] = {
        "time": timestamp(datetime.fromtimestamp(record.created, UTC)),
        "level": record.levelname.lower(),
        "daemon": daemon,
        "pid": os.getpid(),
        "logger": record.name,
        "event": _short(record.getMessage()),
    }
    if dropped:
        head["dropped"] = dropped
    if fields is None:
        fields = _foreign_fields(record)
    operation_id = _operation_id.get()
    if operation_id and "operation_id" not in fields:
        fields = {"operation_id": operation_id, **fields}
    body = {f"{key}_" if key in _RESERVED else key: _plain(fields[key]) for key in fields}
    data = msgspec.json.encode({**head, **body})
    if len(data) > LINE_BYTES_MAX:
        data = msgspec.json.encode({**head, "truncated_bytes": len(data)})
    return data.decode() + "\n"


def _foreign_fields(record: logging.LogRecord) -> dict[str, object]:
    """Return what a record of plain `logging` carries: its `extra` and its exception."""
    fields = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    if record.exc_info and record.exc_info[1] is not None:
        fields["error"] = record.exc_info[1]
        trace = "".join(traceback.format_exception(record.exc_info[1]))
        fields["traceback"] = trace[-TEXT_CHARACTERS_MAX:]
    return fields


def _plain(value: object) -> object:
    """Turn a field into plain JSON data; what has no JSON form is shown by its repr."""
    if isinstance(value, str):
        return _short(value)
    if isinstance(value, BaseException):
        return _error_fields(value)
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=_unknown)
    except (TypeError, ValueError, RecursionError):
        return _short(repr(value))


def _unknown(value: object) -> object:
    return _error_fields(value) if isinstance(value, BaseException) else _short(repr(value))


def _error_fields(error: BaseException) -> object:
    if isinstance(error, ChvError):
        return msgspec.to_builtins(error.data())
    return {"type": type(error).__name__, "message": _short(str(error))}


def _short(text: str) -> str:
    if len(text) > TEXT_CHARACTERS_MAX:
        text = text[:TEXT_CHARACTERS_MAX] + "..."
    # A lone surrogate (a file name that is not UTF-8) has no JSON form.
    return text.encode(errors="backslashreplace").decode()
