"""The planner: from any world it reaches the desired one, in an order that fails closed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chv.nwd import plan, steps
from chv.nwd.plan import UPLINK, DnsState, NetnsState, ObservedNetwork, SeenLink, plan_network
from chv.nwd.steps import Place
from tests.unit.nwd.nwd_world import World, desired_network

DESIRED = desired_network(taps=2)


def names(planned: list[steps.Step]) -> list[str]:
    return [type(step).__name__ for step in planned]


def test_from_nothing_one_plan_is_enough() -> None:
    world = World()
    world.apply(plan_network(DESIRED, world.observed), DESIRED)
    assert plan_network(DESIRED, world.observed) == []


def test_rules_stand_before_any_port_comes_up() -> None:
    planned = names(plan_network(DESIRED, ObservedNetwork()))
    assert planned.index("LoadRules") < planned.index("LinkUp")
    assert planned.index("LoadRules") < planned.index("MakeTap")


def test_a_port_is_isolated_before_it_comes_up() -> None:
    planned = plan_network(DESIRED, ObservedNetwork())
    tap = DESIRED.taps[0].name
    up, isolated = steps.LinkUp(Place.INNER, tap), steps.IsolatePort(tap)
    assert planned.index(isolated) < planned.index(up)


def test_files_are_written_before_dnsmasq_is_told() -> None:
    world = World.settled(DESIRED)
    planned = plan_network(replace(DESIRED, files="new"), world.observed)
    assert names(planned) == ["WriteFiles", "TellDns"]


def test_a_dnsmasq_that_was_not_told_is_told_again() -> None:
    world = World.settled(DESIRED)
    world.observed = replace(world.observed, told="")
    assert names(plan_network(DESIRED, world.observed)) == ["TellDns"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"dns": DnsState.DEAD}, ["StartDns"]),
        ({"dns": DnsState.MISPLACED}, ["StopDns", "StartDns"]),
        ({"dns_configuration": "old"}, ["StopDns", "StartDns"]),
        ({"dns_bridge": 99}, ["StopDns", "StartDns"]),
        ({"dns": DnsState.UNKNOWN}, []),
        ({"rules": ""}, ["LoadRules"]),
        ({"sysctls_right": False}, ["SetSysctls"]),
        ({"default_gateways": frozenset({"fd63::"})}, ["SetDefaultRoute"]),
        ({"default_gateways": frozenset()}, ["SetDefaultRoute"] * 2),
        ({"host_sysctls_right": False}, ["SetSysctls"]),
        ({"host_routes": frozenset({("198.51.100.9/32", "169.254.64.1")})}, ["AddRoute"]),
        ({"proxies": frozenset({"fd00:7::2"})}, ["AddProxy"]),
        ({"proxies": frozenset({f"fd00:7::{n}" for n in (2, 3, 9)})}, ["DeleteProxy"]),
    ],
)
def test_one_difference_takes_the_steps_for_it_alone(
    change: dict[str, object], expected: list[str]
) -> None:
    world = World.settled(DESIRED)
    observed = replace(world.observed, **change)  # type: ignore[arg-type]
    assert names(plan_network(DESIRED, observed)) == expected


def test_a_link_that_nobody_wants_is_removed_first() -> None:
    world = World.settled(DESIRED)
    links = dict(world.observed.links) | {"intruder": SeenLink(kind="veth")}
    planned = plan_network(DESIRED, replace(world.observed, links=links))
    assert planned == [steps.DeleteLink(Place.INNER, "intruder")]


def test_a_link_of_another_kind_under_our_name_is_replaced() -> None:
    world = World.settled(DESIRED)
    name = DESIRED.taps[0].name
    links = dict(world.observed.links) | {name: SeenLink(kind="veth")}
    planned = names(plan_network(DESIRED, replace(world.observed, links=links)))
    assert planned[0] == "DeleteLink"
    assert "MakeTap" in planned


def test_half_an_uplink_is_removed_and_made_again() -> None:
    world = World.settled(DESIRED)
    links = {name: link for name, link in world.observed.links.items() if name != UPLINK}
    planned = names(plan_network(DESIRED, replace(world.observed, links=links)))
    assert planned[:2] == ["DeleteLink", "MakeUplink"]
    assert planned[-4:] == ["SetDefaultRoute"] * 2 + ["AddRoute"] * 2


def test_without_uplink_the_host_end_goes() -> None:
    world = World.settled(DESIRED)
    wanted = replace(DESIRED, uplink=None, host_uplink=None, default_gateways=frozenset())
    planned = plan_network(wanted, world.observed)
    assert steps.DeleteLink(Place.HOST, DESIRED.host_name) in planned


def test_a_nic_takes_its_own_steps_and_no_others() -> None:
    one = desired_network(taps=1)
    world = World.settled(one)
    wanted = replace(one, taps=DESIRED.taps, rules="r2", files="f2")
    tap = DESIRED.taps[1].name
    planned = names(plan.plan_nic(wanted, world.observed, tap))
    assert planned == [
        "LoadRules", "AddProxy", "MakeTap", "ChangeLink", "IsolatePort", "LinkUp", "WriteFiles",
        "TellDns",
    ]  # fmt: skip


def test_a_removed_nic_loses_its_tap_before_its_rules() -> None:
    world = World.settled(DESIRED)
    wanted = replace(DESIRED, taps=DESIRED.taps[:1], rules="r2", files="f2")
    tap = DESIRED.taps[1].name
    planned = names(plan.plan_nic(wanted, world.observed, tap))
    assert planned == ["DeleteLink", "LoadRules", "DeleteProxy", "WriteFiles", "TellDns"]


def test_removal_ends_the_process_before_its_namespace() -> None:
    world = World.settled(DESIRED)
    planned = plan.plan_removal(DESIRED.host_name, world.observed, has_files=True)
    assert names(planned) == ["StopDns", "DeleteLink", "RemoveNetns", "RemoveFiles"]
    assert plan.plan_removal(DESIRED.host_name, ObservedNetwork(), has_files=False) == []


def test_debris_under_the_name_counts_as_no_namespace() -> None:
    planned = names(plan_network(DESIRED, ObservedNetwork(netns=NetnsState.DEBRIS)))
    assert planned[0] == "MakeNetns"
    removal = plan.plan_removal("x", ObservedNetwork(netns=NetnsState.DEBRIS), has_files=False)
    assert names(removal) == ["RemoveNetns"]
