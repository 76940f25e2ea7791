"""Moves between files and places of every class: a guest that writes on, a kill, and back again.

With CHV_LONG=1 all cases, else a sample.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from chv.common.errors import FailedPrecondition, OutcomeUnknown, Unavailable
from chv.common.wire import stord as wire
from chv.stord import luks
from tests.integration.class_places import (
    DEVICE_BYTES,
    KINDS,
    Place,
    jobs_end,
    made,
    needs_ceph,
    needs_tgt,
    place_of,
)
from tests.integration.inflight_client import StampedWriter
from tests.integration.stord_classes_helpers import spec
from tests.integration.stord_helpers import IDS, MIB, Node, meta, needs_qsd, open_node
from tests.integration.test_stord_encryption import KEY, TEXT
from tests.integration.test_stord_proxy import writing
from tests.integration.vhost_client import VhostDisk
from tests.sampling import paired, sampled

pytestmark = [pytest.mark.root, needs_qsd]
LOCKED = wire.Encryption(key="default/disk")
STILL_S = 10.0
REMOTE = [
    "nbd",
    pytest.param("iscsi", marks=needs_tgt),
    pytest.param("rbd", marks=needs_ceph),
]


@asynccontextmanager
async def node_at(
    kind: str, proxy: str = "auto", **options: Any
) -> AsyncIterator[tuple[Node, Place]]:
    async with place_of(kind) as place:
        storage = f'{place.storage}\nproxy = "{proxy}"'
        async with open_node(storage=storage, start=False) as node:
            node.add_key("default/disk", KEY)
            await node.start(**options)
            yield node, place
            assert not node.workers()


async def begin(node: Node, volume: str, target: wire.VolumeBackend, **options: Any) -> str:
    request = wire.MoveVolume(meta=meta(), volume_id=volume, backend=target, **options)
    async with node.client() as client:
        return (await client.call(wire.MOVE_VOLUME, request)).job_id


async def move(
    node: Node,
    volume: str,
    target: wire.VolumeBackend,
    writer: StampedWriter | None = None,
    **options: Any,
) -> None:
    job_id = await begin(node, volume, target, waits=writer is not None, **options)
    if writer is not None:
        await conduct(node, job_id, writer)
    ended = await node.job(job_id)
    assert ended.state is wire.JobState.DONE, str(ended.error)


async def conduct(node: Node, job_id: str, writer: StampedWriter) -> None:
    """Do as the agent does: the guest stands while the mirror begins."""
    reference = wire.JobRef(job_id=job_id)
    async with node.client() as client:
        while (job := await client.call(wire.GET_JOB, reference)).state is wire.JobState.RUNNING:
            if job.waits:
                with writer.standing():
                    until_s = time.monotonic() + STILL_S
                    request = wire.BeginMirror(job_id=job_id, until_s=until_s)
                    await client.call(wire.BEGIN_MIRROR, request)
            await anyio.sleep(0.02)


def _use(export: Path, write: bool) -> int:
    with VhostDisk(export) as disk:
        if write:
            assert disk.write(8, TEXT) == 0
            disk.flush()
        assert disk.read(8, len(TEXT)) == TEXT
        return disk.size_bytes


@pytest.mark.parametrize(("kind", "encryption"), paired(KINDS, [None, LOCKED]))
async def test_a_guest_writes_on_while_its_disk_goes_to_a_server_and_comes_back(
    kind: str, encryption: wire.Encryption | None
) -> None:
    async with node_at(kind) as (node, place):
        volume, vm = IDS.uid(), IDS.uid()
        file = spec("file", encryption=encryption)
        await made(node, volume, file)
        info = await node.attach(volume, vm)

        async with writing(info.export_path) as writer:
            there = place.describe(encryption=encryption)
            await move(node, volume, there, writer, replace_backend=True)
            found = await node.get(volume)
        async with writing(info.export_path, seed=2) as writer:
            if kind != "rbd":  # which holds writes back: a power cut there is one for the guest
                assert (await node.sessions())[0].crash_class is wire.CrashClass.KEEP_VM
            await move(node, volume, file, writer)

        assert found.class_name.value == kind.partition("-")[0]
        if encryption is not None and place.file is not None:
            assert place.content().startswith(luks.MAGIC)
        assert (await node.sessions())[0].losses == 0
        await node.detach(volume, vm)
        assert (await node.get(volume)).class_name is wire.VolumeClass.FILE
        await node.delete(volume)


@pytest.mark.parametrize(("kind", "encryption"), paired(KINDS, [None, LOCKED], shift=1))
async def test_a_detached_volume_is_the_same_there_and_back(
    kind: str, encryption: wire.Encryption | None
) -> None:
    async with node_at(kind, proxy="off") as (node, place):
        volume, vm = IDS.uid(), IDS.uid()
        file = spec("file", encryption=encryption)
        await made(node, volume, file)
        for target in (None, place.describe(encryption=encryption), file):
            if target is not None:
                await move(node, volume, target)
            info = await node.attach(volume, vm)
            await anyio.to_thread.run_sync(_use, Path(info.export_path), target is None)
            await node.detach(volume, vm)
        await node.delete(volume)


@pytest.mark.parametrize("kind", REMOTE)
async def test_a_storage_daemon_without_a_network_is_kept_where_nobody_says_that_its_guest_runs(
    kind: str,
) -> None:
    async with node_at(kind) as (node, place):
        volume, vm = IDS.uid(), IDS.uid()
        await made(node, volume, spec("file"))
        info = await node.attach(volume, vm)
        before = (await node.sessions())[0].backend_pid

        with pytest.raises(FailedPrecondition, match="needs a network"):
            await begin(node, volume, place.describe())

        assert (await node.sessions())[0].backend_pid == before
        await anyio.to_thread.run_sync(_use, Path(info.export_path), True)
        await node.detach(volume, vm)
        await node.delete(volume)


async def test_a_vm_that_would_notice_keeps_its_storage_daemon_and_is_told_what_to_do() -> None:
    async with node_at("nbd", proxy="off") as (node, place):
        volume, vm = IDS.uid(), IDS.uid()
        await made(node, volume, spec("file"))
        info = await node.attach(volume, vm)

        ended = await node.job(await begin(node, volume, place.describe(), replace_backend=True))

        assert ended.state is wire.JobState.FAILED
        assert ended.error is not None
        assert "has no in-flight proxy" in ended.error.message
        assert "stop and start" in ended.error.hint
        await anyio.to_thread.run_sync(_use, Path(info.export_path), True)
        await node.detach(volume, vm)
        await node.delete(volume)


POINTS = [
    "planned.after_intent",
    "planned.after_stop",
    "planned.after_record",
    "planned.before_end",
    "move.after_intent",
    "move.after_make",
    "takeover.after_header",
    "move.after_start",
    "move.after_pivot_intent",
    "move.after_finalize",
    "move.after_record",
    "move.after_drop",
]


@pytest.mark.parametrize("point", sampled(POINTS, 2, seed=10))
async def test_a_kill_at_any_step_of_a_move_to_a_server_is_not_noticed(point: str) -> None:
    async with node_at("nbd", failpoints=f"stord.{point}=kill") as (node, place):
        volume, vm = IDS.uid(), IDS.uid()
        file = spec("file", encryption=LOCKED)
        target = place.describe(encryption=LOCKED)
        await made(node, volume, file)
        info = await node.attach(volume, vm)

        async with writing(info.export_path) as writer:
            job_id = await begin(node, volume, target, replace_backend=True, waits=True)
            with suppress(Unavailable, OutcomeUnknown):  # it dies at the failpoint
                await conduct(node, job_id, writer)
            await node.ended()
            await node.start()
            await conduct(node, job_id, writer)
            await jobs_end(node)

        found = await node.get(volume)
        assert found.class_name is wire.VolumeClass.NBD
        assert found.job == ""
        await node.detach(volume, vm)
        await node.delete(volume)


async def test_what_a_guest_has_beyond_the_size_that_was_asked_for_comes_along() -> None:
    async with node_at("block", proxy="off") as (node, place):
        volume, vm = IDS.uid(), IDS.uid()
        await made(node, volume, place.describe())
        for step in range(2):
            info = await node.attach(volume, vm)
            with VhostDisk(Path(info.export_path)) as device:
                assert device.size_bytes == DEVICE_BYTES
                if step == 0:
                    assert device.write((DEVICE_BYTES - MIB) // 512, TEXT) == 0
                    device.flush()
                assert device.read((DEVICE_BYTES - MIB) // 512, len(TEXT)) == TEXT
            await node.detach(volume, vm)
            if step == 0:
                await move(node, volume, spec("file"))
        await node.delete(volume)


async def test_a_place_that_is_smaller_than_what_a_guest_has_is_refused_and_nothing_is_moved() -> (
    None
):
    async with node_at("block", proxy="off") as (node, place):
        volume = IDS.uid()
        await made(node, volume, spec("file", size_bytes=DEVICE_BYTES + MIB))

        ended = await node.job(
            await begin(node, volume, place.describe(size_bytes=DEVICE_BYTES + MIB))
        )

        assert ended.state is wire.JobState.FAILED
        assert ended.error is not None
        assert str(DEVICE_BYTES) in ended.error.message
        assert (await node.get(volume)).class_name is wire.VolumeClass.FILE
        await node.delete(volume)
