"""Long lists in pages, each well below the length of a frame. Order and place are by a text key.

A page begins behind the key that the caller gives, so what comes or goes between two pages neither
hides nor doubles anything else. `next` is the key to go on from, empty at the end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import msgspec

from chv.common.rpc import Method
from chv.common.wire.types import ListPage, PageReply

PAGE_BYTES_MAX = 512 << 10  # half a frame: one item more always fits
T = TypeVar("T")
P = TypeVar("P", bound=ListPage)
R = TypeVar("R", bound=PageReply)
Call = Callable[[Any, Any], Awaitable[Any]]


def page(keyed: Iterable[tuple[str, T]], after: str) -> tuple[list[T], str]:
    """Return the items behind `after` that fit, and the key to go on from; `keyed` is sorted."""
    found: list[T] = []
    size, last = 0, ""
    for key, item in keyed:
        if key <= after:
            continue
        if size >= PAGE_BYTES_MAX:
            return found, last
        found.append(item)
        size += len(item) if isinstance(item, msgspec.Raw) else len(msgspec.json.encode(item))
        last = key
    return found, ""


async def whole(call: Call, method: Method[P, R], request: P, *fields: str) -> R:
    """Return the reply of a listing method with the items of every page in `fields`."""
    reply: R = await call(method, request)
    while reply.next:
        reply = _joined(reply, await call(method, _behind(request, reply)), fields)
    return reply


def whole_blocking(
    call: Callable[[Any, Any], Any], method: Method[P, R], request: P, *fields: str
) -> R:
    """Do the same with a client that blocks."""
    reply: R = call(method, request)
    while reply.next:
        reply = _joined(reply, call(method, _behind(request, reply)), fields)
    return reply


def _behind(request: P, reply: PageReply) -> P:
    return msgspec.structs.replace(request, after=reply.next)


def _joined(reply: R, more: R, fields: Iterable[str]) -> R:
    items = {field: [*getattr(reply, field), *getattr(more, field)] for field in fields}
    return msgspec.structs.replace(reply, **items, next=more.next)
