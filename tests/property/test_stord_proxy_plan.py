"""The planner of stord for VMs with in-flight proxies: deaths and kills anywhere.

A model checks at every step what a VMM relies on: a path that it may be using never vanishes while
its VM goes on, and nothing it can reach leads to an export that was not primed.
"""

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
    StartProxy,
    Step,
    StopBackend,
    StopProxy,
    Unpublish,
    Wanted,
    plan,
)
from chv.stord.qsd.graph import export_id, format_node, is_of, lock_node, throttle_node

VOLUMES = [f"{number:08x}-0000-0000-0000-000000000000" for number in (0xA1, 0xB2)]


@dataclass
class World:
    """A storage daemon, proxies, and the run directory."""

    alive: bool = False
    remains: bool = False
    nodes: set[str] = field(default_factory=set)
    exports: set[str] = field(default_factory=set)
    primed: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)
    proxies: set[str] = field(default_factory=set)
    meant: set[str] = field(default_factory=set)
    unplaced: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)  # a running guest uses their paths

    def observe(self) -> Observed:
        alive = self.alive
        return Observed(
            alive=alive,
            nodes=frozenset(self.nodes if alive else ()),
            exports=frozenset(self.exports if alive else ()),
            paths=frozenset(self.paths),
            proxies=frozenset(self.proxies),
            unplaced=frozenset(self.unplaced),
            proxy_remains=frozenset(self.meant),
            primed=frozenset(self.primed),
            remains=self.remains,
        )

    def die(self) -> None:
        self.alive = False
        self.nodes, self.exports = set(), set()

    def apply(self, step: Step, *, cut: bool = False) -> None:
        """Do a step; `cut`: a start of a proxy gets no further than the proxy itself."""
        match step:
            case Unpublish(volume):
                assert volume not in self.held, "a path vanishes under a running guest"
                self.paths.discard(volume)
                self.unplaced.discard(volume)
            case RemoveExport(volume):
                self.exports.remove(export_id(volume))
                self.primed.discard(volume)
            case RemoveNodes(volume):
                assert export_id(volume) not in self.exports
                self.nodes -= {node for node in self.nodes if is_of(node, volume)}
            case StopBackend():
                assert not self.paths
                assert not self.proxies
                self.die()
                self.remains = False
                self.primed = set()
            case StartBackend():
                assert not self.alive
                self.alive = self.remains = True
                self.primed = set()
            case AddDisk(volume, _):
                assert not any(is_of(node, volume) for node in self.nodes)
                self.nodes |= {lock_node(volume), format_node(volume, 0), throttle_node(volume)}
                assert export_id(volume) not in self.exports
                self.exports.add(export_id(volume))
            case Publish(volume, proxied):
                assert proxied
                assert export_id(volume) in self.exports
                self.primed.add(volume)
            case StopProxy(volume):
                assert volume not in self.paths, "a path leads to nobody"
                self.proxies.discard(volume)
                self.meant.discard(volume)
            case StartProxy(volume):
                self.meant.add(volume)
                self.proxies.add(volume)
                self.unplaced.add(volume)
                if not cut:
                    self.unplaced.discard(volume)
                    self.paths.add(volume)

    def is_served(self, volumes: list[str]) -> bool:
        wanted = set(volumes)
        exported = {export_id(item) for item in wanted}
        whole = self.paths == self.proxies == self.primed == self.meant == wanted
        return whole and self.exports == exported and not self.unplaced


wanted = st.lists(st.sampled_from(VOLUMES), unique=True, min_size=1)
# After how many steps an attempt is cut short, whether its last one is half done, and who dies.
cuts = st.lists(
    st.tuples(st.integers(0, 12), st.booleans(), st.sampled_from(["", "daemon", "proxy", "both"])),
    max_size=6,
)


