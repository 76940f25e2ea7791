"""Idempotency-Keys: a repeated request is answered with what the first one was answered.

`digest` tells what was asked, the key apart: another request under a known key is refused.
"""

from __future__ import annotations

import hashlib

import msgspec

from chv.agent.ledger import Ledger
from chv.agent.records import Change, PutRequest, RequestRow
from chv.common.errors import Conflict


def digest(*parts: str | bytes) -> str:
    """Return what tells one request from another."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "big"))
        found.update(data)
    return found.hexdigest()


def digest_of(verb: str, request: msgspec.Struct) -> str:
    """Return the digest of a request that carries its key: under another key it is the same."""
    return digest(verb, msgspec.json.encode(msgspec.structs.replace(request, idempotency_key="")))


async def recorded(ledger: Ledger, key: str, asked: str) -> RequestRow | None:
    """Return the first request under this key, None without one; Conflict: it asked otherwise."""
    if not key:
        return None
    known = await ledger.store.request(key)
    if known is not None and known.digest != asked:
        raise Conflict(
            f"the key {key!r} was used for another request",
            field="idempotency_key",
            hint="use a new key for a new request",
        )
    return known


def remembered(key: str, asked: str, reply: msgspec.Struct) -> list[Change]:
    """Return what keeps the answer, to be stored with what the request changes."""
    if not key:
        return []
    body = msgspec.json.encode(reply)
    return [PutRequest(request=RequestRow(key=key, digest=asked, reply=body))]


async def remember(ledger: Ledger, key: str, asked: str, reply: msgspec.Struct) -> None:
    """Keep the answer of a request that joined another one; the caller holds `writing`."""
    changes = remembered(key, asked, reply)
    if changes:
        await ledger.commit_held(*changes)
