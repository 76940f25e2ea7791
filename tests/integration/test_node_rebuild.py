"""Clones, rebuilds and ephemeral VMs with a guest that reads its disks, on a real node.

The probe writes a pattern of a seed and verifies it in a later boot: so a guest itself says
whether a disk is the one that it wrote, a copy of it, or another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from chv.probe.device_events import DiskDone
from tests.integration.live_node import need, wait_for
from tests.probe_node import VMMS, ProbeNode, probe_node, vm, volume

pytestmark = [pytest.mark.root, need()]

TINY = """
apiVersion: compute.chv.dev/v1alpha1
kind: Image
metadata: {name: tiny}
spec: {builtin: tiny}
"""
OWNED = """
apiVersion: compute.chv.dev/v1alpha1
kind: Volume
metadata:
  name: own
  ownerReferences: [{apiVersion: compute.chv.dev/v1alpha1, kind: VirtualMachine, name: p}]
spec: {size: 16Mi, format: raw}
"""
ROOT = volume("root", source="{image: tiny}")
BOTH = ("root", "data")


@pytest.fixture(scope="module", params=VMMS)
def probes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProbeNode]:
    with probe_node(request.param, tmp_path_factory.mktemp("probe")) as running:
        running.apply(TINY)
        yield running


def guest(probes: ProbeNode, plan: str, disks: tuple[str, ...] = BOTH, spec: str = "") -> str:
    # Disk 0 is the seed disk.
    command = " ".join(f"disk.{n}={plan}" for n in range(1, len(disks) + 1))
    return vm(probes.vmm, command, disks=disks, networks=("lan",), spec=spec)


def told(probes: ProbeNode, plan: str, name: str = "p", disks: int = 2) -> dict[int, bool]:
    """Return whether the last such plan was right, by disk."""

    def ended() -> dict[int, bool]:
        found = [each for each in probes.events(DiskDone, name) if each.plan == plan]
        return {each.disk: each.ok for each in found} if len(found) >= disks else {}

    seen: dict[int, bool] = wait_for(ended, 60, f"{plan} on {disks} disks of {name}")
    return seen


def volumes(probes: ProbeNode) -> dict[str, str]:
    listed = json.loads(probes.node.cli("get", "volume", "-o", "json").stdout)
    return {each["metadata"]["name"]: each["metadata"]["uid"] for each in listed}


def status(probes: ProbeNode) -> dict[str, Any]:
    return probes.node.status("p")


def clean(probes: ProbeNode, *names: str) -> None:
    probes.node.cli("delete", "vm", "p")
    for name in names:
        probes.node.cli("delete", "volume", name)


@pytest.mark.slow
def test_a_clone_reads_what_its_source_has_written(probes: ProbeNode) -> None:
    probes.apply(ROOT, volume("data"), guest(probes, "write,seed=7"))
    assert told(probes, "write") == {1: True, 2: True}
    probes.node.cli("clone", "p", "two", "--no-start")
    probes.node.cli("clone", "p", "three", "--full", "--no-start")
    for name in ("two", "three"):
        disks = tuple(f"{name}-{disk}" for disk in BOTH)
        text = guest(probes, "verify,seed=7", disks)
        for disk in BOTH:
            text = text.replace(f"name: {name}-{disk}", f"name: {disk}")
        probes.apply(text.replace("name: p}", f"name: {name}}}"))
        probes.node.cli("start", name)
        assert told(probes, "verify", name) == {1: True, 2: True}
        probes.node.cli("delete", "vm", name)
        for disk in disks:
            probes.node.cli("delete", "volume", disk)
    clean(probes)
    wait_for(lambda: set(volumes(probes)) == set(BOTH), 30, "the clones are gone")
    clean_volumes(probes)


def clean_volumes(probes: ProbeNode) -> None:
    for name in BOTH:
        probes.node.cli("delete", "volume", name)


def test_a_rebuilt_vm_has_another_root_disk_and_all_else_as_it_was(probes: ProbeNode) -> None:
    probes.apply(ROOT, volume("data"), guest(probes, "write,seed=9"))
    assert told(probes, "write") == {1: True, 2: True}
    before, had = status(probes), volumes(probes)
    probes.apply(guest(probes, "verify,seed=9"))  # from the next start on
    refused = probes.node.cli("rebuild", "p", check=False)
    assert refused.returncode == 2 and "is lost for good" in refused.stderr
    done = probes.node.cli("rebuild", "p", "--yes", "--reason", "broken", "--json")
    assert json.loads(done.stdout)["state"] == "Succeeded"
    assert told(probes, "verify") == {1: False, 2: True}
    after = status(probes)
    for field in ("sshHostKey", "interfaces"):
        assert after[field] == before[field]
    has = volumes(probes)
    assert has["data"] == had["data"] and has["root"] != had["root"]
    wait_for(lambda: set(volumes(probes)) == set(BOTH), 30, "the former disk is gone")
    probes.node.cli("rebuild", "p", "--keep-old")
    assert volumes(probes)["root-before-rebuild"] == has["root"]
    clean(probes, "root-before-rebuild", *BOTH)


def test_an_ephemeral_vm_is_gone_with_its_own_disk_once_its_guest_is_off(
    probes: ProbeNode,
) -> None:
    spec = "  ephemeral: true"
    text = guest(probes, "write,seed=3", ("own", "data"), spec).replace(
        'disk.2=write,seed=3"', 'disk.2=write,seed=3 end=off"'
    )
    probes.apply(OWNED, volume("data"), text, check=False)
    wait_for(lambda: set(volumes(probes)) == {"data"}, 60, "the VM and its disk are gone")
    assert probes.node.cli("get", "vm", "p", check=False).returncode == 4
    last = json.loads(probes.node.cli("ops", "ls", "--limit", "20", "-o", "json").stdout)
    (gone,) = [each for each in last if (each["kind"], each["name"], each["verb"]) == ("VirtualMachine", "p", "delete") and "ephemeral" in each.get("reason", "")]  # fmt: skip  # noqa: E501
    assert gone["state"] == "Succeeded" and "GuestShutdown" in gone["reason"]
    probes.node.cli("delete", "volume", "data")
