"""What Cloud Hypervisor says when it refuses, turned into errors of ours.

A body is an array of messages, the root cause last (from v47 on), plain text (before), or, from
the protocol layer, an object whose text holds a raw line feed. A message may carry a backtrace.
Callers tell cases apart by status and by class, never by text; what was said is logged whole.
"""

from __future__ import annotations

import json
import re

from chv.common import logs
from chv.common.errors import (
    ChvError,
    Conflict,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unsupported,
)
from chv.vmm.cloud_hypervisor.http import PROTOCOL_SERVER, Response

CAUSE_CHARS_MAX = 400
BODY_CHARS_LOGGED_MAX = 16_384
NO_ROUTE = ("Not Found",)

_BACKTRACE = re.compile(r"\n+\s*(?:stack backtrace:|\d+: ).*", re.DOTALL | re.IGNORECASE)
_log = logs.get("vmm.cloud-hypervisor")


class NoVm(NotFound):
    """The VMM has no VM, or no device of that id."""


class NoRoute(Unsupported):
    """This version or build does not have the call."""


class Busy(Unavailable):
    """An earlier change is still pending in the guest."""


class Refused(FailedPrecondition):
    """The VMM understood the request and did not do it. `chain`: its messages, root cause last."""

    chain: tuple[str, ...] = ()


def messages(body: bytes) -> tuple[str, ...]:
    """Return what a body says, outermost first, root cause last, without backtraces."""
    text = body.decode(errors="replace").strip()
    try:
        said = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        said = text
    if isinstance(said, dict):
        said = said.get("error", text)
    parts = said if isinstance(said, list) else [said]
    plain = (_BACKTRACE.sub("", str(part)).strip() for part in parts)
    return tuple(" ".join(part.split()) for part in plain if part)


def _cause(chain: tuple[str, ...]) -> str:
    """Return the root cause, which may be no more than "Permission denied", and what it spoilt."""
    *outer, cause = chain or ("no reason given",)
    where = f" ({outer[-1]})" if outer and outer[-1] not in cause else ""
    return f"{cause}{where}"[:CAUSE_CHARS_MAX]


def refusal(call: str, response: Response) -> ChvError:
    """Return the error for an answer that is no success, and log all that was said."""
    chain = messages(response.body)
    said = response.body.decode(errors="replace")[:BODY_CHARS_LOGGED_MAX]
    tell = _log.debug if response.status in (404, 429) else _log.warning
    tell("ch.refused", call=call, status=response.status, said=said)
    text = f"Cloud Hypervisor refuses {call}: {_cause(chain)}"
    if response.status == 400 and response.server == PROTOCOL_SERVER:
        return Internal(f"{text} (malformed request)")
    match response.status:
        case 404 if chain == NO_ROUTE:
            return NoRoute(f"this Cloud Hypervisor has no {call}", field="spec.vmm")
        case 404:
            return NoVm(text)
        case 400:
            return InvalidArgument(text)
        case 409:
            return Conflict(text)
        case 429:
            return Busy(text)
        case 503:
            return Unavailable(text, hint="something else holds connections to its API socket")
    refused = Refused(text)
    refused.chain = chain
    return refused
