"""What a new spec does to a VM that runs, and what its status says about it meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from chv.agent.records import WorkerRow
from chv.agent.vm.pending import pending_changes
from chv.common.wire.resources import BootSpec, CloudInitSpec, VirtualMachineSpec
from chv.vmm.driver import VmmConfig
from tests.sim.bench import Bench, bare, everything, image, open_bench, vm
from tests.sim.virtual import simulated

RUNNING = VirtualMachineSpec(memory="300Mi", cpus=2)


def row(spec: VirtualMachineSpec | None = RUNNING) -> WorkerRow:
    config = VmmConfig(
        vm_id="u",
        name="web",
        worker_id="w",
        cpus=2,
        memory_bytes=300 << 20,
        runtime_dir="/r",
        uuid="u",
    )
    return WorkerRow(
        vm_uid="u", worker_id="w", driver="qemu", config=config, generation=1, spec=spec
    )


async def applied(bench: Bench, *objects: dict[str, Any]) -> str:
    """Apply and return what the last operation says in the end."""
    reply = await bench.apply(*objects)
    return (await bench.final(reply.results[-1].operation_id)).message


@simulated
async def test_what_takes_effect_at_the_next_start_is_told_until_then() -> None:
    async with open_bench() as bench:
        assert await applied(bench, *everything()) == "running"
        assert bench.condition("RestartRequired") == ("False", "AsStarted")
        told = await applied(bench, vm(memory="256Mi", cpus=2))
        assert told == "stored; takes effect at the next start: cpus, memory"
        seen = await bench.until("RestartRequired")
        assert (seen.status.vmm.cpus, seen.status.vmm.memory) == (1, "128Mi")
        found = next(c for c in seen.status.conditions if c.type == "RestartRequired")
        assert found.message == "cpus: 1 run, 2 wanted; memory: 128Mi runs, 256Mi wanted"
        assert found.evidence == "the VMM was started from generation 1"
        await bench.final((await bench.act("restart", force=True)).id)
        seen = await bench.until("RestartRequired", status="False")
        assert (seen.status.vmm.cpus, seen.status.vmm.memory) == (2, "256Mi")


@simulated
async def test_within_its_maxima_a_running_vm_gets_cpus_and_memory_at_once() -> None:
    async with open_bench() as bench:
        assert await applied(bench, *everything(maxCpus=4, maxMemory="384Mi")) == "running"
        process = bench.process("web")
        assert process is not None
        for cpus, memory in ((3, "256Mi"), (2, "384Mi")):
            wanted: dict[str, Any] = {
                "maxCpus": 4,
                "maxMemory": "384Mi",
                "cpus": cpus,
                "memory": memory,
            }
            assert await applied(bench, vm(**wanted)) == "running"
            assert (process.cpus, process.memory_bytes >> 20) == (cpus, int(memory[:3]))
            seen = bench.get("VirtualMachine", "web").status.vmm
            assert (seen.cpus, seen.memory) == (cpus, memory)
            assert bench.condition("RestartRequired") == ("False", "AsStarted")
        assert bench.process("web") is process


@pytest.mark.parametrize(
    ("wanted", "fields"),
    [
        ({"memory": "128Mi"}, "memory"),  # less
        ({"memory": "300Mi", "maxMemory": "428Mi"}, "memory, maxMemory"),  # no whole step
        ({"cpus": 8, "maxCpus": 8}, "cpus, maxCpus"),  # more than it was started for
    ],
)
@simulated
async def test_what_a_running_vm_cannot_take_up_waits_for_the_next_start(
    wanted: dict[str, Any], fields: str
) -> None:
    start: dict[str, Any] = {"memory": "256Mi", "maxCpus": 4, "maxMemory": "512Mi"}
    async with open_bench() as bench:
        await applied(bench, *everything(**start))
        told = await applied(bench, vm(**start | wanted))
        assert told == f"stored; takes effect at the next start: {fields}"
        process = bench.process("web")
        assert process is not None
        assert (process.cpus, process.memory_bytes >> 20) == (1, 256)


@simulated
async def test_a_spec_that_goes_back_to_what_runs_asks_for_no_restart() -> None:
    async with open_bench() as bench:
        await applied(bench, image(), bare())
        await applied(bench, bare(memory="256Mi"))
        assert await applied(bench, bare()) == "running"
        assert bench.condition("RestartRequired") == ("False", "AsStarted")


@simulated
async def test_what_a_vmm_was_started_with_outlives_the_agent() -> None:
    async with open_bench() as bench:
        await applied(bench, image(), bare(cloudInit={"userData": "#cloud-config"}))
    machine = bench.machine
    machine.host.exits = type(machine.host.exits)()
    async with open_bench(machine) as bench:
        told = await applied(bench, bare(cloudInit={"userData": "runcmd: [ls]"}))
        assert told == "stored; takes effect at the next start: cloudInit.userData"
        assert bench.condition("RestartRequired") == ("True", "SpecChanged")


@simulated
async def test_what_changes_at_once_asks_for_no_restart_and_reaches_the_network() -> None:
    async with open_bench() as bench:
        await applied(bench, *everything())
        told = await applied(bench, vm(guestPorts=[22, 80], shutdownTimeout="20s"))
        assert told == "running"
        assert bench.condition("RestartRequired") == ("False", "AsStarted")
        (nic,) = bench.machine.host.nwd.nics.values()
        assert nic.generation == 2


@simulated
async def test_a_stopped_vm_needs_no_restart() -> None:
    async with open_bench() as bench:
        await applied(bench, image(), bare())
        await bench.final((await bench.act("stop", force=True)).id)
        await applied(bench, bare(memory="256Mi", runStrategy="Halted"))
        seen = bench.get("VirtualMachine", "web")
        assert bench.condition("RestartRequired") == ("False", "NotRunning")
        assert (seen.status.vmm.cpus, seen.status.vmm.memory) == (0, "")


@pytest.mark.parametrize(
    ("wanted", "fields"),
    [
        ({"memory": "307200Ki"}, []),  # the same in other words
        ({"cpus": 3}, ["cpus"]),
        ({"boot": BootSpec(cmdline="quiet")}, ["boot.cmdline"]),
        ({"cloud_init": CloudInitSpec(hostname="h", ssh_authorized_keys=["k"])},
         ["cloudInit.hostname", "cloudInit.sshAuthorizedKeys"]),
        ({"guest_ports": [80], "shutdown_timeout": "1s", "run_strategy": "Always"}, []),
    ],
)  # fmt: skip
def test_fields_of_the_next_start(wanted: dict[str, Any], fields: list[str]) -> None:
    spec = VirtualMachineSpec(**{"memory": "300Mi", "cpus": 2, **wanted})
    assert list(pending_changes(row(), spec)) == fields


def test_a_vmm_recorded_without_its_spec_is_judged_by_its_configuration() -> None:
    wanted = VirtualMachineSpec(memory="420Mi", cpus=2, boot=BootSpec(cmdline="quiet"))
    found = pending_changes(row(spec=None), wanted)
    assert found == {"memory": "300Mi runs, 420Mi wanted"}
