"""How long ago was it: over agents, boots and jumps of the wall clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chv.agent.moments import Moment, age_s
from chv.agent.records import EndKind, VmFacts
from chv.agent.vm.crashes import backoff_left_s, crashes_after, loop_since, next_restart
from tests.sim.world import TEN_YEARS_S

WALL = st.floats(0, 4e9)
UP = st.floats(0, 1e8)


def at(monotonic_s: float, wall_s: float = 1e9, boot: str = "a") -> Moment:
    return Moment(boot_id=boot, monotonic_s=monotonic_s, wall_s=wall_s)


@given(UP, st.floats(0, 1e6), WALL, WALL)
def test_within_a_boot_the_wall_clock_is_of_no_account(
    up_s: float, later_s: float, wall_s: float, other_s: float
) -> None:
    assert age_s(at(up_s, wall_s), at(up_s + later_s, other_s)) == (up_s + later_s) - up_s


@given(UP, UP, WALL, WALL)
def test_over_a_boot_it_is_at_least_as_long_ago_as_the_host_is_up(
    then_s: float, up_s: float, wall_s: float, other_s: float
) -> None:
    age = age_s(at(then_s, wall_s), at(up_s, other_s, "b"))
    assert age >= up_s
    assert age >= other_s - wall_s


@given(st.sampled_from([-TEN_YEARS_S, 0.0, TEN_YEARS_S]), st.floats(0, 60), st.booleans())
def test_a_backoff_ends_in_its_own_time_whatever_the_clocks_do(
    jump_s: float, backoff_s: float, booted: bool
) -> None:
    facts = VmFacts(slot=0, crashes=(at(500.0),), backoff_s=backoff_s)
    boot, up_s = ("b", 0.0) if booted else ("a", 500.0)
    now = at(up_s, 1e9 + jump_s, boot)
    assert 0 <= backoff_left_s(facts, now) <= backoff_s
    later = at(up_s + backoff_s, 1e9 + jump_s, boot)
    assert backoff_left_s(facts, later) < 1e-6
    if not booted:
        assert backoff_left_s(facts, now) == backoff_s


def test_crashes_are_bounded_and_only_those_of_the_window_count() -> None:
    facts = VmFacts(slot=0)
    for n in range(50):
        crashes = crashes_after(facts, EndKind.CRASH, at(float(n)), 600.0, 5)
        facts = VmFacts(slot=0, crashes=crashes)
    assert len(facts.crashes) == 8
    assert crashes_after(facts, EndKind.STOP, at(50.0), 600.0, 5) == facts.crashes
    assert crashes_after(facts, EndKind.HOST_REBOOT, at(50.0), 600.0, 5) == facts.crashes
    assert len(crashes_after(facts, EndKind.CRASH, at(1000.0), 600.0, 5)) == 1


def test_a_loop_is_shown_while_it_lasts() -> None:
    facts = VmFacts(slot=0, crashes=(at(1.0, 1e9), at(20.0, 1e9 + 19)))
    assert loop_since(facts, at(30.0), 600.0) == "2001-09-09T01:46:40.000Z"
    assert loop_since(facts, at(700.0), 600.0) == ""


def test_the_next_restart_is_shown_steadily() -> None:
    facts = VmFacts(slot=0, crashes=(at(100.0),), backoff_s=16.0)
    first = next_restart(facts, at(100.0, 1e9), "")
    assert first == "2001-09-09T01:46:56.000Z"
    for step in range(1, 16):
        assert next_restart(facts, at(100.0 + step, 1e9 + step + 0.4), first) == first
    assert next_restart(facts, at(116.0, 1e9 + 16), first) == ""
