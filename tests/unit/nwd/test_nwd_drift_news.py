"""What the kernel tells of a network is judged by the last word on each thing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from chv.common.layout import Layout
from chv.nwd.blueprint import Settings, draw
from chv.nwd.drift import (
    CALM_S,
    FIGHT_LOOKS,
    PACE_MAX_S,
    PACE_MIN_S,
    THINGS_MAX,
    Pace,
    Tidings,
    judge,
)
from chv.nwd.kernel.link_events import (
    AddressNews,
    ForwardingNews,
    LinkNews,
    News,
    PortNews,
    RouteNews,
)
from chv.nwd.kernel.links import Link
from chv.nwd.kernel.routes import Route
from chv.nwd.steps import WantedLink
from tests.unit.nwd.nwd_rows import network, nic

LAYOUT = Layout("abcdef", Path("/run"), Path("/var/lib"))
SETTINGS = Settings("169.254.64.0/18", "fd63:6876::/112", (), (), 3600)
ROW = network()
NIC = nic(ROW.network_id, 5)
DESIRED = draw(LAYOUT, SETTINGS, ROW, [NIC]).desired
TAP, BRIDGE = DESIRED.taps[0], DESIRED.bridge
assert DESIRED.uplink is not None and DESIRED.host_uplink is not None
UPLINK, HOST_UPLINK = DESIRED.uplink, DESIRED.host_uplink
GATEWAY = next(iter(DESIRED.default_gateways))
NUMBERS = {"lo": 1, "br0": 2, "up0": 3, TAP.name: 4, HOST_UPLINK.name: 7}


def seen(wanted: WantedLink, **changes: object) -> Link:
    link = Link(
        index=NUMBERS[wanted.name],
        name=wanted.name,
        kind=wanted.kind,
        mac=wanted.mac,
        mtu=wanted.mtu,
        up=True,
        alias=wanted.alias,
        master=2 if wanted.master else 0,
        isolated=wanted.isolated,
    )
    return replace(link, **changes)  # type: ignore[arg-type]


def verdict(*told: News, host: tuple[News, ...] = (), generation: int = 0) -> list[str]:
    tidings = Tidings(generation=generation)
    names = {number: name for name, number in NUMBERS.items()}
    for each in told:
        tidings.take(each, names)
    for each in host:
        tidings.take_host(each, HOST_UPLINK.name)
    return judge(DESIRED, tidings, 7)


def test_what_we_make_ourselves_is_as_wanted_in_the_end() -> None:
    bare = seen(TAP, alias="", master=0, up=False, isolated=False, mtu=1500)
    address = next(iter(BRIDGE.addresses))
    assert (
        verdict(
            LinkNews(bare),
            LinkNews(replace(bare, alias=TAP.alias, mtu=TAP.mtu)),
            LinkNews(seen(TAP, up=False, isolated=False)),
            PortNews(TAP.name, True),
            LinkNews(seen(TAP)),
            LinkNews(seen(TAP, carrier=True)),
            AddressNews(2, address, gone=True),
            AddressNews(2, address),
            LinkNews(seen(BRIDGE)),
            RouteNews(Route("0.0.0.0/0", GATEWAY, 3)),
            ForwardingNews(4, on=True),
            generation=7,
        )
        == []
    )


STRANGER = Link(9, "intruder", "bridge", up=True)


@pytest.mark.parametrize(
    "news",
    [
        LinkNews(seen(TAP), gone=True),
        LinkNews(seen(TAP, up=False)),
        LinkNews(seen(TAP, master=0)),
        LinkNews(seen(TAP, mtu=1300)),
        LinkNews(seen(TAP, alias="mine")),
        PortNews(TAP.name, False),
        LinkNews(seen(TAP, isolated=False)),
        LinkNews(STRANGER),
        LinkNews(Link(1, "lo", up=False)),
        LinkNews(seen(BRIDGE, mac="02:00:00:00:00:77")),
        AddressNews(2, next(iter(BRIDGE.addresses)), gone=True),
        AddressNews(2, "10.66.0.1/24"),
        AddressNews(3, next(iter(UPLINK.addresses)), gone=True),
        RouteNews(Route("0.0.0.0/0", GATEWAY, 3), gone=True),
        RouteNews(Route("0.0.0.0/0", "10.0.0.9", 3)),
        ForwardingNews(4, on=False),
    ],
    ids=lambda news: type(news).__name__,  # uids are made anew in each process
)
def test_what_is_otherwise_stands_out(news: News) -> None:
    assert verdict(news) != []


@pytest.mark.parametrize(
    "news",
    [
        LinkNews(STRANGER, gone=True),
        AddressNews(9, "10.66.0.1/24"),  # of a link that is told of by itself
        RouteNews(Route("10.99.0.0/16", GATEWAY, 3)),
        RouteNews(Route("::/0", "fe80::1", 3)),  # this network has no IPv6
        ForwardingNews(6, on=False),
        PortNews("gone", False),
    ],
    ids=lambda news: type(news).__name__,  # uids are made anew in each process
)
def test_what_is_nobodys_concern_is_left_alone(news: News) -> None:
    assert verdict(news) == []


def test_the_hosts_end_counts_as_well() -> None:
    address = next(iter(HOST_UPLINK.addresses))
    assert verdict(host=(LinkNews(seen(HOST_UPLINK)),)) == []
    assert verdict(host=(LinkNews(seen(HOST_UPLINK), gone=True),)) != []
    assert verdict(host=(AddressNews(7, address, gone=True),)) != []
    assert verdict(host=(AddressNews(7, address, gone=True), AddressNews(7, address))) == []
    assert verdict(host=(RouteNews(Route("198.51.100.9/32", "", 7)),)) != []
    automatic = Route("169.254.64.0/31", "", 7, is_automatic=True)
    assert verdict(host=(RouteNews(automatic),)) == []


def test_rules_count_from_the_generation_that_we_do_not_know() -> None:
    assert verdict(generation=7) == []
    assert verdict(generation=8) == ["rules were changed"]


def test_a_flood_is_bounded_and_counts_as_lost() -> None:
    told = Tidings()
    for number in range(THINGS_MAX + 2):
        told.take(LinkNews(Link(number, f"l{number}"), gone=True), {})
    assert told.lost
    assert len(told.links) < THINGS_MAX
    assert judge(DESIRED, told, 0) == ["news were lost"]


def test_looks_come_later_and_later_in_a_fight_and_at_once_after_it() -> None:
    pace, now_s, waits = Pace(), 0.0, []
    for _ in range(30):
        waits.append(pace.wait_s(now_s))
        now_s += waits[-1]
        pace.note(now_s)
    assert waits[:FIGHT_LOOKS] == [PACE_MIN_S] * FIGHT_LOOKS
    assert waits[FIGHT_LOOKS] > PACE_MIN_S
    assert max(waits) == PACE_MAX_S
    assert pace.is_fight(now_s)
    assert not pace.is_fight(now_s + CALM_S + 1)
    assert pace.wait_s(now_s + CALM_S + 1) == PACE_MIN_S
