"""Whether what the kernel tells of a network's changes is as its records want it. Pure.

News come of everybody's doing, ours as well. They are gathered by the thing that they are of, the
last word of each counts, and are judged when nothing of ours is under way: what we did ourselves is
then as wanted, and only what somebody else did stands out. A verdict is words for the log, and only
ever leads to a look at the real thing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from chv.nwd.kernel.link_events import (
    AddressNews,
    ForwardingNews,
    LinkNews,
    News,
    PortNews,
    RouteNews,
)
from chv.nwd.kernel.links import Link
from chv.nwd.kernel.routes import DEFAULT_ROUTE, DEFAULT_ROUTE6
from chv.nwd.plan import BRIDGE, LOOPBACK, UPLINK, DesiredNetwork
from chv.nwd.shaping import is_wanted
from chv.nwd.steps import WantedLink

PACE_MIN_S, PACE_MAX_S = 0.1, 12.0
CALM_S = 60.0
FIGHT_LOOKS = 5  # so many in CALM_S: somebody else wants it otherwise
THINGS_MAX = 8192  # of one network between two verdicts; more count as lost
SHOWN_MAX = 8


@dataclass
class Tidings:
    """What was told of a network since the last verdict: the last word on each thing."""

    links: dict[str, Link | None] = field(default_factory=dict)  # None: gone
    ports: dict[str, bool] = field(default_factory=dict)  # isolated
    addresses: dict[tuple[str, str], bool] = field(default_factory=dict)  # there; by link
    defaults: dict[str, str] = field(default_factory=dict)  # gateways, '' gone
    host_links: dict[str, Link | None] = field(default_factory=dict)
    host_addresses: dict[str, bool] = field(default_factory=dict)
    host_routes: dict[tuple[str, str], bool] = field(default_factory=dict)
    forwarding: dict[int, bool] = field(default_factory=dict)
    generation: int = 0
    gone: bool = False  # the namespace has no name any more
    lost: bool = False

    def take(self, news: News, names: dict[int, str]) -> None:
        """Take in what was told of the network's namespace; `names` of its links by number."""
        match news:
            case LinkNews(link=link, gone=gone):
                follow_name(names, news)
                self.links[link.name] = None if gone else link
                if not gone and link.master:
                    self.ports[link.name] = link.isolated
            case PortNews(name=name, isolated=isolated):
                self.ports[name] = isolated
            case AddressNews(link=number, cidr=cidr, gone=gone):
                self.addresses[names.get(number, ""), cidr] = not gone
            case RouteNews(route=route, gone=gone):
                if route.target in (DEFAULT_ROUTE, DEFAULT_ROUTE6):
                    self.defaults[route.target] = "" if gone else route.gateway
            case ForwardingNews(family=family, on=on):
                self.forwarding[family] = on
        self._bound()

    def take_host(self, news: News, name: str) -> None:
        """Take in what was told of the host's end of the uplink."""
        match news:
            case LinkNews(link=link, gone=gone):
                self.host_links[name] = None if gone else link
            case AddressNews(cidr=cidr, gone=gone):
                self.host_addresses[cidr] = not gone
            case RouteNews(route=route, gone=gone):
                if not route.is_automatic:
                    self.host_routes[route.target, route.gateway] = not gone
            case _:
                return
        self._bound()

    def _bound(self) -> None:
        things: tuple[dict[Any, Any], ...] = (
            self.links,
            self.ports,
            self.addresses,
            self.host_routes,
            self.host_addresses,
        )
        if sum(map(len, things)) > THINGS_MAX:
            self.lost = True
            for each in things:
                each.clear()


def follow_name(names: dict[int, str], news: LinkNews) -> None:
    """Keep which link has which number."""
    if news.gone:
        names.pop(news.link.index, None)
    else:
        names[news.link.index] = news.link.name


def judge(desired: DesiredNetwork, told: Tidings, generation: int) -> list[str]:
    """Return what is not as wanted, in words; `generation`: of the rules that we loaded last."""
    desired = replace(desired, taps=_concerned(desired, told))
    found = ["its namespace is gone"] if told.gone else []
    if told.lost:
        found.append("news were lost")
    if told.generation > generation:
        found.append("rules were changed")
    found += _links(desired, told)
    found += _ports(desired, told)
    found += _addresses(desired, told)
    for target, gateway in told.defaults.items():
        wanted = {each for each in desired.default_gateways if (":" in each) == (":" in target)}
        if wanted and gateway not in wanted:
            found.append(f"the route to {target} was changed")
    found += _host(desired, told)
    families = {6 if ":" in cidr else 4 for cidr in desired.bridge.addresses}
    if any(family in families and not on for family, on in told.forwarding.items()):
        found.append("forwarding was switched off")
    return found[:SHOWN_MAX]


