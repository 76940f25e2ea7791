"""stord is killed at every step of the life of three volumes; the next one converges.

One scenario walks through open, attach, limits, growth that waits, detach, loss, recovery, a copy
of an image by a job, and delete. Whatever call was cut short is simply made again on the next
stord, as the agent would. After every kill there is at most one storage daemon; at the end
nothing is left.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from chv.common.errors import ChvError, OutcomeUnknown, Unavailable
from chv.common.wire import stord as wire
from tests.helpers import wait_until
from tests.integration.stord_helpers import (
    IDS,
    MIB,
    Node,
    needs_qsd,
    open_node,
    shell,
    short_root,
)
from tests.integration.vhost_client import VhostDisk
from tests.sampling import sampled

pytestmark = [pytest.mark.root, needs_qsd]

FAILPOINTS = (
    "stord.adopt.after_record",
    "stord.attach.after_export",
    "stord.attach.after_grant",
    "stord.attach.after_intent",
    "stord.attach.after_lock",
    "stord.attach.after_move",
    "stord.attach.after_prime",
    "stord.attach.after_record",
    "stord.attach.after_rename",
    "stord.attach.after_spawn",
    "stord.attach.after_worker_record",
    "stord.attach.before_spawn",
    "stord.check.before_clean",
    "stord.delete.after_intent",
    "stord.delete.after_remove",
    "stord.detach.after_export_gone",
    "stord.detach.after_intent",
    "stord.detach.after_node_gone",
    "stord.detach.after_nodes_gone",
    "stord.detach.after_record",
    "stord.detach.after_remove",
    "stord.detach.after_stop",
    "stord.detach.after_unpublish",
    "stord.fill.after_convert",
    "stord.fill.after_copy",
    "stord.fill.after_create",
    "stord.grow.after_intent",
    "stord.grow.after_resize",
    "stord.grow.before_attach",
    "stord.job.after_end",
    "stord.job.after_record",
    "stord.job.before_end",
    "stord.limits.after_intent",
    "stord.limits.after_set",
    "stord.open.after_begin",
    "stord.open.after_build",
    "stord.open.after_create",
    "stord.open.after_intent",
    "stord.open.after_pool",
    "stord.open.after_record",
    "stord.recover.after_grant",
    "stord.recover.after_intent",
    "stord.recover.after_prime",
    "stord.recover.after_record",
    "stord.recover.after_rename",
    "stord.recover.after_spawn",
    "stord.recover.after_worker_record",
    "stord.recover.before_spawn",
    "stord.tools.after_loan",
)
# Some kills that are not between steps: at the n-th commit of the store.
COMMITS = (2, 9, 16)
IN_CI = 16  # of the points; the long run takes all
SEED = 20_261_201
GROWN_BYTES = 3 * MIB
LIMITS = wire.Limits(iops_total=wire.Rate(limit=10_000))


T = TypeVar("T")


class Scenario:
    """The life of three volumes; each step can be made again."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.vm, self.system, self.data, self.copy = IDS.uid(), IDS.uid(), IDS.uid(), IDS.uid()
        self.kills = 0

    async def run(self) -> None:
        node = self.node
        image = os.urandom(4096)
        source = node.image(image)
        await self.step(lambda: node.open(self.system, format="qcow2", source=source))
        await self.step(lambda: node.open(self.data, size_bytes=MIB, pool="other"))
        await self.step(lambda: node.attach(self.system, self.vm))
        info = await self.step(lambda: node.attach(self.data, self.vm))
        self.works(info)
        changed = await self.step(self.change)
        assert (changed.limits, changed.pending_size_bytes) == (LIMITS, GROWN_BYTES)
        await self.step(lambda: node.detach(self.data, self.vm, generation=2))
        info = await self.step(lambda: node.attach(self.data, self.vm, generation=2))
        with VhostDisk(Path(info.export_path)) as disk:
            assert disk.size_bytes == GROWN_BYTES
        await self.step(lambda: node.detach(self.data, self.vm, generation=2))
        await self.step(self.lose)
        await self.step(self.recover)
        info = await self.step(lambda: node.attach(self.system, self.vm))
        with VhostDisk(Path(info.export_path)) as disk:
            assert disk.read(0, 4096) == image
        await self.step(lambda: node.detach(self.system, self.vm))
        await self.filled(image)
        await self.step(lambda: node.delete(self.copy))
        await self.step(lambda: node.delete(self.system))
        await self.step(lambda: node.delete(self.data, generation=2))

    async def change(self) -> wire.VolumeInfo:
        return await self.node.ensure(
            self.data, 2, size_bytes=GROWN_BYTES, pool="other", limits=LIMITS
        )

    async def filled(self, image: bytes) -> None:
        """Let a job copy a qcow2 image into a raw volume."""
        source = qcow2_of(self.node, image)

        async def opened() -> bool:
            info = await self.step(lambda: self.node.open(self.copy, source=source))
            return info.state == "open"

        await wait_until(opened)
        path = self.node.layout.volume(self.copy) / "disk.raw"
        assert path.read_bytes()[:4096] == image
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (0, 0o600)

    async def step(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call; where it kills stord, start the next one and make it again."""
        try:
            return await call()
        except (OutcomeUnknown, Unavailable) as error:
            await self.after_kill(error)
        return await call()

    async def after_kill(self, error: ChvError) -> None:
        assert await self.node.ended() == -signal.SIGKILL, error
        self.kills += 1
        assert len(storage_daemons(self.node)) <= 1
        await self.node.start()
        assert len(storage_daemons(self.node)) <= 1

    def works(self, info: wire.AttachmentInfo) -> None:
        with VhostDisk(Path(info.export_path)) as disk:
            assert disk.write_back
            assert disk.write(0, b"d" * 512) == 0
            assert disk.read(0, 512) == b"d" * 512

    async def lose(self) -> None:
        """Kill the storage daemon and wait until stord says so."""
        for worker in self.node.workers():
            os.kill(worker.pid, signal.SIGKILL)

        async def lost() -> bool:
            (session,) = await self.node.sessions()
            return session.backend is wire.BackendState.LOST

        await wait_until(lost)

    async def recover(self) -> None:
        """Recover until it is served; a recovery cut short is a loss again."""
        info = await self.node.recover(self.vm)
        assert info.backend is wire.BackendState.SERVING


def storage_daemons(node: Node) -> list[str]:
    return [found.worker_id for found in node.workers() if ":qsd:" in found.worker_id]


def qcow2_of(node: Node, data: bytes) -> wire.VolumeSource:
    """An image of the node, as qcow2, with this content."""
    raw = node.image(data)
    path = node.layout.image("77" * 32)
    shell("qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw.path, path)
    path.chmod(0o644)
    return wire.VolumeSource(path=str(path), sha256="77" * 32, format=wire.VolumeFormat.QCOW2)


@asynccontextmanager
async def node_with_pool() -> AsyncIterator[Node]:
    with short_root() as pool:
        async with open_node(start=False, storage=f'pools = {{ other = "{pool}" }}') as node:
            yield node
            assert list(pool.iterdir()) == []


async def leaves_nothing(node: Node) -> None:
    assert node.workers() == []
    assert node.run_files() == []
    assert node.volume_names() == []
    assert node.cgroups() == []
    assert await node.census() == []
    assert await node.sessions() == []
    assert await node.volumes() == []


@pytest.mark.parametrize("name", sampled(FAILPOINTS, IN_CI, seed=SEED))
async def test_a_kill_at_a_failpoint_converges_and_leaks_nothing(name: str) -> None:
    async with node_with_pool() as node:
        await node.start(failpoints=f"{name}=1*kill")
        scenario = Scenario(node)

        await scenario.run()

        assert scenario.kills == 1
        await leaves_nothing(node)


@pytest.mark.parametrize("commit", COMMITS)
async def test_a_kill_at_a_commit_of_the_store_converges_and_leaks_nothing(commit: int) -> None:
    async with node_with_pool() as node:
        await node.start(failpoints=f"common.store.commit.after={commit}*off->1*kill")
        scenario = Scenario(node)

        await scenario.run()

        assert scenario.kills == 1
        await leaves_nothing(node)


async def test_every_failpoint_that_the_scenario_passes_is_in_the_list() -> None:
    async with node_with_pool() as node:
        log = node.config.with_name("hits")
        await node.start(failpoints="stord.never=off", failpoints_log=log)

        await Scenario(node).run()

        names = {name for name in log.read_text().split() if name.startswith("stord.")}
    assert names == set(FAILPOINTS)
