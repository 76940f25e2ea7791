"""Which steps bring a network from what is observed to what is desired. Pure.

A plan is complete: applied to the observed world in order it reaches the desired one, and the plan
of that is empty. Remove before add; rules stand before any port comes up; files are written before
dnsmasq is told. What is in the namespace is ours alone, so a link that nobody wants is removed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

LOOPBACK, BRIDGE, UPLINK = "lo", "br0", "up0"


class Place(enum.Enum):
    """Where a link is."""

    INNER = "inner"  # the network's namespace
    HOST = "host"


class NetnsState(enum.Enum):
    """What stands under the namespace's name."""

    ABSENT = "absent"
    DEBRIS = "debris"
    PRESENT = "present"


class DnsState(enum.Enum):
    """How the recorded dnsmasq is."""

    NONE = "none"  # none recorded
    DEAD = "dead"
    ALIVE = "alive"
    MISPLACED = "misplaced"  # alive, in a namespace that is not this one
    UNKNOWN = "unknown"  # cannot tell: never start a second one


@dataclass(frozen=True, slots=True)
class SeenLink:
    """A link as observed."""

    kind: str
    mac: str = ""
    mtu: int = 0
    up: bool = False
    alias: str = ""
    master: str = ""
    isolated: bool = False
    owner_uid: int = -1
    addresses: frozenset[str] = frozenset()


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


@dataclass(frozen=True, slots=True)
class DesiredNetwork:
    """Everything that makes a network, its NICs included."""

    bridge: WantedLink
    uplink: WantedLink | None  # in the namespace
    host_uplink: WantedLink | None
    host_name: str  # of the host's end, wanted or not
    default_gateway: str
    taps: tuple[WantedLink, ...]
    rules: str  # digests
    files: str
    configuration: str


@dataclass(frozen=True, slots=True)
class ObservedNetwork:
    """What is there. `files`, `told`, `rules`: digests, empty where unknown."""

    netns: NetnsState = NetnsState.ABSENT
    sysctls_right: bool = False
    links: Mapping[str, SeenLink] = field(default_factory=dict)
    host_uplink: SeenLink | None = None
    default_gateway: str = ""
    rules: str = ""
    files: str = ""
    told: str = ""  # what dnsmasq has read
    dns: DnsState = DnsState.NONE
    dns_configuration: str = ""
    dns_bridge: int = 0  # number of the bridge that it is bound to
    bridge: int = 0  # number of the one that is there


@dataclass(frozen=True, slots=True)
class MakeNetns:
    """Make the namespace."""


@dataclass(frozen=True, slots=True)
class SetSysctls:
    """Set the namespace's kernel settings."""


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
class ChangeLink:
    """Make the attributes of a link right: MAC, MTU, alias, master."""

    place: Place
    link: WantedLink


@dataclass(frozen=True, slots=True)
class IsolatePort:
    """Let a port of the bridge speak to the bridge alone."""

    name: str


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
    """Make the host's end of the uplink the way out."""

    gateway: str


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


Step = (
    MakeNetns
    | SetSysctls
    | DeleteLink
    | MakeBridge
    | MakeUplink
    | MakeTap
    | ChangeLink
    | IsolatePort
    | LinkUp
    | AddAddress
    | DeleteAddress
    | SetDefaultRoute
    | LoadRules
    | WriteFiles
    | StopDns
    | StartDns
    | TellDns
    | RemoveNetns
    | RemoveFiles
)


def plan_network(desired: DesiredNetwork, observed: ObservedNetwork) -> list[Step]:
    """Return every step that is left."""
    return [
        *_namespace(observed),
        *_unwanted(desired, observed),
        *_base(desired, observed),
        *_rules(desired, observed),
        *_into_use(desired, observed),
        *(step for tap in desired.taps for step in plan_tap(tap, observed.links.get(tap.name))),
        *plan_dns(desired, observed),
    ]


def plan_nic(desired: DesiredNetwork, observed: ObservedNetwork, tap: str) -> list[Step]:
    """Return the steps that concern one NIC, in a network that is otherwise right."""
    seen = observed.links.get(tap)
    wanted = next((link for link in desired.taps if link.name == tap), None)
    steps: list[Step] = []
    if wanted is None and seen is not None:
        steps.append(DeleteLink(Place.INNER, tap))
    steps += _rules(desired, observed)
    if wanted is not None:
        steps += plan_tap(wanted, seen)
    return [*steps, *plan_dns(desired, observed)]


def plan_removal(host_name: str, observed: ObservedNetwork, *, has_files: bool) -> list[Step]:
    """Return the steps after which nothing of the network is left."""
    steps: list[Step] = []
    if observed.dns in (DnsState.ALIVE, DnsState.MISPLACED, DnsState.DEAD):
        steps.append(StopDns())  # a dead one has left a record and a cgroup
    if observed.host_uplink is not None:
        steps.append(DeleteLink(Place.HOST, host_name))
    if observed.netns is not NetnsState.ABSENT:
        steps.append(RemoveNetns())
    if has_files:
        steps.append(RemoveFiles())
    return steps


