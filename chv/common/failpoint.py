"""Failpoints: named places where a test build can kill, stop, delay or fail the process.

`await failpoint("agent.vm.spawn.after")` is a no-op unless `CHV_FAILPOINTS` (what to do) or
`CHV_FAILPOINTS_LOG` (a file to which hit names are appended) is set, and both are honoured only
with `CHV_TEST_BUILD=1`: otherwise `require_allowed()` at start-up, and at the latest the first
failpoint, raises. Grammar, several separated by `;`:

    name=[COUNT*]ACTION[->[COUNT*]ACTION]...      2*off->1*kill

Actions: `off`; `kill` (SIGKILL to this process); `exit` or `exit(STATUS)` (at once, no clean-up);
`error(EIO)` (an OSError) or `error(UNAVAILABLE)` (our error of that code); `delay(MS)`; `hang`.
An action without a count is for ever; after the last counted one the point is off.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import anyio

from chv.common.errors import ERRORS_BY_CODE, ChvError, FailedPrecondition, InvalidArgument

EXIT_STATUS = 70
COUNT_MAX = 1_000_000
_TERM = re.compile(r"(?:(\d{1,7})\*)?(off|kill|exit|error|delay|hang)(?:\(([A-Za-z0-9_]+)\))?\Z")
_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+\Z")
_HINT = "NAME=[COUNT*]off|kill|exit|error(EIO)|delay(MS)|hang, joined by -> and ;"


@dataclass
class _Term:
    left: int | None  # None: for ever
    action: str
    argument: str


_enabled = False
_refusal: ChvError | None = None
_log_path = ""
_points: dict[str, list[_Term]] = {}
_hits: Counter[str] = Counter()
_lock = threading.Lock()


async def failpoint(name: str) -> None:
    """Do here what the configuration says for `name`; normally nothing."""
    if not _enabled:
        return
    term = _hit(name)
    if term is None:
        return
    if term.action == "hang":
        await anyio.sleep_forever()
    elif term.action == "delay":
        await anyio.sleep(int(term.argument) / 1000)
    else:
        _strike(name, term)


def failpoint_sync(name: str) -> None:
    """Do the same in a thread or in synchronous code, where `hang` and `delay` block."""
    if not _enabled:
        return
    term = _hit(name)
    if term is None:
        return
    if term.action == "hang":
        threading.Event().wait()
    elif term.action == "delay":
        time.sleep(int(term.argument) / 1000)
    else:
        _strike(name, term)


def configure(text: str, *, log_path: str = "") -> None:
    """Switch failpoints on with the terms of `text`; an empty text only counts the hits."""
    global _enabled, _log_path, _points
    points = _parse(text)
    with _lock:
        _hits.clear()
        _points, _log_path, _enabled = points, log_path, True


def reset() -> None:
    """Switch everything off and forget the hits."""
    global _enabled, _log_path, _points, _refusal
    with _lock:
        _hits.clear()
        _points, _log_path, _enabled, _refusal = {}, "", False, None


def hits() -> dict[str, int]:
    """Return how often each point was passed since `configure`."""
    with _lock:
        return dict(_hits)


def require_allowed() -> None:
    """Raise where the environment asks for failpoints and may not; daemons call it first."""
    if _refusal is not None:
        raise _refusal


def from_environment(environ: Mapping[str, str]) -> None:
    """Take over what the environment asks for; done once for the process's own at import."""
    global _enabled, _refusal
    text, log_path = environ.get("CHV_FAILPOINTS", ""), environ.get("CHV_FAILPOINTS_LOG", "")
    if not text and not log_path:
        return
    try:
        if environ.get("CHV_TEST_BUILD") != "1":
            raise FailedPrecondition(
                "CHV_FAILPOINTS is set in something that is not a test build",
                field="CHV_FAILPOINTS",
                hint="unset it, or set CHV_TEST_BUILD=1 too on a machine that holds nothing dear",
            )
        configure(text, log_path=log_path)
    except ChvError as error:
        # An import must not fail: whoever starts asks require_allowed(), which can explain.
        _enabled, _refusal = True, error


def _hit(name: str) -> _Term | None:
    require_allowed()
    with _lock:
        _hits[name] += 1
        term = _next_term(_points.get(name, []))
    if _log_path:
        _append_hit(name)
    return None if term is None or term.action == "off" else term


def _next_term(terms: list[_Term]) -> _Term | None:
    for term in terms:
        if term.left is None:
            return term
        if term.left > 0:
            term.left -= 1
            return term
    return None


def _append_hit(name: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    log = os.open(_log_path, flags, 0o600)
    try:
        os.write(log, f"{name}\n".encode())
    finally:
        os.close(log)


def _strike(name: str, term: _Term) -> None:
    if term.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if term.action == "exit":
        os._exit(int(term.argument or EXIT_STATUS))
    number = getattr(errno, term.argument, None)
    if number is not None:
        raise OSError(number, os.strerror(number), f"failpoint {name}")
    raise ERRORS_BY_CODE[term.argument](f"failpoint {name}")


def _parse(text: str) -> dict[str, list[_Term]]:
    points: dict[str, list[_Term]] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, terms = entry.partition("=")
        if not equals or not _NAME.match(name) or name in points:
            raise _malformed(entry)
        points[name] = [_parse_term(term.strip()) for term in terms.split("->")]
    return points


def _parse_term(text: str) -> _Term:
    match = _TERM.match(text)
    if match is None:
        raise _malformed(text)
    count, action, argument = match.group(1), match.group(2), match.group(3) or ""
    if not _argument_fits(action, argument) or int(count or 0) > COUNT_MAX:
        raise _malformed(text)
    return _Term(left=None if count is None else int(count), action=action, argument=argument)


def _argument_fits(action: str, argument: str) -> bool:
    if action == "error":
        known = isinstance(getattr(errno, argument, None), int)
        return known or argument in ERRORS_BY_CODE
    if action == "delay":
        return argument.isascii() and argument.isdigit() and len(argument) <= 7
    if action == "exit":
        return not argument or (argument.isdigit() and int(argument) <= 255)
    return not argument


def _malformed(text: str) -> InvalidArgument:
    return InvalidArgument(
        f"{text[:80]!r} is not a failpoint term", field="CHV_FAILPOINTS", hint=_HINT
    )


from_environment(os.environ)
