"""From any mixture of rates, ifbs and kinds of taps at most two plans lead to the desired one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from chv.nwd.plan import (
    IFB,
    DesiredNetwork,
    NetnsState,
    ObservedNetwork,
    SeenLink,
    plan_network,
    plan_nic,
)
from chv.nwd.shaping import FOREIGN, OTHER, Bucket, SeenShape, Shaping
from tests.property.test_nwd_plan import PASSES_MAX, worlds
from tests.unit.nwd.nwd_world import World, desired_network

TAPS = 3
BUCKETS = [None, Bucket(10**6, 50_000, 150_000), Bucket(10**7, 250_000, 1_000_000)]


def ifb_of(tap: str) -> str:
    return f"i{tap[1:]}"


def is_ifb(link: SeenLink | None) -> bool:
    return link is not None and link.kind == IFB


@st.composite
def desired_networks(draw: st.DrawFn) -> DesiredNetwork:
    made = desired_network(draw(st.integers(0, TAPS)))
    taps = tuple(
        replace(
            tap,
            queues=draw(st.sampled_from([1, 2])),
            shaping=Shaping(
                draw(st.sampled_from(BUCKETS)),
                draw(st.sampled_from(BUCKETS)),
                ifb_of(tap.name),
                f"shapes {tap.name}",
            ),
        )
        for tap in made.taps
    )
    return replace(made, taps=taps)


@st.composite
def shaped_worlds(draw: st.DrawFn) -> ObservedNetwork:
    """Some world, with what may be there of rates in it."""
    observed = draw(worlds())
    if observed.netns is not NetnsState.PRESENT:
        return observed
    links, shapes = dict(observed.links), {}
    for tap in (f"t{number:010x}" for number in range(TAPS)):
        if draw(st.booleans()):
            alias = draw(st.sampled_from(["", f"shapes {tap}"]))
            kind = draw(st.sampled_from([IFB, IFB, "veth"]))
            links[ifb_of(tap)] = SeenLink(kind, alias=alias, up=draw(st.booleans()))
        if tap in links:
            links[tap] = replace(links[tap], multi_queue=draw(st.booleans()))
            shapes[tap] = draw(seen_shapes(tap, links.get(ifb_of(tap))))
    return replace(observed, links=links, shapes=shapes)


@st.composite
def seen_shapes(draw: st.DrawFn, tap: str, ifb: SeenLink | None) -> SeenShape:
    found = is_ifb(ifb)
    return SeenShape(
        ingress=draw(st.sampled_from([*BUCKETS, FOREIGN])),
        egress=draw(st.sampled_from([*BUCKETS, FOREIGN])) if found else None,
        redirect=draw(st.sampled_from(["", OTHER, *([ifb_of(tap)] if found else [])])),
        ifb_alias=ifb.alias if found and ifb is not None else None,
        ifb_up=ifb.up if found and ifb is not None else False,
    )


@given(shaped_worlds(), desired_networks())
def test_any_world_settles_and_no_ifb_is_left_over(
    observed: ObservedNetwork, desired: DesiredNetwork
) -> None:
    world = World(observed)
    for _ in range(PASSES_MAX):
        world.apply(plan_network(desired, world.observed), desired)
    assert plan_network(desired, world.observed) == []
    left = {name for name, link in world.observed.links.items() if link.kind == IFB}
    assert left == {tap.shaping.ifb for tap in desired.taps if tap.shaping.egress is not None}


@given(shaped_worlds(), desired_networks(), st.integers(0, 30))
def test_a_plan_that_is_cut_short_anywhere_is_finished_by_the_next(
    observed: ObservedNetwork, desired: DesiredNetwork, count: int
) -> None:
    world = World(observed)
    world.apply(plan_network(desired, world.observed)[:count], desired)
    for _ in range(PASSES_MAX):
        world.apply(plan_network(desired, world.observed), desired)
    assert plan_network(desired, world.observed) == []


@given(desired_networks(), desired_networks())
def test_the_look_at_one_nic_after_another_leads_to_the_same(
    before: DesiredNetwork, after: DesiredNetwork
) -> None:
    world = World.settled(before)
    for tap in (f"t{number:010x}" for number in range(TAPS)):
        world.apply(plan_nic(after, world.observed, tap), after)
    assert plan_network(after, world.observed) == []
