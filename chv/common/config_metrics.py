"""`[metrics]` of the configuration: where scrapes may come from, beside the Unix socket. Pure."""

from __future__ import annotations

import ipaddress
from typing import Annotated

import msgspec
from msgspec import Meta

from chv.common.errors import InvalidArgument

FIELD = "metrics.listen"


class MetricsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`listen`: `127.0.0.1:9177` or `[::1]:9177`; empty: on the Unix socket alone."""

    listen: Annotated[str, Meta(max_length=64)] = ""


def tcp_address(listen: str) -> tuple[str, int] | None:
    """Return address and port, None where there is none; raises InvalidArgument.

    Only addresses of this machine alone: there is no TLS and nobody is asked who they are.
    """
    if not listen:
        return None
    host, _, port = listen.rpartition(":")
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise _refused(listen, "is not ADDRESS:PORT") from None
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise _refused(listen, "has no port from 1 to 65535")
    if not address.is_loopback:
        raise _refused(listen, "is not a loopback address: metrics go over TCP without TLS")
    return str(address), int(port)


def _refused(listen: str, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"{listen!r} {why}",
        field=FIELD,
        hint="127.0.0.1:9177; for other machines put a proxy with TLS before it",
    )
