"""Rates as token buckets, and the steps that they take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chv.common.errors import InvalidArgument, Unsupported
from chv.common.wire.nwd import Shape
from chv.common.wire.types import Feature
from chv.nwd import shaping, steps
from chv.nwd.plan import IFB, DesiredNetwork, SeenLink, plan_network, plan_nic
from chv.nwd.shaping import OTHER, UNSHAPED, Bucket, SeenShape, Shaping, bucket
from chv.nwd.steps import Place
from tests.unit.nwd.nwd_world import World, desired_network

MBIT = 1_000_000
WANTED = shaping.shaping(Shape(ingress_bps=100 * MBIT, egress_bps=50 * MBIT), "i0", "alias")
IN_ALONE = replace(WANTED, egress=None)
HAS_BOTH = SeenShape(WANTED.ingress, WANTED.egress, "i0", "alias", ifb_up=True)
ALL = [Feature(name=name, present=True) for name in shaping.FEATURES]


def test_no_rate_is_no_bucket() -> None:
    assert bucket(0, 5) is None


@pytest.mark.parametrize("bps", [64_000, MBIT, 100 * MBIT, 40_000 * MBIT, 10**12])
def test_a_bucket_holds_a_jumbo_frame_and_its_queue_holds_two_bursts(bps: int) -> None:
    made = bucket(bps, 0)
    assert made is not None
    assert made.rate == bps // 8
    assert shaping.BURST_BYTES_MIN <= made.burst_bytes <= shaping.BURST_BYTES_MAX
    assert made.queue_bytes >= min(2 * made.burst_bytes, 2**31)
    assert made.queue_bytes < 2**32


def test_a_burst_that_is_asked_for_is_taken() -> None:
    assert bucket(MBIT, 100_000) == Bucket(125_000, 100_000, 206_250)
    assert bucket(MBIT, 1).burst_bytes == shaping.BURST_BYTES_MIN  # type: ignore[union-attr]


def test_what_is_wanted_and_seen_is_right() -> None:
    assert shaping.is_right(WANTED, HAS_BOTH)
    assert shaping.is_right(UNSHAPED, SeenShape())


def test_a_burst_that_the_kernel_has_rounded_is_right() -> None:
    rounded = replace(WANTED.ingress, burst_bytes=WANTED.ingress.burst_bytes - 50)  # type: ignore
    assert shaping.is_right(WANTED, replace(HAS_BOTH, ingress=rounded))


@pytest.mark.parametrize(
    "change",
    [
        {"ingress": None},
        {"egress": None},
        {"ingress": Bucket(1, 2, 3)},
        {"redirect": ""},
        {"redirect": OTHER},
        {"ifb_alias": None},
        {"ifb_alias": "another"},
        {"ifb_up": False},
    ],
)
def test_each_difference_is_seen(change: dict[str, object]) -> None:
    assert not shaping.is_right(WANTED, replace(HAS_BOTH, **change))  # type: ignore[arg-type]
    assert not shaping.is_right(UNSHAPED, HAS_BOTH)
    assert not shaping.is_right(IN_ALONE, HAS_BOTH)


@pytest.mark.parametrize("field", ["ingress_bps", "egress_bps"])
def test_a_rate_of_seconds_a_frame_is_refused(field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        shaping.check(Shape(**{field: 1000}), ALL)
    assert caught.value.field == f"shape.{field}"


def test_what_the_kernel_lacks_is_named_and_only_where_it_is_needed() -> None:
    without_ifb = [feature for feature in ALL if feature.name != "ifb"]
    shaping.check(Shape(ingress_bps=MBIT), without_ifb)
    shaping.check(Shape(), [])
    with pytest.raises(Unsupported, match="lacks ifb,"):
        shaping.check(Shape(egress_bps=MBIT), without_ifb)
    with pytest.raises(Unsupported, match="lacks tc_tbf,"):
        shaping.check(Shape(ingress_bps=MBIT), [])


def test_what_is_told_is_what_was_asked_for_where_it_holds_else_what_the_kernel_has() -> None:
    asked = Shape(ingress_bps=100 * MBIT, egress_bps=50 * MBIT)
    assert shaping.shape_of(asked, "i0", HAS_BOTH) == asked
    told = shaping.shape_of(asked, "i0", replace(HAS_BOTH, redirect=""))
    assert (told.ingress_bps, told.egress_bps) == (100 * MBIT, 0), "nothing gets to the ifb"
    assert shaping.shape_of(asked, "i0", SeenShape()) == Shape()


# --- the steps
def desired(*shapes: Shaping) -> DesiredNetwork:
    made = desired_network(taps=len(shapes))
    taps = [
        replace(tap, shaping=replace(wanted, ifb=f"i{tap.name[1:]}", alias=f"shape of {tap.name}"))
        for tap, wanted in zip(made.taps, shapes, strict=True)
    ]
    return replace(made, taps=tuple(taps))


SHAPED = desired(WANTED, UNSHAPED)
TAP, IFB_NAME = SHAPED.taps[0].name, SHAPED.taps[0].shaping.ifb


def test_rates_stand_before_the_tap_comes_up() -> None:
    world = World()
    planned = plan_network(SHAPED, world.observed)
    shaped = steps.SetShape(TAP, SHAPED.taps[0].shaping)
    assert planned.index(shaped) < planned.index(steps.LinkUp(Place.INNER, TAP))
    world.apply(planned, SHAPED)
    assert plan_network(SHAPED, world.observed) == []


def test_a_changed_rate_takes_one_step() -> None:
    world = World.settled(SHAPED)
    other = desired(IN_ALONE, UNSHAPED)
    assert plan_network(other, world.observed) == [steps.SetShape(TAP, other.taps[0].shaping)]


def test_a_rate_that_is_taken_away_takes_one_step_and_the_ifb_goes_with_it() -> None:
    world = World.settled(SHAPED)
    none = desired(UNSHAPED, UNSHAPED)
    planned = plan_network(none, world.observed)
    assert planned == [steps.ClearShape(TAP, IFB_NAME)]
    world.apply(planned, none)
    assert plan_network(none, world.observed) == []


def test_an_ifb_of_a_nic_that_is_gone_goes() -> None:
    world = World.settled(SHAPED)
    rest = replace(SHAPED, taps=SHAPED.taps[1:])
    planned = plan_network(rest, world.observed)
    links = {step for step in planned if isinstance(step, steps.DeleteLink)}
    assert links == {
        steps.DeleteLink(Place.INNER, TAP),
        steps.DeleteLink(Place.INNER, IFB_NAME),
    }
    both = plan_nic(rest, world.observed, TAP)
    assert steps.DeleteLink(Place.INNER, IFB_NAME) in both, "and by the look at one NIC"


def test_a_link_under_the_name_of_an_ifb_is_replaced() -> None:
    world = World.settled(SHAPED)
    links = dict(world.observed.links) | {IFB_NAME: SeenLink(kind="veth")}
    world.observed = replace(world.observed, links=links)
    planned = plan_network(SHAPED, world.observed)
    assert planned == [
        steps.DeleteLink(Place.INNER, IFB_NAME),
        steps.SetShape(TAP, SHAPED.taps[0].shaping),
    ]


def test_a_tap_that_is_made_anew_gets_its_rates_again() -> None:
    world = World.settled(SHAPED)
    links = {name: link for name, link in world.observed.links.items() if name != TAP}
    world.observed = replace(world.observed, links=links)
    for planned in (plan_network(SHAPED, world.observed), plan_nic(SHAPED, world.observed, TAP)):
        assert steps.SetShape(TAP, SHAPED.taps[0].shaping) in planned
    world.observed = replace(world.observed, links=links | {IFB_NAME: SeenLink(IFB)})
    assert plan_nic(desired(UNSHAPED, UNSHAPED), world.observed, TAP).count(
        steps.ClearShape(TAP, IFB_NAME)
    ), "an ifb that was left is not forgotten"


def test_a_tap_with_another_kind_of_queues_is_made_anew_if_nobody_holds_it() -> None:
    world = World.settled(SHAPED)
    wide = replace(SHAPED, taps=(replace(SHAPED.taps[0], queues=4), SHAPED.taps[1]))
    planned = plan_network(wide, world.observed)
    assert planned[:2] == [steps.DropIdleTap(TAP), steps.MakeTap(wide.taps[0])]
    world.apply(planned, wide)
    assert plan_network(wide, world.observed) == []
    wider = replace(SHAPED, taps=(replace(SHAPED.taps[0], queues=8), SHAPED.taps[1]))
    assert plan_network(wider, world.observed) == [], "the number is the opener's"
