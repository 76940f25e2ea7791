"""A node whose state's disk is full, or breaks, or whose daemons get no more descriptors.

Real injections on a live node with the fake VMM: what runs goes on, new things are refused in
words, and all is well again once the cause has gone.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.disks import fill, make_ext4, mounted, small_tmpfs
from tests.integration.live_node import DAEMONS, GUEST, LiveNode, live_node, need, wait_for
from tests.sampling import sampled

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    need("mkfs.ext4"),
    pytest.mark.skipif(not Path("/dev/loop-control").exists(), reason="needs loop devices"),
]

SPARE_FDS = 2
DISK_MIB = 640  # with less than 256 MiB free a disk counts as full
MORE = """
apiVersion: compute.chv.dev/v1alpha1
kind: Volume
metadata: {name: more}
spec: {size: 4Mi, format: raw}
"""


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node(CHV_VMM="fake") as running:
        running.apply(GUEST)
        yield running


@contextmanager
def elsewhere(node: LiveNode, disk: Path) -> Iterator[None]:
    """Let the node have its state on another disk, which is mounted over the first one."""
    state = node.dev.layout.state
    node.down()
    shutil.copytree(state, disk, dirs_exist_ok=True)
    subprocess.run(["mount", "--bind", str(disk), str(state)], check=True)
    try:
        node.up()
        yield
    finally:
        node.down()
        subprocess.run(["umount", "--lazy", str(state)], check=True)


def applied(node: LiveNode, manifest: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "more.yaml"
    path.write_text(manifest)
    return node.cli("apply", "-f", str(path), check=False)


def test_full_disk_refuses_what_is_new_and_lets_vms_run_and_stop(
    node: LiveNode, tmp_path: Path
) -> None:
    vmms = node.workers("vmm")
    with small_tmpfs(tmp_path / "full", DISK_MIB) as disk, elsewhere(node, disk):
        node.await_state("TenantReady")
        assert node.workers("vmm") == vmms
        ballast = fill(disk)
        refused = wait_for(lambda: is_refused(node, tmp_path), 60, "a refusal for want of space")
        assert "RESOURCE_EXHAUSTED" in refused.stderr
        assert node.workers("vmm") == vmms
        # Its volume is on that disk, too: it stands until there is space.
        wait_for(lambda: node.status("guest")["phase"] == "Paused", 30, "a VM that stands")
        node.cli("stop", "guest", "--force")
        assert node.workers("vmm") == {}
        ballast.unlink()
        wait_for(lambda: applied(node, MORE, tmp_path).returncode == 0, 30, "space again")
        node.cli("start", "guest")
        node.await_state("TenantReady")
        node.cli("delete", "volume", "more")
        node.cli("stop", "guest", "--force")
    node.up()
    node.cli("start", "guest")


def is_refused(node: LiveNode, tmp_path: Path) -> subprocess.CompletedProcess[str] | None:
    """The store has a reserve: what is first to be refused is not the first thing."""
    done = applied(node, MORE, tmp_path)
    if done.returncode == 0:
        node.cli("delete", "volume", "more")
        return None
    return done


def test_disk_that_breaks_harms_no_vm_and_its_return_heals_the_node(
    node: LiveNode, tmp_path: Path
) -> None:
    node.await_state("TenantReady")
    vmms = node.workers("vmm")
    assert len(vmms) == 1
    image = tmp_path / "state.img"
    make_ext4(image, DISK_MIB)
    with mounted(tmp_path / "disk", "-o", "loop", str(image)) as disk, elsewhere(node, disk):
        node.await_state("TenantReady")
        # As the kernel does after an error of the disk: every write fails from now on.
        subprocess.run(["mount", "-o", "remount,abort", str(disk)], check=False)
        done = applied(node, MORE, tmp_path)
        assert done.returncode != 0
        assert node.workers("vmm") == vmms
    # The broken disk is gone; the node goes on from what was on the other one.
    node.up()
    node.await_state("TenantReady")
    assert node.workers("vmm") == vmms
    assert node.cli("get", "volume", "more", check=False).returncode == 4


@pytest.mark.parametrize("daemon", sampled(DAEMONS, 1, seed=1))
def test_daemon_without_descriptors_harms_no_vm_and_goes_on_when_it_has_some(
    node: LiveNode, daemon: str, tmp_path: Path
) -> None:
    node.await_state("TenantReady")
    vmms = node.workers("vmm")
    pid = node.daemon_pid(daemon)
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    held = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (held + SPARE_FDS, hard))
    try:
        for _ in range(3):
            applied(node, MORE, tmp_path)  # whatever it says, it says it
            node.cli("delete", "volume", "more", check=False)
        assert node.workers("vmm") == vmms
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    node.await_state("TenantReady", timeout_s=30)
    assert node.daemon_pid(daemon) == pid
    assert node.workers("vmm") == vmms
    wait_for(lambda: applied(node, MORE, tmp_path).returncode == 0, 30, "work is done again")
    node.cli("delete", "volume", "more")
