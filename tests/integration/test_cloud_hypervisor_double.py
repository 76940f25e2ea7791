"""What the double can be made to do that no real program at hand does: its switches.

Other versions are known by upstream's notes alone; the driver is held to read them.
"""

from __future__ import annotations

import signal
import subprocess

import pytest

from chv.common.errors import FailedPrecondition, OutcomeUnknown, Unavailable
from chv.vmm.driver import VmmState
from tests.integration.cloud_hypervisor_api import (
    DOUBLE,
    ROOT,
    Vmm,
    running,
    spawn,
    switched,
)
from tests.vmm_rig_probe import CloudHypervisorRig
from tests.vmm_rigs import open_rig


def ended(vmm: Vmm) -> str:
    """Wait for the end; returns what it said."""
    try:
        vmm.code()
        return (vmm.directory / "log").read_text()
    finally:
        vmm.end()


def test_the_double_is_of_the_version_that_it_is_told_to_be() -> None:
    with running("double", **switched(version="52.0.0")) as vmm:
        found = vmm.get("vmm.ping").json
        assert (found["version"], found["build_version"]) == ("52.0.0", "v52.0.0")
        assert vmm.get("vm.info").status == 500  # 404 came with 53
        vmm.start(platform={"uuid": "8d8e7a9c-0000-4000-8000-000000000001"})
        assert vmm.info()["config"]["vsock"] is None  # and left out since 53
    told = subprocess.run(
        [*DOUBLE, "--version"],
        env={"PYTHONPATH": str(ROOT)} | switched(version="51.2.0"),
        capture_output=True,
        check=True,
    )
    assert told.stdout.startswith(b"cloud-hypervisor v51.2.0\n")


def test_before_version_52_a_vmm_does_not_stay_when_its_guest_is_off() -> None:
    old = switched(version="51.2.0")
    said = ended(spawn("double", ("--no-shutdown",), **old))
    assert "--no-shutdown" in said
    with running("double", (), **old) as vmm:
        vmm.did("vm.create", vmm.config(payload={"kernel": "/dev/null", "cmdline": "end=off"}))
        vmm.did("vm.boot")
        assert vmm.code() == 0


def test_a_crash_comes_in_place_of_an_answer() -> None:
    with running("double", **switched(crash={"vm.boot": signal.SIGSEGV})) as vmm:
        vmm.did("vm.create", vmm.config())
        assert vmm.put("vm.boot").head == b""
        assert vmm.code() == -signal.SIGSEGV


def test_a_build_for_debugging_dumps_memory() -> None:
    with running("double", **switched(guest_debug=True)) as vmm:
        assert "guest_debug" in vmm.get("vmm.ping").json["features"]
        vmm.start()
        core = vmm.directory / "core"
        vmm.did("vm.coredump", {"destination_url": f"file://{core}"})
        assert core.read_bytes().startswith(b"\x7fELF")
        assert vmm.refused("vm.coredump", {"destination_url": f"file://{core}"})


def test_without_kvm_it_ends_before_anybody_is_answered() -> None:
    vmm = spawn("double", **switched(kvm=False))
    said = ended(vmm)
    assert vmm.process.returncode == 1
    assert "hypervisor" in said


def test_without_nested_state_a_snapshot_is_refused_and_the_vm_stays_paused() -> None:
    with running("double", **switched(nested_state=False)) as vmm:
        vmm.start()
        vmm.did("vm.pause")
        (vmm.directory / "saved").mkdir()
        said = vmm.refused("vm.snapshot", {"destination_url": f"file://{vmm.directory}/saved"})
        assert "GetNestedState" in said[-1]
        assert vmm.state() == "Paused"


def test_a_switch_that_is_not_known_ends_the_double() -> None:
    assert "sloow" in ended(spawn("double", **switched(sloow={})))


@pytest.mark.root
async def test_the_driver_reads_a_version_52_as_it_reads_53() -> None:
    async with open_rig("cloud_hypervisor_double") as rig:
        assert isinstance(rig, CloudHypervisorRig)
        rig.switches = {"version": "52.0.0"}
        await rig.launch()
        driver, directory = rig.driver, rig.runtime_dir
        await driver.boot(directory)
        await rig.ready()
        seen = await driver.observe(directory)
        assert (seen.state, seen.version) == (VmmState.RUNNING, "52.0.0")
        await driver.pause(directory)
        await driver.snapshot(directory, rig.save_to())
        await driver.resume(directory)
        with pytest.raises(FailedPrecondition, match="goes on"):
            await driver.send(directory, directory / "nobody.sock")
        assert (await driver.observe(directory)).state is VmmState.RUNNING


@pytest.mark.root
async def test_the_driver_calls_a_vmm_that_crashed_in_a_boot_unavailable() -> None:
    async with open_rig("cloud_hypervisor_double") as rig:
        assert isinstance(rig, CloudHypervisorRig)
        rig.switches = {"crash": {"vm.boot": signal.SIGKILL}}
        await rig.launch()
        with pytest.raises(OutcomeUnknown, match="connection lost"):
            await rig.driver.boot(rig.runtime_dir)
        await rig.gone()
        with pytest.raises(Unavailable):
            await rig.driver.observe(rig.runtime_dir)
