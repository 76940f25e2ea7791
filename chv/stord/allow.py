"""What a volume may lie on: allowlists of devices, volume groups and servers. Pure.

An empty list allows nothing. A refusal is PermissionDenied with the line of the configuration
that would allow it; a text that no list could ever allow is InvalidArgument.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from chv.common.errors import InvalidArgument, PermissionDenied
from chv.common.names import shown
from chv.common.wire.stord import IscsiPlace, LvmPlace, NbdPlace, RbdPlace

ANY_REST = "*"
Remote = NbdPlace | IscsiPlace | RbdPlace
DEVICES = PurePosixPath("/dev")


def check_device(names: Iterable[PurePosixPath], allowed: Sequence[str]) -> None:
    """Refuse a device none of whose names (as given, and resolved) is allowed."""
    given = list(names)
    for name in given:
        check_name(name)
    if not any(_matches(name, pattern) for name in given for pattern in allowed):
        raise _refused(str(given[0]), "storage.allowed_devices", "backend.block.device")


def check_name(name: PurePosixPath) -> None:
    """Refuse a name that cannot be one of a device."""
    if not name.is_relative_to(DEVICES) or ".." in name.parts:
        raise InvalidArgument(
            f"{shown(str(name))} is not a name below {DEVICES}", field="backend.block.device"
        )


def _matches(name: PurePosixPath, pattern: str) -> bool:
    """A trailing `*` stands for any rest of the last component, never for a further one."""
    if not pattern.endswith(ANY_REST):
        return str(name) == pattern
    start = pattern.removesuffix(ANY_REST)
    return str(name).startswith(start) and "/" not in str(name)[len(start) :]


def check_volume_group(place: LvmPlace, allowed: Sequence[str]) -> None:
    """Refuse a volume group that is not listed."""
    if place.volume_group not in allowed:
        raise _refused(place.volume_group, "storage.volume_groups", "backend.lvm.volume_group")


def check_remote(place: Remote, allowed: Sequence[str]) -> None:
    """Refuse a server, target or pool that is not listed."""
    remote = remote_of(place)
    if remote.lower() not in (entry.lower() for entry in allowed):
        kind = remote.partition(":")[0].partition("+")[0]
        raise _refused(remote, "storage.remotes", f"backend.{kind}")


def remote_of(place: Remote) -> str:
    """Return how `storage.remotes` writes where the bytes are; it names the server in errors."""
    match place:
        case NbdPlace(socket=socket) if socket:
            return f"nbd+unix://{socket}"
        case NbdPlace(host=host, port=port):
            return f"nbd://{host_and_port(host, port)}"
        case IscsiPlace(host=host, port=port, target=target):
            return f"iscsi://{host_and_port(host, port)}/{target}"
        case RbdPlace(pool=pool):
            return f"rbd://{pool}"


def host_and_port(host: str, port: int) -> str:
    """Return `host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _refused(name: str, setting: str, field: str) -> PermissionDenied:
    return PermissionDenied(
        f"{shown(name)} is not allowed on this node",
        field=field,
        hint=f"add {name!r} to {setting} in the configuration of this node",
    )
