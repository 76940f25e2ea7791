"""Which steps bring a network from what is observed to what is desired. Pure.

A plan is complete: applied to the observed world in order it reaches the desired one, and the plan
of that is empty. Remove before add; rules stand before any port comes up; files are written before
dnsmasq is told. What is in the namespace is ours alone, so a link that nobody wants is removed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from chv.nwd.kept import Kept
from chv.nwd.shaping import SeenShape, is_right, is_wanted
from chv.nwd.steps import (
    AddAddress,
    AddProxy,
    AddRoute,
    ChangeLink,
    ClearShape,
    DeleteAddress,
    DeleteLink,
    DeleteProxy,
    DeleteRoute,
    DropIdleTap,
    IsolatePort,
    LinkUp,
    LoadRules,
    MakeBridge,
    MakeNetns,
    MakeTap,
    MakeUplink,
    Place,
    RemoveFiles,
    RemoveNetns,
    SetDefaultRoute,
    SetShape,
    SetSysctls,
    StartDns,
    Step,
    StopDns,
    TellDns,
    WantedLink,
    WriteFiles,
)

LOOPBACK, BRIDGE, UPLINK = "lo", "br0", "up0"
VETH, IFB, TAP = "veth", "ifb", "tun"
MTU6_MIN = 1280  # RFC 8200: no link of IPv6 has less


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
    multi_queue: bool = False  # of a tap


@dataclass(frozen=True, slots=True)
class DesiredNetwork:
    """Everything that makes a network, its NICs included."""

    bridge: WantedLink
    uplink: WantedLink | None  # in the namespace
    host_uplink: WantedLink | None
    host_name: str  # of the host's end, wanted or not
    default_gateways: frozenset[str]  # one a family at most
    host_routes: frozenset[tuple[str, str]]  # (target, gateway) by the host's end
    taps: tuple[WantedLink, ...]
    rules: str  # digests
    files: str
    configuration: str

    @property
    def proxies(self) -> frozenset[str]:
        """Return what the bridge answers neighbour solicitations for."""
        return frozenset(tap.proxied for tap in self.taps if tap.proxied)


@dataclass(frozen=True, slots=True)
class ObservedNetwork:
    """What is there. `files`, `told`, `rules`: digests, empty where unknown."""

    netns: NetnsState = NetnsState.ABSENT
    sysctls_right: bool = False
    links: Mapping[str, SeenLink] = field(default_factory=dict)
    shapes: Mapping[str, SeenShape] = field(default_factory=dict)  # by tap
    proxies: frozenset[str] = frozenset()
    host_uplink: SeenLink | None = None
    host_sysctls_right: bool = False
    host_routes: frozenset[tuple[str, str]] = frozenset()
    default_gateways: frozenset[str] = frozenset()
    rules: str = ""
    files: str = ""
    told: str = ""  # what dnsmasq has read
    dns: DnsState = DnsState.NONE
    dns_configuration: str = ""
    dns_bridge: int = 0  # number of the bridge that it is bound to
    bridge: int = 0  # number of the one that is there


def plan_network(desired: DesiredNetwork, observed: ObservedNetwork) -> list[Step]:
    """Return every step that is left."""
    removals = _unwanted(desired, observed)
    rest = _without(observed, removals)
    return [
        *_namespace(observed),
        *removals,
        *_base(desired, rest),
        *_rules(desired, rest),
        *_into_use(desired, rest),
        *_proxies(desired.proxies, rest),
        *chain.from_iterable(plan_tap(tap, rest) for tap in desired.taps),
        *plan_dns(desired, rest),
    ]


def plan_nic(desired: DesiredNetwork, observed: ObservedNetwork, tap: str) -> list[Step]:
    """Return the steps that concern one NIC, in a network that is otherwise right."""
    seen = observed.links.get(tap)
    # Mostly it is the last one of a thousand.
    wanted = next((link for link in reversed(desired.taps) if link.name == tap), None)
    steps: list[Step] = []
    if seen is not None and (wanted is None or wanted.kind != seen.kind):
        steps.append(DeleteLink(Place.INNER, tap))
    steps += _rules(desired, observed)
    proxied = {wanted.proxied} - {""} if wanted is not None else set()
    if not observed.proxies <= proxied:
        steps += (DeleteProxy(each) for each in sorted(observed.proxies - desired.proxies))
    steps += (AddProxy(address) for address in sorted(proxied - observed.proxies))
    if wanted is not None:
        steps += plan_tap(wanted, _without(observed, steps))
    else:
        others = {other.shaping.ifb for other in desired.taps}
        ifbs = (name for name, link in observed.links.items() if link.kind == IFB)
        steps += [DeleteLink(Place.INNER, name) for name in ifbs if name not in others]
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


def _unwanted(desired: DesiredNetwork, observed: ObservedNetwork) -> list[Step]:
    """Remove what nobody wants and what is wrong in kind; of half a pair, the half."""
    kinds = {tap.name: tap.kind for tap in desired.taps} | {BRIDGE: desired.bridge.kind}
    # The ifb of a tap that stays goes when nothing is sent there any more: see plan_shape.
    kinds |= {tap.shaping.ifb: IFB for tap in desired.taps if tap.name in observed.links}
    whole = _is_whole(desired, observed)
    if whole:
        kinds[UPLINK] = VETH
    steps: list[Step] = [
        DeleteLink(Place.INNER, name)
        for name, seen in observed.links.items()
        if name != LOOPBACK and kinds.get(name) != seen.kind
    ]
    if observed.host_uplink is not None and not whole:
        steps.append(DeleteLink(Place.HOST, desired.host_name))
    return steps


def _is_whole(desired: DesiredNetwork, observed: ObservedNetwork) -> bool:
    """Tell whether a wanted uplink has both ends; one without the namespace is on its way out."""
    ends = (observed.links.get(UPLINK), observed.host_uplink)
    kinds = {seen.kind if seen is not None else "" for seen in ends}
    return desired.uplink is not None and observed.netns is NetnsState.PRESENT and kinds == {VETH}


def _without(observed: ObservedNetwork, removals: list[Step]) -> ObservedNetwork:
    """Return what is left after the removals: ports lose their bridge, pairs go as a whole."""
    gone = {(step.place, step.name) for step in removals if isinstance(step, DeleteLink)}
    if not gone:
        return observed
    links = {n: seen for n, seen in observed.links.items() if (Place.INNER, n) not in gone}
    if (Place.INNER, BRIDGE) in gone:
        links = {n: replace(seen, master="", isolated=False) for n, seen in links.items()}
    host = observed.host_uplink
    if any(place is Place.HOST for place, _ in gone) or (Place.INNER, UPLINK) in gone:
        host = None
    return replace(observed, links=links, host_uplink=host)


def _base(desired: DesiredNetwork, observed: ObservedNetwork) -> Iterator[Step]:
    bridge, inner, host = _trunk(observed)
    if bridge is None:
        yield MakeBridge(desired.bridge)
    if desired.uplink is not None and desired.host_uplink is not None:
        is_new = inner is None or host is None
        if is_new:
            yield MakeUplink(desired.host_uplink, desired.uplink)
        if is_new or not observed.host_sysctls_right:
            yield SetSysctls(Place.HOST)
    if bridge is None or (inner is None and desired.uplink is not None):
        yield SetSysctls()  # the settings of a link exist only now
    for place, wanted, seen in (
        (Place.INNER, desired.bridge, bridge),
        (Place.HOST, desired.host_uplink, host),
        (Place.INNER, desired.uplink, inner),
    ):
        if wanted is not None:
            yield from _attributes(place, wanted, seen)
            if seen is not None and 0 < seen.mtu < MTU6_MIN <= wanted.mtu:
                yield SetSysctls(place)  # those of IPv6, which too small a link has lost, come back
            yield from _addresses(place, wanted, seen)


def _trunk(
    observed: ObservedNetwork,
) -> tuple[SeenLink | None, SeenLink | None, SeenLink | None]:
    """Return the bridge and both ends of the uplink; of half a pair nothing."""
    inner, host = observed.links.get(UPLINK), observed.host_uplink
    if inner is None or host is None:
        inner = host = None
    return observed.links.get(BRIDGE), inner, host


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
    if observed.netns is not NetnsState.PRESENT or observed.rules != desired.rules:
        yield LoadRules()


def _into_use(desired: DesiredNetwork, observed: ObservedNetwork) -> Iterator[Step]:
    wanted: list[tuple[Place, str, SeenLink | None]] = [
        (Place.INNER, LOOPBACK, observed.links.get(LOOPBACK)),
        (Place.INNER, BRIDGE, observed.links.get(BRIDGE)),
    ]
    inner, host = observed.links.get(UPLINK), observed.host_uplink
    if desired.uplink is not None:
        wanted += [(Place.HOST, desired.host_name, host), (Place.INNER, UPLINK, inner)]
    for place, name, seen in wanted:
        if seen is None or not seen.up:
            yield LinkUp(place, name)
    yield from _routes(desired, observed)


def _routes(desired: DesiredNetwork, observed: ObservedNetwork) -> Iterator[Step]:
    """Routes of a link go with it and with its being up."""
    inner, host = observed.links.get(UPLINK), observed.host_uplink
    is_whole = inner is not None and host is not None
    is_up = is_whole and inner is not None and inner.up
    gateways: frozenset[str] = observed.default_gateways if is_up else frozenset()
    for gateway in sorted(desired.default_gateways - gateways):
        yield SetDefaultRoute(gateway)
    is_up = is_whole and host is not None and host.up
    routes: frozenset[tuple[str, str]] = observed.host_routes if is_up else frozenset()
    for target, gateway in sorted(routes - desired.host_routes):
        yield DeleteRoute(desired.host_name, target, gateway)
    for target, gateway in sorted(desired.host_routes - routes):
        yield AddRoute(desired.host_name, target, gateway)


def _proxies(wanted: frozenset[str], observed: ObservedNetwork) -> Iterator[Step]:
    """Entries go with the bridge's being up."""
    bridge = observed.links.get(BRIDGE)
    stands = bridge is not None and bridge.up
    have = observed.proxies if stands else frozenset()
    yield from (DeleteProxy(address) for address in sorted(have - wanted))
    yield from (AddProxy(address) for address in sorted(wanted - have))