def _namespace(observed: ObservedNetwork) -> Iterator[Step]:
    if observed.netns is not NetnsState.PRESENT:
        yield MakeNetns()
    if not observed.sysctls_right:
        yield SetSysctls()


def _unwanted(desired: DesiredNetwork, observed: ObservedNetwork) -> Iterator[Step]:
    wanted = {tap.name: tap for tap in desired.taps} | {desired.bridge.name: desired.bridge}
    if desired.uplink is not None:
        wanted[desired.uplink.name] = desired.uplink
    for name, seen in observed.links.items():
        if name == LOOPBACK:
            continue
        if name not in wanted or wanted[name].kind != seen.kind:
            yield DeleteLink(Place.INNER, name)
    half = desired.uplink is not None and not _both_ends(observed)
    if observed.host_uplink is not None and (desired.uplink is None or half):
        yield DeleteLink(Place.HOST, desired.host_name)
    if half and UPLINK in observed.links:
        yield DeleteLink(Place.INNER, UPLINK)


def _both_ends(observed: ObservedNetwork) -> bool:
    """A link without its namespace is on its way out, with the namespace that held its peer."""
    present = observed.netns is NetnsState.PRESENT
    return present and UPLINK in observed.links and observed.host_uplink is not None


def _base(desired: DesiredNetwork, observed: ObservedNetwork) -> Iterator[Step]:
    bridge = observed.links.get(BRIDGE)
    if bridge is not None and bridge.kind != desired.bridge.kind:
        bridge = None
    if bridge is None:
        yield MakeBridge(desired.bridge)
        # Settings of the bridge exist only now.
        yield SetSysctls()
    yield from _attributes(Place.INNER, desired.bridge, bridge)
    yield from _addresses(Place.INNER, desired.bridge, bridge)
    if desired.uplink is None or desired.host_uplink is None:
        return
    whole = _both_ends(observed)
    inner = observed.links.get(UPLINK) if whole else None
    host = observed.host_uplink if whole else None
    if not whole:
        yield MakeUplink(desired.host_uplink, desired.uplink)
    for place, wanted, seen in (
        (Place.HOST, desired.host_uplink, host),
        (Place.INNER, desired.uplink, inner),
    ):
        yield from _attributes(place, wanted, seen)
        yield from _addresses(place, wanted, seen)


def _attributes(place: Place, wanted: WantedLink, seen: SeenLink | None) -> Iterator[Step]:
    if seen is None or any(
        value and value != getattr(seen, name)
        for name, value in (
            ("alias", wanted.alias),
            ("mac", wanted.mac),
            ("mtu", wanted.mtu),
            ("master", wanted.master),
        )
    ):
        yield ChangeLink(place, wanted)


def _addresses(place: Place, wanted: WantedLink, seen: SeenLink | None) -> Iterator[Step]:
    have = seen.addresses if seen is not None else frozenset()
    for cidr in sorted(have - wanted.addresses):
        yield DeleteAddress(place, wanted.name, cidr)
    for cidr in sorted(wanted.addresses - have):
        yield AddAddress(place, wanted.name, cidr)


def _rules(desired: DesiredNetwork, observed: ObservedNetwork) -> Iterator[Step]:
    if observed.rules != desired.rules:
        yield LoadRules()


def _into_use(desired: DesiredNetwork, observed: ObservedNetwork) -> Iterator[Step]:
    names = [LOOPBACK, BRIDGE]
    whole = desired.uplink is not None and _both_ends(observed)
    if desired.uplink is not None:
        names.append(UPLINK)
        host = observed.host_uplink
        if not whole or host is None or not host.up:
            yield LinkUp(Place.HOST, desired.host_name)
    for name in names:
        seen = observed.links.get(name)
        if seen is None or not seen.up or (name == UPLINK and not whole):
            yield LinkUp(Place.INNER, name)
    if desired.default_gateway and (
        not whole or observed.default_gateway != desired.default_gateway
    ):
        yield SetDefaultRoute(desired.default_gateway)


def plan_tap(wanted: WantedLink, seen: SeenLink | None) -> Iterator[Step]:
    """Return the steps for one tap; its rules stand already."""
    if seen is not None and seen.kind != wanted.kind:
        seen = None  # removed by the steps before
    if seen is None or seen.owner_uid != wanted.owner_uid:
        yield MakeTap(wanted)
    yield from _attributes(Place.INNER, wanted, seen)
    if seen is None or seen.master != wanted.master or not seen.isolated:
        yield IsolatePort(wanted.name)
    if seen is None or not seen.up:
        yield LinkUp(Place.INNER, wanted.name)


def plan_dns(desired: DesiredNetwork, observed: ObservedNetwork) -> Iterator[Step]:
    """Return the steps for the files and the process that reads them."""
    if observed.files != desired.files:
        yield WriteFiles()
    if observed.dns is DnsState.UNKNOWN:
        return
    right = (
        observed.dns is DnsState.ALIVE
        and observed.dns_configuration == desired.configuration
        and observed.dns_bridge == observed.bridge
    )
    if observed.dns in (DnsState.ALIVE, DnsState.MISPLACED) and not right:
        yield StopDns()
    if not right:
        yield StartDns()
    elif observed.told != desired.files or observed.files != desired.files:
        yield TellDns()
