"""The blueprint by difference: after any history it is the one that would be drawn at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chv.common.layout import Layout
from chv.common.wire.nwd import Shape
from chv.nwd import blueprint
from chv.nwd.blueprint import Blueprint, Settings
from chv.nwd.kept import Kept
from chv.nwd.members import Members
from chv.nwd.nft import rules
from chv.nwd.nft.model import Group
from chv.nwd.policy import Policy
from chv.nwd.records import Network, Nic
from tests.property.nwd_rules_strategies import uid
from tests.unit.nwd.nwd_rows import network, nic

LAYOUT = Layout("abcdef", Path("/run"), Path("/var/lib"))
SETTINGS = Settings("169.254.64.0/18", "fd63:6876::/112", (), (), 3600)
GROUPS = [uid(0x100 + number) for number in range(3)]
NICS = 6

_changes = st.fixed_dictionaries(
    {},
    optional={
        "hostname": st.sampled_from(["web", "db"]),
        "groups": st.lists(st.sampled_from(GROUPS), unique=True, max_size=2).map(sorted),
        "connections_max": st.sampled_from([0, 7]),
        "guest_ports": st.sampled_from([[], [22, 80]]),
        "queues": st.sampled_from([1, 2]),
        "shape": st.sampled_from([Shape(), Shape(ingress_bps=10**6)]),
        "owner_uid": st.sampled_from([1, 2]),
    },
)
_step = st.tuples(st.integers(0, NICS - 1), st.none() | _changes)
_steps = st.lists(st.lists(_step, min_size=1, max_size=4), max_size=8)


@contextmanager
def without_memory() -> Iterator[None]:
    """Nothing that was drawn before is known in the block."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((blueprint, "_CROWDS"), (blueprint, "_FRAMES"), (rules, "_ROSTERS")):
            patch.setattr(module, name, Kept())
        yield


def content(drawn: Blueprint) -> tuple[Any, ...]:
    """Everything of a blueprint; of the rules what they come to, and what they are called."""
    ruleset = drawn.rules
    elements = {key: each for key, each in ruleset.all_elements().items() if each}
    texts = (drawn.files, drawn.configuration, ruleset.frame, ruleset.digest)
    return drawn.desired, texts, elements, dict(ruleset.chains), dict(ruleset.sets)


def draw(row: Network, nics: list[Nic]) -> Blueprint:
    policy = Policy(groups=[Group(group_id) for group_id in GROUPS])
    return blueprint.draw(LAYOUT, SETTINGS, row, nics, policy)


@settings(deadline=None)  # each step of a history is drawn twice
@given(_steps, st.sampled_from(["", "fd00:7::/64"]))
def test_a_blueprint_by_difference_is_the_one_that_is_drawn_at_once(
    steps: list[list[tuple[int, dict[str, Any] | None]]], subnet6: str
) -> None:
    row, members = network(subnet6=subnet6), Members()
    for step in steps:
        for number, changes in step:
            if changes is None:
                members.drop(uid(number))
                continue
            address6 = f"fd00:7::{number + 10:x}" if subnet6 else ""
            fresh = nic(row.network_id, number + 10, nic_id=uid(number), address6=address6)
            old = members.nics.get(uid(number), fresh)
            members.put(msgspec.structs.replace(old, **changes))
        nics = list(members.nics.values())
        by_difference = content(draw(row, nics))
        with without_memory():
            assert by_difference == content(draw(row, nics))


def test_a_change_of_one_nic_renders_that_one_alone() -> None:
    row = network()
    nics = [nic(row.network_id, number, nic_id=uid(number)) for number in range(2, 20)]
    before = draw(row, nics)
    after = draw(row, [*nics[:-1], msgspec.structs.replace(nics[-1], guest_ports=[80])])
    assert len(after.rules.parts - before.rules.parts) == 1
    assert len(before.rules.parts - after.rules.parts) == 1
    taps = {id(tap) for tap in before.desired.taps}
    assert sum(id(tap) not in taps for tap in after.desired.taps) == 1


def test_what_is_refused_once_is_rendered_when_it_is_right_and_no_trace_stays() -> None:
    row = network()
    good = nic(row.network_id, 2, nic_id=uid(2))
    bad = nic(row.network_id, 3, nic_id=uid(3), hostname="not.a\nlabel")
    draw(row, [good])
    for _ in range(2):
        with pytest.raises(ValueError, match="label"):
            draw(row, [good, bad])
    mended = msgspec.structs.replace(bad, hostname="right")
    by_difference = content(draw(row, [good, mended]))
    with without_memory():
        assert by_difference == content(draw(row, [good, mended]))