def desire(volumes: list[str], *, published: bool, phase: str) -> Desired:
    items = (Wanted(volume_id=item, proxied=True, published=published) for item in volumes)
    return Desired(
        attachments=tuple(items),
        may_start=phase in ("starting", "restarting"),
        restarting=phase == "restarting",
    )


def run(world: World, goal: Desired, length: int = 99, *, half: bool = False) -> None:
    steps = plan(goal, world.observe(), tuple(VOLUMES))[:length]
    for index, step in enumerate(steps):
        world.apply(step, cut=half and index == len(steps) - 1)


def kill(world: World, who: str) -> None:
    if who in ("daemon", "both"):
        world.die()
    if who in ("proxy", "both"):
        world.proxies.clear()


def served(volumes: list[str]) -> World:
    world = World()
    run(world, desire(volumes, published=False, phase="starting"))
    assert world.is_served(volumes)
    return world


@given(first=wanted, then=wanted, cuts=cuts)
def test_attachments_with_proxies_converge_from_wherever_they_were_cut_short(
    first: list[str], then: list[str], cuts: list[tuple[int, bool, str]]
) -> None:
    world = World()
    for index, (length, half, who) in enumerate(cuts):
        goal = desire(then if index % 2 else first, published=False, phase="starting")
        run(world, goal, length, half=half)
        kill(world, who)
    goal = desire(then, published=False, phase="starting")

    run(world, goal)

    assert plan(goal, world.observe(), tuple(VOLUMES)) == []
    assert world.is_served(then)


@given(volumes=wanted, cuts=cuts)
def test_a_restart_under_a_running_guest_never_takes_its_path_away(
    volumes: list[str], cuts: list[tuple[int, bool, str]]
) -> None:
    world = served(volumes)
    world.held = set(volumes)
    goal = desire(volumes, published=True, phase="restarting")
    world.die()
    for length, half, who in cuts:
        run(world, goal, length, half=half)
        kill(world, who)

    run(world, goal)

    assert plan(goal, world.observe(), tuple(VOLUMES)) == []
    assert world.is_served(volumes)


@given(volumes=wanted)
def test_a_path_that_somebody_removed_is_made_again_by_a_restart(volumes: list[str]) -> None:
    world = served(volumes)
    world.die()
    world.paths.clear()

    run(world, desire(volumes, published=True, phase="restarting"))

    assert world.is_served(volumes)


@given(volumes=wanted, cuts=cuts)
def test_a_dead_proxy_before_a_live_storage_daemon_is_replaced_and_nothing_else_is_touched(
    volumes: list[str], cuts: list[tuple[int, bool, str]]
) -> None:
    world = served(volumes)
    world.held = set(volumes)
    goal = desire(volumes, published=True, phase="serving")
    world.proxies.clear()
    for length, half, _who in cuts:
        steps = plan(goal, world.observe(), tuple(VOLUMES))
        assert {type(step) for step in steps} <= {StartProxy}
        run(world, goal, length, half=half)
        world.proxies.clear()

    run(world, goal)

    assert world.is_served(volumes)


@given(volumes=wanted, cuts=cuts)
def test_without_leave_to_start_a_dead_storage_daemon_takes_paths_and_proxies_along(
    volumes: list[str], cuts: list[tuple[int, bool, str]]
) -> None:
    world = served(volumes)
    world.die()
    goal = desire(volumes, published=True, phase="lost")
    for length, half, _who in [*cuts, (99, False, "")]:
        run(world, goal, length, half=half)

    assert not world.alive
    assert world.paths == world.proxies == world.meant == set()


@given(volumes=wanted, cuts=cuts)
def test_nothing_is_left_when_nothing_is_wanted(
    volumes: list[str], cuts: list[tuple[int, bool, str]]
) -> None:
    world = World()
    for length, half, who in cuts:
        run(world, desire(volumes, published=False, phase="starting"), length, half=half)
        kill(world, who)

    run(world, Desired())

    assert plan(Desired(), world.observe(), tuple(VOLUMES)) == []
    assert world == World()
