"""A whole VM saved and brought back on a real node, seen from inside the guest.

On QEMU, and on the Cloud Hypervisor that `CHV_CLOUD_HYPERVISOR_TOLERANT` names, which bears a KVM
without nested state. The one that does not bear it must refuse, and its VM go on.
"""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest

from chv.probe.device_events import Acked, Lease, Records
from chv.probe.events import Beat, Boot, Event
from chv.probe.lines import parse_line
from tests.integration.live_node import need, wait_for
from tests.probe_node import ProbeNode, probe_node, saving_node, vm, volume

pytestmark = [pytest.mark.root, pytest.mark.slow, need()]
E = TypeVar("E", bound=Event)
WRITER = "disk=writer,every=20,seed=7,window=512 net=dhcp"


@pytest.fixture(scope="module", params=["qemu", "tolerant"])
def probes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProbeNode]:
    with saving_node(request.param, tmp_path_factory.mktemp("saved")) as running:
        yield running


@pytest.fixture
def writing(probes: ProbeNode) -> Iterator[ProbeNode]:
    """A guest that writes for ever; afterwards nothing of it is left."""
    yield from _written(probes)


def _written(probes: ProbeNode) -> Iterator[ProbeNode]:
    probes.apply(volume("data"), vm(probes.vmm, WRITER, disks=("data",), networks=("lan",)))
    probes.await_event(Lease)
    probes.await_event(Acked)
    probes.await_event(Beat)
    yield probes
    probes.node.cli("delete", "vmsnap", "s", "--ignore-not-found")
    probes.node.cli("delete", "vm", "p", "--ignore-not-found")
    probes.node.cli("delete", "volume", "data", "--ignore-not-found")
    assert probes.node.workers("vmm") == {}
    assert _kept(probes) == []


def _kept(probes: ProbeNode) -> list[Path]:
    return sorted(probes.node.dev.layout.vm_snapshots.glob("*"))


def _save(probes: ProbeNode) -> None:
    probes.node.cli("snapshot", "create", "s", "--vm", "p", "--memory")


def _all(probes: ProbeNode, kind: type[E]) -> list[E]:
    """Return the events of a kind out of all that the console has recorded."""
    lines = probes.node.cli("logs", "vm/p", "--tail", "10000").stdout.splitlines()
    said = [parse_line(line.partition("Z ")[2]) for line in lines]
    return [event for event in said if isinstance(event, kind)]


def _beats(probes: ProbeNode) -> list[int]:
    return [beat.n for beat in _all(probes, Beat)]


def _drops(numbers: list[int]) -> list[tuple[int, int]]:
    """Return where a number that only grows did not."""
    return [(one, other) for one, other in pairwise(numbers) if other <= one]


def test_the_guest_goes_on_where_it_was_with_the_disk_that_it_had(writing: ProbeNode) -> None:
    earliest = _beats(writing)[-1]
    _save(writing)
    saved_at = _beats(writing)[-1]
    status = writing.node.get("vmsnap", "s")["status"]
    assert status["phase"] == "Ready"
    assert len(status["vmm"]["sha256"]) == 64
    assert status["sizeBytes"] > 0
    wait_for(lambda: _beats(writing)[-1] >= saved_at + 4, 30, "the guest to run on")
    boots, count = len(_all(writing, Boot)), len(_beats(writing))

    refused = writing.node.cli("restore", "p", "--snapshot", "s", check=False)
    assert "it runs" in refused.stderr
    writing.node.cli("restore", "p", "--snapshot", "s", "--force")
    wait_for(lambda: len(_beats(writing)) > count + 2, 30, "beats after the restore")

    wait_for(lambda: len(_drops(_beats(writing))) == 1, 30, "the guest to have gone back")
    ((before, after),) = _drops(_beats(writing))
    assert earliest <= after <= before - 2, "it goes on from the snapshot"
    assert _beats(writing)[-1] > after
    assert len(_drops([acked.seq for acked in _all(writing, Acked)])) == 1
    assert len(_all(writing, Boot)) == boots, "it was not booted"
    _check_records(writing)


