"""Forwarding in the host's namespace: switched on when it is needed, put back afterwards.

What was before is noted first, so that a kill anywhere forgets nothing. Forwarding is not put back
while somebody else may rely on it. IPv6 forwarding is not switched on where the host has routes
from router advertisements, which it would then stop taking: `Host.check` tells. Blocking: call in
a thread. Settings that cannot be written stay as they are; that is told by `Host.check` as well.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from chv.common.errors import ChvError
from chv.nwd import runfiles
from chv.nwd.kernel import links, routes, sysctl
from chv.nwd.settings import IP6_FORWARD, IP_FORWARD

ON = "1"
_CONF = Path("/proc/sys/net")
_SWITCHES = {4: IP_FORWARD, 6: IP6_FORWARD}
NOTES = {4: "host-forwarding4.json", 6: "host-forwarding6.json"}
# Written by the kernel along with the switch of IPv4.
_FOLLOWS = {4: ("net.ipv4.conf.all.accept_redirects",), 6: ()}
ALIAS_PREFIX = "chv:1:"


def is_on(version: int) -> bool:
    """Tell whether the host forwards packets of a family."""
    return sysctl.read(_SWITCHES[version]) == ON


def switch_on(directory: Path, version: int) -> None:
    """Switch it on, having noted what to put back."""
    if is_on(version) or (version == 6 and advertised()):
        return
    path = directory / NOTES[version]
    if not path.exists():
        runfiles.replace(path, msgspec.json.encode(_before(version)).decode(), 0)
    with contextlib.suppress(ChvError):  # told by Host.check, which reads it back
        sysctl.write({_SWITCHES[version]: ON})


def advertised() -> list[str]:
    """Return the links of the host that have routes from router advertisements."""
    found = {route.link for route in routes.read() if route.is_advertised}
    ignoring = {
        link.name: sysctl.read(f"net.ipv6.conf.{link.name}.accept_ra")
        for link in links.read_all().values()
        if link.index in found
    }
    return sorted(name for name, value in ignoring.items() if value == ON)


def is_noted(directory: Path, version: int) -> bool:
    """Tell whether there is something to put back."""
    return (directory / NOTES[version]).exists()


def is_shared(own_prefix: str) -> bool:
    """Tell whether another instance of ours has links here; `own_prefix` is of our own aliases."""
    aliases = (link.alias for link in links.read_all().values())
    return any(
        alias.startswith(ALIAS_PREFIX) and not alias.startswith(own_prefix) for alias in aliases
    )


def restore(directory: Path, version: int) -> None:
    """Put back what was, in the order that was noted."""
    path = directory / NOTES[version]
    with contextlib.suppress(msgspec.MsgspecError):  # half a note: nothing that we could put back
        sysctl.write(msgspec.json.decode(runfiles.read(path), type=dict[str, str]))
    forget(directory, version)


def forget(directory: Path, version: int) -> None:
    """Leave it as it is for good."""
    (directory / NOTES[version]).unlink(missing_ok=True)


def _before(version: int) -> dict[str, str]:
    """Return the switch, what follows it, and the links that forward already."""
    names = [_SWITCHES[version], *_FOLLOWS[version]]
    values = {name: sysctl.read(name) for name in names}
    for path in sorted((_CONF / f"ipv{version}/conf").glob("*/forwarding")):
        if path.read_text().strip() == ON:
            values[f"net.ipv{version}.conf.{path.parent.name}.forwarding"] = ON
    return values
