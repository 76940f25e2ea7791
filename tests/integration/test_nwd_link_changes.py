"""Links and routes of the host's side, as the kernel takes our messages; in namespaces alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from chv.common.errors import Conflict
from chv.nwd.kernel import link_changes, links, netlink, netns, routes
from chv.nwd.kernel.link_changes import Change
from tests.integration.nwd_helpers import IDS, inside, ip

pytestmark = pytest.mark.root


@pytest.fixture
def places() -> Iterator[tuple[str, str]]:
    names = [f"chvt-{IDS.uid()[:8]}" for _ in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        yield names[0], names[1]
    finally:
        for name in names:
            ip("netns", "delete", name, check=False)


def _make_pair(there: str) -> None:
    fd = os.open(netns.path_of(there), os.O_RDONLY | os.O_CLOEXEC)
    try:
        with netlink.route() as ask:
            link_changes.add_veth(ask, "here0", 1450, ("there0", fd))
    finally:
        os.close(fd)


def test_a_pair_has_its_ends_in_two_namespaces_and_one_mtu(places: tuple[str, str]) -> None:
    inside(places[0], lambda: _make_pair(places[1]))
    here = inside(places[0], links.read_all)["here0"]
    there = inside(places[1], links.read_all)["there0"]
    assert (here.kind, here.mtu) == (there.kind, there.mtu) == ("veth", 1450)


def test_what_a_link_has_already_is_no_change(places: tuple[str, str]) -> None:
    inside(places[0], lambda: _make_pair(places[1]))
    link = inside(places[0], lambda: links.read(["here0"]))["here0"]
    assert link_changes.difference(link, Change(mac=link.mac, mtu=1450)) == Change()
    assert link_changes.difference(link, Change("mine", mtu=1400)) == Change("mine", mtu=1400)


@pytest.mark.parametrize(
    ("own", "gateway", "target"),
    [
        ("169.254.64.0/31", "169.254.64.1", "198.51.100.9/32"),
        ("fd63::/127", "fd63::1", "fd00:7::/64"),
    ],
)
def test_a_route_comes_once_conflicts_with_another_and_goes_however_often(
    places: tuple[str, str], own: str, gateway: str, target: str
) -> None:
    def work() -> None:
        _make_pair(places[1])
        with netlink.route() as ask:
            link = links.read(["here0"])["here0"]
            link_changes.add_address(ask, link, own)
            link_changes.set_up(ask, link)
            link_changes.add_route(ask, link, target, gateway)
            assert (target, gateway) in _routes(link.index)
            with pytest.raises(Conflict, match="another route"):
                link_changes.add_route(ask, link, target, gateway)
            for _ in range(2):
                link_changes.delete_route(ask, link, target, gateway)
            assert (target, gateway) not in _routes(link.index)

    inside(places[0], work)


def test_a_route_that_others_made_is_removed_too(places: tuple[str, str]) -> None:
    inside(places[0], lambda: _make_pair(places[1]))
    ip("-n", places[0], "link", "set", "here0", "up")
    ip("-n", places[0], "route", "add", "198.51.100.0/24", "dev", "here0", "proto", "boot",
       "scope", "link")  # fmt: skip

    def remove() -> set[tuple[str, str]]:
        link = links.read(["here0"])["here0"]
        assert ("198.51.100.0/24", "") in _routes(link.index)
        with netlink.route() as ask:
            link_changes.delete_route(ask, link, "198.51.100.0/24", "")
        return _routes(link.index)

    assert ("198.51.100.0/24", "") not in inside(places[0], remove)


def _routes(link: int) -> set[tuple[str, str]]:
    return {(route.target, route.gateway) for route in routes.read(link)}