def _check_records(writing: ProbeNode) -> None:
    """Read back by another guest: what was written after the snapshot is there only once."""
    writing.node.cli("stop", "p", "--force")
    newest = _all(writing, Acked)[-1].seq
    writing.apply(
        vm(
            writing.vmm,
            f"disk=records,seed=7,window=512,acked={newest}",
            disks=("data",),
            networks=("lan",),
        )
    )
    writing.node.cli("start", "p")
    # Its other disk is the seed, which has none.
    wait_for(lambda: any(each.valid for each in writing.events(Records)), 30, "records")
    (records,) = [each for each in writing.events(Records) if each.valid]
    assert (records.ok, records.bad, records.lost) == (True, 0, 0), records
    assert newest <= records.newest


def test_files_of_a_snapshot_are_roots_alone_also_after_a_restore(writing: ProbeNode) -> None:
    _save(writing)
    writing.node.cli("restore", "p", "--snapshot", "s", "--force")
    (directory,) = _kept(writing)
    for path in (directory, *directory.iterdir()):
        seen = path.stat()
        assert (seen.st_uid, seen.st_gid) == (0, 0), path
        assert stat.S_IMODE(seen.st_mode) & 0o077 == 0, path
        assert path.is_dir() or seen.st_nlink == 1, path
    uid = writing.node.get("vm", "p")["metadata"]["uid"]
    assert not writing.node.dev.layout.vm_restore(uid).exists()
    assert list(writing.node.dev.layout.vm_save(uid).iterdir()) == []


def test_what_runs_after_the_restored_one_ends_is_a_normal_boot(writing: ProbeNode) -> None:
    _save(writing)
    writing.node.cli("restore", "p", "--snapshot", "s", "--force")
    ((_, pid),) = writing.node.workers("vmm").items()
    boots = len(_all(writing, Boot))
    os.kill(pid, signal.SIGKILL)
    # Out of all lines: a guest that writes has its boot out of the last ones within a second.
    wait_for(lambda: len(_all(writing, Boot)) > boots, 30, "another boot")


def test_agent_killed_while_it_saves_leaves_a_vm_that_runs(writing: ProbeNode) -> None:
    writing.node.cli("snapshot", "create", "s", "--vm", "p", "--memory", "--no-wait")
    writing.node.kill("agent")
    writing.node.up()
    wait_for(
        lambda: (
            writing.node.get("vmsnap", "s").get("status", {}).get("phase") in ("Ready", "Failed")
        ),
        30,
        "a decision",
    )
    beats = len(_beats(writing))
    wait_for(lambda: len(_beats(writing)) > beats + 1, 30, "the guest to run on")
    if writing.node.get("vmsnap", "s")["status"]["phase"] == "Failed":
        wait_for(lambda: _kept(writing) == [], 30, "nothing to be left")


def test_stock_cloud_hypervisor_refuses_by_name_and_the_vm_goes_on(tmp_path: Path) -> None:
    with probe_node("cloud-hypervisor", tmp_path) as probes:
        for _ in _written(probes):
            done = probes.node.cli("snapshot", "create", "s", "--vm", "p", "--memory", check=False)
            if done.returncode == 0:
                pytest.skip("this KVM has nested state: there is nothing to refuse")
            _require_refusal(probes, done.stderr)


def _require_refusal(probes: ProbeNode, said: str) -> None:
    assert "UNSUPPORTED" in said
    assert "nested state" in said
    wait_for(lambda: probes.node.get("vmsnap", "s")["status"]["phase"] == "Failed", 20, "Failed")
    beats = len(_beats(probes))
    wait_for(lambda: len(_beats(probes)) > beats + 1, 20, "the guest to run on")
    assert _kept(probes) == []
