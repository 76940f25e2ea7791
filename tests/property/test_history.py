"""Any sequence of changes: no generation is lost, and a rollback gives exactly what was there."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from chv.common import virtual_time
from chv.common.errors import FailedPrecondition
from chv.common.wire import agent_history as wire
from chv.common.wire.resources import VirtualMachineSpec
from tests.sim.bench import Bench, bare, image, open_bench
from tests.sim.world import Machine

VM = "VirtualMachine"
CHANGES = st.one_of(
    st.tuples(st.just("apply"), st.integers(1, 4), st.sampled_from(["256Mi", "512Mi"])),
    st.tuples(st.just("label"), st.sampled_from(["", "a", "b"]), st.none()),
    st.tuples(st.just("act"), st.sampled_from(["start", "stop", "restart"]), st.none()),
    st.tuples(st.just("back"), st.integers(0, 30), st.none()),
    st.tuples(st.just("die"), st.none(), st.none()),
)
State = tuple[VirtualMachineSpec, dict[str, str]]


@settings(max_examples=40, deadline=None)
@given(st.lists(CHANGES, max_size=14))
def test_a_rollback_to_n_gives_exactly_spec_n(changes: list[tuple[str, Any, Any]]) -> None:
    virtual_time.run(_run, changes)


async def _run(changes: list[tuple[str, Any, Any]]) -> None:
    machine: Machine | None = None
    known: dict[int, State] = {}
    for life in _lives(changes):
        if machine is not None:
            machine.chaos.life += 1  # so that its ids are new
        async with open_bench(machine) as bench:
            machine = bench.machine
            if not known:
                await bench.apply(image(), bare())
            _note(bench, known)
            for change in life:
                await _do(bench, change, known)
                _note(bench, known)
            await _check(bench, known)


def _lives(changes: list[tuple[str, Any, Any]]) -> list[list[tuple[str, Any, Any]]]:
    """Return the changes of each life of the agent."""
    lives: list[list[tuple[str, Any, Any]]] = [[]]
    for change in changes:
        if change[0] == "die":
            lives.append([])
        else:
            lives[-1].append(change)
    return lives


async def _do(bench: Bench, change: tuple[str, Any, Any], known: dict[int, State]) -> None:
    verb, first, second = change
    if verb == "apply":
        await bench.apply(bare(cpus=first, memory=second))
    elif verb == "label":
        document = bare()
        document["metadata"]["labels"] = {"tier": first} if first else {}
        await bench.apply(document)
    elif verb == "act":
        try:
            await bench.act(first)
        except FailedPrecondition:
            assert first == "restart"
    else:
        to = sorted(known)[first % len(known)]
        await bench.engine.history.rollback(
            wire.Rollback(kind=VM, name="web", to=to, requester="test")
        )
        assert _state(bench) == known[to]


def _state(bench: Bench) -> State:
    vm = bench.get(VM, "web")
    return vm.spec, vm.metadata.labels


def _note(bench: Bench, known: dict[int, State]) -> None:
    known[bench.get(VM, "web").metadata.generation] = _state(bench)


async def _check(bench: Bench, known: dict[int, State]) -> None:
    history = bench.engine.history
    rows = (await history.rows(wire.ListGenerations(kind=VM, name="web"))).generations
    newest = bench.get(VM, "web").metadata.generation
    assert [row.generation for row in rows] == list(range(newest, 0, -1))
    assert all(row.requester and row.at for row in rows)
    for generation, (spec, labels) in known.items():
        request = wire.GetGeneration(kind=VM, name="web", generation=generation)
        document = msgspec.json.decode((await history.get(request)).object)
        assert msgspec.convert(document["spec"], VirtualMachineSpec) == spec
        assert document["metadata"].get("labels", {}) == labels
