"""The planner of stord against a model of a storage daemon, with kills and deaths anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from chv.stord.plan import (
    AddDisk,
    Desired,
    Observed,
    Publish,
    RemoveExport,
    RemoveNodes,
    StartBackend,
    Step,
    StopBackend,
    Unpublish,
    Wanted,
    plan,
)
from chv.stord.qsd.graph import export_id, format_node, is_of, lock_node, throttle_node

VOLUMES = [f"{number:08x}-0000-0000-0000-000000000000" for number in (0xA1, 0xB2, 0xC3)]


def nodes_of(volume: str, layers: int) -> set[str]:
    formats = {format_node(volume, number) for number in range(layers)}
    return formats | {lock_node(volume), throttle_node(volume)}


@dataclass
class World:
    """A storage daemon and its run directory; every step checks what must hold before it."""

    alive: bool = False
    remains: bool = False
    nodes: set[str] = field(default_factory=set)
    exports: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)
    starts: int = 0
    layers: int = 1  # of every volume

    def observe(self) -> Observed:
        alive = self.alive
        return Observed(
            alive=alive,
            nodes=frozenset(self.nodes if alive else ()),
            exports=frozenset(self.exports if alive else ()),
            paths=frozenset(self.paths),
            remains=self.remains,
        )

    def die(self) -> None:
        self.alive = False
        self.nodes, self.exports = set(), set()

    def apply(self, step: Step) -> None:
        match step:
            case Unpublish(volume):
                self.paths.discard(volume)
            case RemoveExport(volume):
                assert self.alive
                assert volume not in self.paths, "an export ends under a path that still exists"
                self.exports.remove(export_id(volume))
            case RemoveNodes(volume):
                assert self.alive
                assert export_id(volume) not in self.exports, "the node is still exported"
                self.nodes -= {node for node in self.nodes if is_of(node, volume)}
            case StopBackend():
                assert not self.paths, "a path outlives its storage daemon"
                self.die()
                self.remains = False
            case StartBackend():
                assert not self.alive, "a second storage daemon"
                assert not self.paths, "an old path meets a new incarnation"
                self.alive = self.remains = True
                self.starts += 1
            case AddDisk(volume, _):
                assert self.alive
                assert not any(is_of(node, volume) for node in self.nodes)
                self.nodes |= nodes_of(volume, self.layers)
                assert export_id(volume) not in self.exports
                self.exports.add(export_id(volume))
            case Publish(volume):
                assert export_id(volume) in self.exports
                self.paths.add(volume)


wanted = st.lists(st.sampled_from(VOLUMES), unique=True)
# After how many steps each attempt is cut short, and whether the storage daemon dies then.
cuts = st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=6)


def desire(volumes: list[str], published: set[str], *, may_start: bool = True) -> Desired:
    items = (Wanted(volume_id=item, published=item in published) for item in volumes)
    return Desired(attachments=tuple(items), may_start=may_start)


@given(first=wanted, then=wanted, cuts=cuts, layers=st.integers(1, 4))
def test_plans_converge_from_wherever_they_were_cut_short(
    first: list[str], then: list[str], cuts: list[tuple[int, bool]], layers: int
) -> None:
    world = World(layers=layers)
    for index, (length, dies) in enumerate(cuts):
        goal = desire(first if index % 2 == 0 else then, set())
        for step in plan(goal, world.observe(), tuple(VOLUMES))[:length]:
            world.apply(step)
        if dies:
            world.die()
    goal = desire(then, set())

    for step in plan(goal, world.observe(), tuple(VOLUMES)):
        world.apply(step)

    assert plan(goal, world.observe(), tuple(VOLUMES)) == []
    assert world.paths == set(then)
    assert world.exports == {export_id(item) for item in then}
    assert world.alive == bool(then)
    assert world.remains == bool(then)


@given(volumes=wanted, keep=wanted, cuts=cuts)
def test_a_published_export_that_stays_wanted_is_never_touched(
    volumes: list[str], keep: list[str], cuts: list[tuple[int, bool]]
) -> None:
    world = World()
    for step in plan(desire(volumes, set()), world.observe(), tuple(VOLUMES)):
        world.apply(step)
    stay = [item for item in keep if item in volumes]

    for length, _dies in [*cuts, (99, False)]:
        goal = desire(keep, set(volumes), may_start=False)
        for step in plan(goal, world.observe(), tuple(VOLUMES))[:length]:
            touched = getattr(step, "volume_id", "")
            assert touched not in stay
            world.apply(step)

    assert set(stay) <= world.paths


@given(volumes=wanted, lost_paths=st.booleans())
def test_no_new_incarnation_starts_unless_it_may(volumes: list[str], lost_paths: bool) -> None:
    world = World()
    for step in plan(desire(volumes, set()), world.observe(), tuple(VOLUMES)):
        world.apply(step)
    starts = world.starts
    world.die()
    if lost_paths:
        world.paths.clear()

    for step in plan(desire(volumes, set(volumes), may_start=False), world.observe()):
        world.apply(step)

    assert world.starts == starts
    assert world.paths == set()


def test_an_export_that_vanished_from_a_live_storage_daemon_is_not_made_again_unasked() -> None:
    world = World()
    for step in plan(desire(VOLUMES, set()), world.observe()):
        world.apply(step)
    world.exports.discard(export_id(VOLUMES[0]))

    steps = plan(desire(VOLUMES, set(VOLUMES), may_start=False), world.observe())

    assert steps == [Unpublish(VOLUMES[0]), RemoveNodes(VOLUMES[0])]


@given(volume=st.sampled_from(VOLUMES), left=st.data(), layers=st.integers(1, 4))
def test_any_rest_of_a_volume_is_removed_before_it_is_added_again(
    volume: str, left: st.DataObject, layers: int
) -> None:
    """A removal or an addition that was cut short leaves any part of the volume's nodes."""
    rest = left.draw(st.sets(st.sampled_from(sorted(nodes_of(volume, layers))), min_size=1))
    observed = Observed(alive=True, remains=True, nodes=frozenset(rest))

    steps = plan(desire([volume], set()), observed)

    assert [type(step) for step in steps] == [RemoveNodes, AddDisk, Publish]
