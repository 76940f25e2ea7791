"""Which versions of the protocol two of our processes have in common. Pure.

A daemon that outlived an upgrade of its peer, or came with one, is refused by name at the first
call, on both sides: what would go wrong later would go wrong half-way.
"""

from __future__ import annotations

from collections.abc import Iterable

from chv.common.errors import FailedPrecondition
from chv.common.wire.types import PROTOCOL_VERSIONS, HelloReply, HelloRequest


class Incompatible(FailedPrecondition):
    """The two have no version of the protocol in common; no retry cures that."""


def common_version(request: HelloRequest, supported: Iterable[int] = PROTOCOL_VERSIONS) -> int:
    """Return the newest version that the caller and we speak; Incompatible where there is none."""
    shared = set(request.versions).intersection(supported)
    if not shared:
        raise Incompatible(
            f"{request.client or 'the caller'} speaks protocol {_listed(request.versions)},"
            f" this one {_listed(supported)}",
            field="versions",
            hint="restart what is older, so that both are of one release",
        )
    return max(shared)


def check_reply(reply: HelloReply, supported: Iterable[int] = PROTOCOL_VERSIONS) -> None:
    """Raise Incompatible where the daemon answered in a version that we do not speak."""
    if reply.protocol not in supported:
        raise Incompatible(
            f"chv-{reply.daemon} {reply.version} speaks protocol {reply.protocol},"
            f" this one {_listed(supported)}",
            resource=f"daemon/{reply.daemon}",
            hint="restart what is older, so that both are of one release",
        )


def _listed(versions: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(versions)))) or "none"
