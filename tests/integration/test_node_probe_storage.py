"""Storage that dies under a guest which writes records for ever and knows what was acknowledged.

On both VMMs, through a live node. Raw disks: the VM is kept, nothing that was acknowledged is
missing, nothing hangs. qcow2: the VM is reset, and nothing is answered between death and reset.
With CHV_LONG=1 the full counts, else a sample. What is on the disk is read by the host.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from chv.host import devnode
from chv.probe.device_events import (
    Acked,
    Disk,
    DiskDone,
    DiskError,
    DiskPlanned,
    DiskResumed,
    DiskStall,
)
from chv.probe.events import Beat, Boot
from tests.integration.cloud_hypervisor_api import Line
from tests.integration.live_node import LiveNode, need, wait_for
from tests.probe_node import VMMS, ProbeNode, probe_node, vm, volume
from tests.probe_records import WINDOW, GuestLog, missing, record

pytestmark = [pytest.mark.root, pytest.mark.slow, need()]
LONG = bool(os.environ.get("CHV_LONG"))
KILLS = 40 if LONG else 2
TERMS = 10 if LONG else 1
PROXY_KILLS = 5 if LONG else 1
TOGETHER = 5 if LONG else 1
PLANNED = 10 if LONG else 1
RESETS = 10 if LONG else 1
REBOOTS = 20 if LONG else 2
BORNE = 3  # so many deaths within minutes are borne, then the VM is reset
DEPTHS = (1, 8)
SPEED = {"qemu": 10, "cloud-hypervisor": 1}  # how much faster the guest writes


@pytest.fixture(scope="module", params=VMMS)
def probes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProbeNode]:
    with probe_node(request.param, tmp_path_factory.mktemp("probe")) as running:
        yield running


@dataclass
class Guest:
    """The VM `p` whose guest uses the disk `data`."""

    probes: ProbeNode
    log: GuestLog
    directory: Path
    vmms: dict[str, int]
    random: random.Random

    @property
    def node(self) -> LiveNode:
        return self.probes.node

    def goes_on(self, most: int = 40) -> None:
        """Wait until some more records are acknowledged: how many is left to chance."""
        self.log.await_progress(self.random.randint(1, most) * SPEED[self.probes.vmm])

    @property
    def seed(self) -> int:
        return self.log.all(DiskPlanned)[-1].seed

    def lost(self, acked: int, seed: int) -> list[int]:
        """Return the acknowledged records that are not on the disk, which may be in use."""
        # What is half a window back is not written again while it is read.
        wanted = range(max(1, acked - WINDOW // 2), acked + 1)
        return missing(raw_image(self.directory), wanted, seed)

    def unharmed(self) -> None:
        """The VM was kept, and its disk never failed nor hung."""
        assert self.node.workers("vmm") == self.vmms
        assert self.log.trouble() == []
        assert self.log.hung() == 0

    def await_told(self, reason: str, fewest: int, most: int = 0) -> None:
        """Wait until the VM's status says what was done about so many losses."""
        seen: list[object] = []

        def told() -> bool:
            condition = self.node.condition("p", "StorageLost")
            seen[:] = [condition]
            same = condition["reason"] == reason and condition["status"] == "False"
            count = str(condition["message"]).rpartition(" ")[2]
            return same and int(count) in range(fewest, max(fewest, most) + 1)

        try:
            wait_for(told, 20, f"{reason}, {fewest}")
        except AssertionError as error:
            raise AssertionError(f"{error}; the VM says {seen}") from error


def raw_image(directory: Path) -> bytes:
    """Return the content of a volume as the guest sees it."""
    (image,) = [path for path in directory.iterdir() if path.suffix in (".raw", ".qcow2")]
    if image.suffix == ".raw":
        return image.read_bytes()
    flat = directory / "flat"
    # -U: its storage daemon has it open, and nobody writes to what is looked at.
    command = ["qemu-img", "convert", "-U", "-f", "qcow2", "-O", "raw", str(image), str(flat)]
    subprocess.run(command, check=True)
    try:
        return flat.read_bytes()
    finally:
        flat.unlink()


