"""The steps of a plan, as data. Pure: `plan` makes them, `apply` does them, each idempotent."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from functools import cache

from chv.nwd.shaping import UNSHAPED, Shaping

_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")


class Place(enum.Enum):
    """Where a link is."""

    INNER = "inner"  # the network's namespace
    HOST = "host"


@dataclass(frozen=True, slots=True)
class WantedLink:
    """A link as it should be; the empty values mean that it does not matter."""

    name: str
    kind: str
    alias: str = ""
    mac: str = ""
    mtu: int = 0
    master: str = ""
    isolated: bool = False
    owner_uid: int = -1
    addresses: frozenset[str] = frozenset()
    proxied: str = ""  # of a tap: what the bridge answers neighbour solicitations for
    queues: int = 1  # of a tap
    shaping: Shaping = UNSHAPED


@dataclass(frozen=True, slots=True)
class MakeNetns:
    """Make the namespace."""


@dataclass(frozen=True, slots=True)
class SetSysctls:
    """Set the kernel settings of the namespace, or those of the host's end of the uplink."""

    place: Place = Place.INNER


@dataclass(frozen=True, slots=True)
class DeleteLink:
    """Remove a link."""

    place: Place
    name: str


@dataclass(frozen=True, slots=True)
class MakeBridge:
    """Make the bridge."""

    link: WantedLink


@dataclass(frozen=True, slots=True)
class MakeUplink:
    """Make both ends of the uplink."""

    host: WantedLink
    inner: WantedLink


@dataclass(frozen=True, slots=True)
class MakeTap:
    """Make a tap, or give it another owner."""

    link: WantedLink


@dataclass(frozen=True, slots=True)
class DropIdleTap:
    """Remove a tap that must be made anew; not while a VMM holds it."""

    name: str


@dataclass(frozen=True, slots=True)
class SetShape:
    """Limit what passes a tap, each way by itself."""

    name: str
    shaping: Shaping


@dataclass(frozen=True, slots=True)
class ClearShape:
    """Let everything pass a tap unlimited again; its ifb goes."""

    name: str
    ifb: str


@dataclass(frozen=True, slots=True)
class ChangeLink:
    """Make the attributes of a link right: MAC, MTU, alias, master."""

    place: Place
    link: WantedLink


@dataclass(frozen=True, slots=True)
class IsolatePort:
    """Let a port of the bridge speak to the bridge alone, or to the other ports as well."""

    name: str
    isolated: bool = True


@dataclass(frozen=True, slots=True)
class LinkUp:
    """Take a link into use."""

    place: Place
    name: str


@dataclass(frozen=True, slots=True)
class AddAddress:
    """Give a link an address."""

    place: Place
    name: str
    cidr: str


@dataclass(frozen=True, slots=True)
class DeleteAddress:
    """Take an address from a link."""

    place: Place
    name: str
    cidr: str


@dataclass(frozen=True, slots=True)
class SetDefaultRoute:
    """Make the host's end of the uplink the way out, for the family of its address."""

    gateway: str


@dataclass(frozen=True, slots=True)
class AddRoute:
    """Let the host route what belongs to the network to its end of the uplink."""

    name: str
    target: str
    gateway: str


@dataclass(frozen=True, slots=True)
class DeleteRoute:
    """Take such a route away."""

    name: str
    target: str
    gateway: str


@dataclass(frozen=True, slots=True)
class AddProxy:
    """Let the bridge answer neighbour solicitations for a guest."""

    address: str


@dataclass(frozen=True, slots=True)
class DeleteProxy:
    """Let it answer for that address no longer."""

    address: str


@dataclass(frozen=True, slots=True)
class LoadRules:
    """Bring the namespace's rules up to date, in one transaction."""


@dataclass(frozen=True, slots=True)
class WriteFiles:
    """Write the files that dnsmasq reads."""


@dataclass(frozen=True, slots=True)
class StopDns:
    """End a dnsmasq that has another configuration or is in the wrong place."""


@dataclass(frozen=True, slots=True)
class StartDns:
    """Start a dnsmasq."""


@dataclass(frozen=True, slots=True)
class TellDns:
    """Let dnsmasq read its files again."""


@dataclass(frozen=True, slots=True)
class RemoveNetns:
    """Remove the namespace and with it all that is in it."""


@dataclass(frozen=True, slots=True)
class RemoveFiles:
    """Remove the network's directory."""


PathStep = SetDefaultRoute | AddRoute | DeleteRoute | AddProxy | DeleteProxy
Step = (
    MakeNetns
    | SetSysctls
    | DeleteLink
    | MakeBridge
    | MakeUplink
    | MakeTap
    | DropIdleTap
    | SetShape
    | ClearShape
    | ChangeLink
    | IsolatePort
    | LinkUp
    | AddAddress
    | DeleteAddress
    | SetDefaultRoute
    | AddRoute
    | DeleteRoute
    | AddProxy
    | DeleteProxy
    | LoadRules
    | WriteFiles
    | StopDns
    | StartDns
    | TellDns
    | RemoveNetns
    | RemoveFiles
)


def step_name(step: Step) -> str:
    """Return `make_netns` for MakeNetns: the name in logs and failpoints."""
    return _words(type(step).__name__)


@cache
def _words(name: str) -> str:
    return _WORD.sub("_", name).lower()