def plan_tap(wanted: WantedLink, observed: ObservedNetwork) -> tuple[Step, ...]:
    """Return the steps for one tap; its rules stand already."""
    name, links = wanted.name, observed.links
    sources = (wanted, links.get(name), links.get(wanted.shaping.ifb), observed.shapes.get(name))
    return _STEPS_OF_TAPS.get(name, sources, _steps_of_tap)


def _steps_of_tap(
    wanted: WantedLink, seen: SeenLink | None, ifb: SeenLink | None, shape: SeenShape | None
) -> tuple[Step, ...]:
    return tuple(_plan_tap(wanted, seen, ifb, shape or SeenShape()))


# A pass over a thousand taps that are as they were plans none of them again.
_STEPS_OF_TAPS: Kept[tuple[Step, ...]] = Kept()


def _plan_tap(
    wanted: WantedLink, seen: SeenLink | None, ifb: SeenLink | None, shape: SeenShape
) -> Iterator[Step]:
    if seen is not None and seen.multi_queue != (wanted.queues > 1):
        yield DropIdleTap(wanted.name)
        seen = None
    if seen is None or seen.owner_uid != wanted.owner_uid:
        yield MakeTap(wanted)
    yield from _attributes(Place.INNER, wanted, seen)
    is_isolated = seen is not None and seen.master == wanted.master and seen.isolated
    if is_isolated != wanted.isolated:
        yield IsolatePort(wanted.name, wanted.isolated)
    yield from plan_shape(wanted, _shape(shape, ifb, is_new=seen is None))
    if seen is None or not seen.up:
        yield LinkUp(Place.INNER, wanted.name)


def plan_shape(wanted: WantedLink, seen: SeenShape) -> Iterator[Step]:
    """Return the steps for the rates of one tap."""
    if is_right(wanted.shaping, seen):
        return
    if is_wanted(wanted.shaping):
        yield SetShape(wanted.name, wanted.shaping)
    else:
        yield ClearShape(wanted.name, wanted.shaping.ifb)


def _shape(seen: SeenShape, ifb: SeenLink | None, *, is_new: bool) -> SeenShape:
    """Return what there is of rates; with a tap its own part goes, and its ifb stays."""
    if ifb is None or ifb.kind != IFB:
        seen = replace(seen, egress=None, ifb_alias=None, ifb_up=False)
    else:
        seen = replace(seen, ifb_alias=ifb.alias, ifb_up=ifb.up)
    return replace(seen, ingress=None, redirect="") if is_new else seen


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