@contextmanager
def guest(
    probes: ProbeNode, command: str, *, volume_format: str = "raw", seed: int = 1
) -> Iterator[Guest]:
    """A VM with one disk; afterwards it is gone and so are its parts."""
    node = probes.node
    probes.apply(
        volume("data", format=volume_format),
        vm(probes.vmm, f"{command} net=off", disks=("data",)),
    )
    layout = node.dev.layout
    log = GuestLog(layout.vm_state(node.get("vm", "p")["metadata"]["uid"]))
    wait_for(lambda: log.all(Disk), 20, "the guest's word on its disk")
    directory = layout.volume(node.get("volume", "data")["metadata"]["uid"])
    try:
        yield Guest(probes, log, directory, node.workers("vmm"), random.Random(seed))
    except BaseException:
        tell(node, log.directory)
        raise
    finally:
        node.cli("stop", "p", "--force", check=False)  # it may be paused, or in no mood to end
        node.cli("delete", "vm", "p", "--ignore-not-found")
        node.cli("delete", "volume", "data", "--ignore-not-found")
    for kind in ("vmm", "qsd", "proxy"):
        assert node.workers(kind) == {}


def tell(node: LiveNode, state_dir: Path) -> None:
    """Print what guest, VMM and proxies said last."""
    logs = [state_dir / "console.log", state_dir / "vmm.log", *node.dev.layout.logs.glob("proxy-*")]
    for path in logs:
        lines = path.read_text(errors="replace").splitlines()
        print(f"--- {path.name}", *lines[:20], "...", *lines[20:][-20:], sep="\n")


def writer(probes: ProbeNode, depth: int) -> str:
    # The seed disk, which comes first with QEMU, is read-only and refused.
    return f"disk=writer,depth={depth},every={SPEED[probes.vmm]}"


def end(node: LiveNode, kind: str, how: signal.Signals) -> None:
    """End the worker of a kind and wait until another has taken its place."""
    ((old, pid),) = node.workers(kind).items()
    os.kill(pid, how)
    wait_for(lambda: set(node.workers(kind)) - {old}, 30, f"another {kind}")


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_raw_disk_loses_no_acknowledged_record_by_deaths_of_its_storage_daemon(
    probes: ProbeNode, depth: int
) -> None:
    signals = [signal.SIGKILL] * KILLS + [signal.SIGTERM] * TERMS
    with guest(probes, writer(probes, depth), seed=depth) as running:
        running.goes_on()
        for number, how in enumerate(signals, 1):
            end(running.node, "qsd", how)
            acked = running.log.acked()
            running.goes_on()
            assert running.lost(acked, running.seed) == []
            if number % BORNE == 0:
                running.node.restart()  # counts the deaths from here on
        running.unharmed()
        running.await_told("Kept", len(signals))
        running.node.cli("stop", "p", "--force")
        acked = running.log.acked()
        assert acked > len(signals)
        assert running.lost(acked, running.seed) == []
        print(f"{len(signals)} ends, {acked} records, {len(running.log.all(DiskStall))} stalls")


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_raw_disk_loses_nothing_by_deaths_of_proxy_and_stord(
    probes: ProbeNode, depth: int
) -> None:
    with guest(probes, writer(probes, depth), seed=depth) as running:
        node = running.node
        for number in range(1, PROXY_KILLS + 1):
            end(node, "proxy", signal.SIGKILL)
            running.goes_on()
            if number % BORNE == 0:
                node.restart()
        for _ in range(TOGETHER):
            running.goes_on()
            node.kill("stord")
            end(node, "qsd", signal.SIGKILL)
            running.goes_on()
            node.await_state("TenantReady", 60)
            node.restart()
        running.unharmed()
        # The death of a proxy alone is none of the storage daemon, unless that follows it.
        running.await_told("Kept", TOGETHER, TOGETHER + PROXY_KILLS)
        node.cli("stop", "p", "--force")
        assert running.lost(running.log.acked(), running.seed) == []


def test_a_storage_daemon_that_is_replaced_on_request_is_no_loss(probes: ProbeNode) -> None:
    with guest(probes, writer(probes, depth=8)) as running:
        for _ in range(PLANNED):
            running.goes_on()
            said = running.node.cli("storage", "restart", "p").stderr
            assert "follows" in said
            running.goes_on()
        running.unharmed()
        assert running.node.condition("p", "StorageLost")["reason"] == "NeverLost"
        running.node.cli("stop", "p", "--force")
        assert running.lost(running.log.acked(), running.seed) == []


