"""From any damaged world at most two plans lead to the desired one, and no step is impossible."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from hypothesis import given
from hypothesis import strategies as st

from chv.nwd.plan import (
    BRIDGE,
    UPLINK,
    DnsState,
    NetnsState,
    ObservedNetwork,
    SeenLink,
    plan_network,
)
from tests.unit.nwd.nwd_world import HOST_NAME, World, desired_network

PASSES_MAX = 2
NAMES = [BRIDGE, UPLINK, *(f"t{number:010x}" for number in range(3)), "intruder"]


GATEWAYS = ["169.254.64.0", "fd63::"]
ROUTES = [("198.51.100.9/32", "169.254.64.1"), ("203.0.113.0/24", "169.254.64.1")]
PROXIES = ["fd00:7::2", "fd00:7::3", "fd00:7::99"]
T = TypeVar("T")


def subsets(values: list[T]) -> st.SearchStrategy[frozenset[T]]:
    return st.frozensets(st.sampled_from(values))


@st.composite
def seen_links(draw: st.DrawFn, name: str) -> SeenLink:
    port = name.startswith("t")
    return SeenLink(
        kind=draw(st.sampled_from(["bridge", "veth", "tun"])),
        mac=draw(st.sampled_from(["", "02:00:00:00:00:01"])),
        mtu=draw(st.sampled_from([1450, 1500])),
        up=draw(st.booleans()),
        alias=draw(st.sampled_from(["", "b", "u", "n0"])),
        master=draw(st.sampled_from(["", BRIDGE])) if port else "",
        isolated=draw(st.booleans()) if port else False,
        owner_uid=draw(st.sampled_from([-1, 1000, 1001])),
        addresses=frozenset(
            draw(
                st.sets(
                    st.sampled_from(["10.0.0.1/24", "10.6.0.1/24", "fd00:7::1/64", "fd00:9::1/64"])
                )
            )
        ),
    )


@st.composite
def worlds(draw: st.DrawFn) -> ObservedNetwork:
    netns = draw(st.sampled_from(list(NetnsState)))
    chosen = draw(st.sets(st.sampled_from(NAMES))) if netns is NetnsState.PRESENT else set()
    links = {name: draw(seen_links(name)) for name in sorted(chosen)}
    if netns is NetnsState.PRESENT:
        links["lo"] = SeenLink(kind="", up=draw(st.booleans()))
    host = draw(st.none() | seen_links(HOST_NAME))
    if BRIDGE not in links:
        links = {name: replace(link, master="", isolated=False) for name, link in links.items()}
    return ObservedNetwork(
        netns=netns,
        sysctls_right=draw(st.booleans()),
        links=links,
        proxies=draw(subsets(PROXIES)) if BRIDGE in links and links[BRIDGE].up else frozenset(),
        host_uplink=host,
        host_sysctls_right=draw(st.booleans()),
        host_routes=draw(subsets(ROUTES)) if host is not None and host.up else frozenset(),
        default_gateways=(
            draw(subsets(GATEWAYS)) if UPLINK in links and links[UPLINK].up else frozenset()
        ),
        rules=draw(st.sampled_from(["", "r0", "r1"])),
        files=draw(st.sampled_from(["", "f0", "f1"])),
        told=draw(st.sampled_from(["", "f0", "f1"])),
        dns=draw(st.sampled_from([each for each in DnsState if each is not DnsState.UNKNOWN])),
        dns_configuration=draw(st.sampled_from(["", "c0", "c1"])),
        dns_bridge=draw(st.integers(0, 2)),
        bridge=draw(st.integers(1, 2)) if BRIDGE in links else 0,
    )


@given(worlds(), st.integers(0, 3), st.booleans())
def test_any_world_settles(observed: ObservedNetwork, taps: int, is_isolated: bool) -> None:
    desired, world = desired_network(taps, is_isolated=is_isolated), World(observed)
    for _ in range(PASSES_MAX):
        world.apply(plan_network(desired, world.observed), desired)
    assert plan_network(desired, world.observed) == []


@given(worlds(), st.integers(0, 3), st.integers(0, 30))
def test_a_plan_that_is_cut_short_anywhere_is_finished_by_the_next(
    observed: ObservedNetwork, taps: int, count: int
) -> None:
    desired, world = desired_network(taps), World(observed)
    world.apply(plan_network(desired, world.observed)[:count], desired)
    for _ in range(PASSES_MAX):
        world.apply(plan_network(desired, world.observed), desired)
    assert plan_network(desired, world.observed) == []


@given(worlds())
def test_a_plan_is_a_function(observed: ObservedNetwork) -> None:
    desired = desired_network(2)
    assert plan_network(desired, observed) == plan_network(desired, observed)