def _concerned(desired: DesiredNetwork, told: Tidings) -> tuple[WantedLink, ...]:
    """Return the taps of which anything was told, of a thousand."""
    links, ports = told.links, told.ports
    return tuple(
        [
            tap
            for tap in desired.taps
            if tap.name in links or tap.name in ports or tap.shaping.ifb in links
        ]
    )


def _links(desired: DesiredNetwork, told: Tidings) -> list[str]:
    trunk = [desired.bridge, *([desired.uplink] if desired.uplink is not None else [])]
    wanted = {link.name: link for link in (*trunk, *desired.taps)}
    shaped = {tap.shaping.ifb for tap in desired.taps if is_wanted(tap.shaping)}
    found = []
    for name, link in told.links.items():
        if name == LOOPBACK:
            wrong = "was taken down" if link is None or not link.up else ""
        elif name in wanted:
            wrong = _wrong(wanted[name], link)
        elif name in shaped:
            wrong = "is gone" if link is None else ""
        else:
            wrong = "is nobody's" if link is not None else ""
        if wrong:
            found.append(f"link {name} {wrong}")
    return found


def _wrong(wanted: WantedLink, link: Link | None) -> str:
    """Return what is wrong with a link that is wanted."""
    if link is None:
        return "is gone"
    if not link.up:
        return "was taken down"
    pairs = (
        (wanted.kind, link.kind),
        (wanted.alias, link.alias),
        (wanted.mac, link.mac),
        (wanted.mtu, link.mtu),
    )
    if any(want and want != have for want, have in pairs) or (wanted.master and not link.master):
        return "was changed"
    return ""


def _ports(desired: DesiredNetwork, told: Tidings) -> list[str]:
    taps = {tap.name: tap for tap in desired.taps}
    return [
        f"link {name} was {'isolated' if isolated else 'opened'}"
        for name, isolated in told.ports.items()
        if name in taps and taps[name].isolated != isolated and told.links.get(name, True)
    ]


def _addresses(desired: DesiredNetwork, told: Tidings) -> list[str]:
    wanted = {BRIDGE: desired.bridge.addresses}
    if desired.uplink is not None:
        wanted[UPLINK] = desired.uplink.addresses
    return [
        f"address {cidr} of {name} was {'added' if there else 'removed'}"
        for (name, cidr), there in told.addresses.items()
        if name in wanted and (cidr in wanted[name]) != there
    ]


def _host(desired: DesiredNetwork, told: Tidings) -> list[str]:
    if desired.host_uplink is None:
        return []
    wanted = desired.host_uplink
    words = {name: _wrong(wanted, link) for name, link in told.host_links.items()}
    found = [f"link {name} of the host {word}" for name, word in words.items() if word]
    found += [
        f"address {cidr} of {wanted.name} was {'added' if there else 'removed'}"
        for cidr, there in told.host_addresses.items()
        if (cidr in wanted.addresses) != there
    ]
    found += [
        f"the host's route to {target} was {'added' if there else 'removed'}"
        for (target, gateway), there in told.host_routes.items()
        if ((target, gateway) in desired.host_routes) != there
    ]
    return found


@dataclass
class Pace:
    """How soon a look follows news: at once where it is calm, later and later in a fight."""

    _looks: deque[float] = field(default_factory=lambda: deque(maxlen=FIGHT_LOOKS * 4))

    def note(self, now_s: float) -> None:
        """A look was needed."""
        self._looks.append(now_s)

    def recent(self, now_s: float) -> int:
        """Return how many looks were needed of late."""
        while self._looks and now_s - self._looks[0] > CALM_S:
            self._looks.popleft()
        return len(self._looks)

    def wait_s(self, now_s: float) -> float:
        """Return how long to gather news before the next look."""
        beyond = max(0, self.recent(now_s) - FIGHT_LOOKS + 1)
        return float(min(PACE_MAX_S, PACE_MIN_S * 2.0**beyond))

    def is_fight(self, now_s: float) -> bool:
        """Tell whether somebody undoes what is repaired."""
        return self.recent(now_s) >= FIGHT_LOOKS