@contextmanager
def agent_held(node: LiveNode) -> Iterator[None]:
    """The agent stands still: nobody resets a VM meanwhile."""
    pid = node.daemon_pid("agent")
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("depth", DEPTHS)
def test_with_qcow2_nothing_is_answered_after_a_death_until_the_vm_was_reset_in_its_vmm(
    probes: ProbeNode, depth: int
) -> None:
    with guest(probes, writer(probes, depth), volume_format="qcow2", seed=depth) as running:
        for number in range(1, RESETS + 1):
            running.goes_on()
            lose_and_reset(running)
            assert running.log.boots() == number + 1
        assert running.node.workers("vmm") == running.vmms
        running.await_told("Recovered", RESETS)


def lose_and_reset(running: Guest) -> None:
    """Kill the storage daemon; the guest waits; let the agent see it; the guest boots anew."""
    log, boots = running.log, running.log.boots()
    running.log.await_progress(200 * SPEED[running.probes.vmm])
    with agent_held(running.node):
        ((_, pid),) = running.node.workers("qsd").items()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not running.node.workers("qsd"), 20, "the death")
        beats(log, 1)  # by then the guest has said what was answered before
        acked, seed, resumed = log.acked(), running.seed, len(log.all(DiskResumed))
        said = len(log.all(Acked))
        beats(log, 3)
    wait_for(lambda: log.boots() > boots, 30, "the reset")
    events = log.said()
    again = max(i for i, event in enumerate(events) if isinstance(event, Boot))
    before = [event for event in events[:again] if isinstance(event, Acked)]
    assert len(before) == said, "answered between the death and the reset"
    assert len(log.all(DiskResumed)) == resumed
    assert log.all(DiskError) == []
    survived(running, acked, seed)


def beats(log: GuestLog, count: int) -> None:
    """Wait until the guest's heart has beaten so often."""
    goal = len(log.all(Beat)) + count
    wait_for(lambda: len(log.all(Beat)) >= goal, 20, "the guest's heart beats on")


def survived(running: Guest, acked: int, seed: int) -> None:
    """What the boot before acknowledged is there, as far as the present one is not there yet."""
    wait_for(lambda: running.log.all(DiskPlanned)[-1].seed != seed, 20, "the writer")
    running.goes_on(2)
    running.node.cli("pause", "p")
    image = raw_image(running.directory)
    reached = max(
        (seq for seq in range(1, acked + 1) if (r := record(image, seq)) and r.seed != seed),
        default=0,
    )
    assert acked - reached > 50, "nothing is left to be looked at"
    # Behind the newest there may be some on their way.
    assert missing(image, range(reached + 1 + max(DEPTHS), acked + 1), seed) == []
    running.node.cli("resume", "p")


def test_reboots_of_the_guest_and_deaths_of_the_storage_daemon_go_together(
    probes: ProbeNode,
) -> None:
    if probes.vmm == "qemu":
        pytest.skip("QEMU 7.2 never starts a disk again that broke while its driver started")
    command = "disk=check,sectors=512,depth=8 end=reboot"
    with guest(probes, command) as running:
        log = running.log
        for number in range(1, REBOOTS + 1):
            end(running.node, "qsd", signal.SIGKILL)
            boots, done = log.boots(), len(log.all(DiskDone))
            wait_for(lambda b=boots: log.boots() > b + 1, 30, "reboots")  # type: ignore[misc]
            wait_for(lambda d=done: len(log.all(DiskDone)) > d, 30, "checks")  # type: ignore[misc]
            if number % BORNE == 0:
                running.node.restart()
        running.unharmed()
        assert all(done.ok and done.errors == 0 for done in log.all(DiskDone))
        running.await_told("Kept", REBOOTS)
        running.node.cli("stop", "p", "--force")


def test_a_guest_that_reboots_under_its_writer_keeps_what_was_acknowledged(
    probes: ProbeNode,
) -> None:
    if probes.vmm != "cloud-hypervisor":
        pytest.skip("QEMU's only line for a press of the button is the agent's")
    with guest(probes, f"{writer(probes, 8)} button=reboot") as running:
        uid = running.node.get("vm", "p")["metadata"]["uid"]
        socket = running.node.dev.layout.vm(uid) / "api.sock"
        for boots in range(1, REBOOTS + 1):
            running.log.await_progress(300)
            acked, seed = running.log.acked(), running.seed
            with Line(socket) as line:
                assert line.call("PUT", "vm.power-button").status == 204
            wait_for(lambda b=boots: running.log.boots() > b, 20, "the reboot")  # type: ignore[misc]
            survived(running, acked, seed)
        running.unharmed()
        assert devnode.agent_process(running.node.dev) is not None
