"""A file that says nothing of runStrategy leaves a stopped VM stopped."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sim.bench import Bench, bare, image, open_bench
from tests.sim.virtual import simulated


async def applied(bench: Bench, **spec: Any) -> str:
    """Apply the VM, wait for the end of it, and return what it is to do."""
    (result,) = (await bench.apply(bare(**spec))).results
    if result.operation_id:
        assert (await bench.final(result.operation_id)).state == "Succeeded"
    return str(bench.get("VirtualMachine", "web").spec.run_strategy)


async def begin(bench: Bench, **spec: Any) -> None:
    await bench.apply(image())
    await applied(bench, **spec)


async def stop(bench: Bench) -> None:
    await bench.final((await bench.act("stop", force=True)).id)


@simulated
async def test_a_stopped_vm_stays_stopped_however_often_its_file_is_applied() -> None:
    async with open_bench() as bench:
        await begin(bench)
        await stop(bench)
        generation = bench.get("VirtualMachine", "web").metadata.generation
        assert await applied(bench) == "Halted"
        assert bench.get("VirtualMachine", "web").metadata.generation == generation
        for cpus in (2, 3, 4):
            assert await applied(bench, cpus=cpus) == "Halted"
        assert bench.get("VirtualMachine", "web").status.phase == "Stopped"


@simulated
async def test_start_makes_it_what_it_was_after_an_apply() -> None:
    async with open_bench() as bench:
        await begin(bench, runStrategy="Always")
        await stop(bench)
        assert await applied(bench, cpus=2) == "Halted"
        await bench.final((await bench.act("start")).id)
        assert bench.get("VirtualMachine", "web").spec.run_strategy == "Always"


@simulated
@pytest.mark.parametrize("strategy", ["Always", "RerunOnFailure"])
async def test_a_file_that_says_it_starts_it(strategy: str) -> None:
    async with open_bench() as bench:
        await begin(bench)
        await stop(bench)
        assert await applied(bench, runStrategy=strategy) == strategy
        assert bench.get("VirtualMachine", "web").status.phase == "Running"


@simulated
async def test_what_a_file_said_itself_is_replaced() -> None:
    async with open_bench() as bench:
        await begin(bench, runStrategy="Halted")
        assert await applied(bench) == "RerunOnFailure"
        assert await applied(bench, runStrategy="Halted") == "Halted"
        assert await applied(bench, runStrategy="Halted", cpus=2) == "Halted"
        assert await applied(bench, cpus=2) == "RerunOnFailure"


@simulated
async def test_a_stop_after_a_file_that_said_halted_counts() -> None:
    async with open_bench() as bench:
        await begin(bench, runStrategy="Halted")
        await bench.final((await bench.act("start")).id)
        await stop(bench)
        assert await applied(bench) == "Halted"


@simulated
async def test_a_file_that_no_longer_says_always_means_the_default() -> None:
    async with open_bench() as bench:
        await begin(bench, runStrategy="Always")
        assert await applied(bench) == "RerunOnFailure"
