"""Rotation of a volume's key: the new one into every layer, tried there, then the old one out.

The record says how far it came: until the new key opens every layer the old one does, and is
what opens the volume (`Volume.key`). Every step can be done again: slots of a new key that was
added before are emptied first. Attached, it happens in the VM's storage daemon, whose frozen layers
cannot be written, so a volume with several layers must be detached. Errors: FailedPrecondition
for that, those of the keys.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import anyio.to_thread
import msgspec

from chv.common import logs
from chv.common.errors import ChvError, FailedPrecondition, Internal, ResourceExhausted
from chv.common.failpoint import failpoint
from chv.stord import luks
from chv.stord.bench import Benches
from chv.stord.disks import local_paths
from chv.stord.keys import is_wrong_key, read_key, wrong_key
from chv.stord.overlays import read_keys
from chv.stord.qsd import block_jobs, graph
from chv.stord.qsd.monitor import Monitor
from chv.stord.records import Volume
from chv.stord.tools import Call, json_image
from chv.stord.work import Parts

log = logs.get(__name__)
JOB_WORD = "rekey"
AMEND_TIMEOUT_S = 30.0
SECTOR_BYTES = 512
# A second client next to the storage daemon may get no answer, or has no key of the cluster.
ONE_CLIENT = ("nbd", "rbd")


class Rekeys:
    """Rotations of all volumes. The caller holds the volume's lock."""

    def __init__(self, parts: Parts, benches: Benches) -> None:
        self._parts = parts
        self._records = parts.records
        self._benches = benches

    async def check(self, row: Volume, key: str) -> None:
        """Refuse a rotation to a key that cannot be done now, before it is recorded."""
        await anyio.to_thread.run_sync(read_key, self._parts.layout, key)
        held = self._records.holder(row.volume_id)
        if held is None:
            return
        if held.read_only or len(row.layers) > 1:
            raise FailedPrecondition(
                f"the volume is attached to VM {held.vm_id}, which keeps its frozen layers open",
                resource=row.volume_id,
                field="backend.encryption.key",
                hint="stop the VM, then rotate the key",
            )

    async def finish(self, volume_id: str) -> None:
        """Bring a rotation that was begun to its end; fine when there is none."""
        row = self._records.volumes[volume_id]
        if not row.old_key:
            return
        assert row.backend.encryption is not None
        await self.check(row, row.backend.encryption.key)
        both = (row.old_key, row.backend.encryption.key)
        async with (
            self._open(row) as monitor,
            luks.secrets(monitor, self._parts.layout, volume_id, set(both)),
        ):
            if not row.new_key_added:
                for layer in row.layers:
                    await self._add(monitor, row, layer.number, both)
                    await failpoint("stord.rekey.after_add")
                await self._put(volume_id, new_key_added=True)
                await failpoint("stord.rekey.after_added")
            for layer in row.layers:
                name = graph.format_node(volume_id, layer.number)
                await self._empty(monitor, row, name, both[0])
                await failpoint("stord.rekey.after_remove")
        await self._put(volume_id, old_key="", new_key_added=False)
        log.info("key_rotated", volume_id=volume_id, old=both[0], new=both[1])

    async def _put(self, volume_id: str, **changes: object) -> None:
        row = self._records.volumes[volume_id]
        await self._records.put_volume(msgspec.structs.replace(row, **changes))

    async def finish_all(self) -> None:
        """Go on with what a restart cut short; what cannot go on now does at the next call."""
        for row in [row for row in self._records.volumes.values() if row.old_key]:
            try:
                await self.finish(row.volume_id)
            except ChvError as error:
                log.warning("key_not_rotated", volume_id=row.volume_id, error=error)

    # --- where
    @asynccontextmanager
    async def _open(self, row: Volume) -> AsyncIterator[Monitor]:
        """Yield a monitor where the nodes of all layers can be written."""
        if self._records.holder(row.volume_id) is not None:
            async with self._benches.of(row) as bench, bench.monitor() as monitor:
                yield monitor
            return
        async with self._benches.offline.locked(row) as monitor:
            async with luks.secrets(monitor, self._parts.layout, row.volume_id, {row.key}):
                for layer in row.layers:
                    await monitor.add_node(await self._alone(row, layer.number))
            yield monitor

    async def _alone(self, row: Volume, number: int) -> graph.Node:
        """Describe one layer without what lies below it."""
        layer = await anyio.to_thread.run_sync(self._parts.disks.layer, row.volume_id, number)
        node = graph.image_node(layer, graph.secret_id(row.volume_id, layer.key))
        node |= {"node-name": graph.format_node(row.volume_id, number)}
        return node | {"backing": None} if layer.format == "qcow2" else node

    # --- one layer
    async def _add(self, monitor: Monitor, row: Volume, number: int, keys: tuple[str, str]) -> None:
        """Put the new key into a free slot, and open the layer with it to see that it does."""
        name = graph.format_node(row.volume_id, number)
        if sum(await _slots(monitor, name)) > 1:
            await self._empty(monitor, row, name, keys[1])
        old, new = (graph.secret_id(row.volume_id, key) for key in keys)
        slot = _free_slot(await _slots(monitor, name), row.volume_id)
        added = {"state": "active", "new-secret": new, "keyslot": slot, "secret": old}
        await self._amend(monitor, row, name, added | {"iter-time": luks.ITERATION_MS})
        await self._try(row, number, keys[1])

    async def _try(self, row: Volume, number: int, key: str) -> None:
        """Read the layer with a key, apart from whoever else has it open."""
        layer = await anyio.to_thread.run_sync(self._parts.disks.layer, row.volume_id, number)
        if layer.protocol.driver in ONE_CLIENT:
            return
        secret = graph.secret_id(row.volume_id, key)
        node = graph.image_node(msgspec.structs.replace(layer, key=key), secret)
        if layer.format == "qcow2":
            node["backing"] = None
        call = Call(
            reads=tuple(local_paths((layer,))),
            keys=await read_keys(self._parts.layout, row.volume_id, {key}),
            volume_id=row.volume_id,
            timeout_s=AMEND_TIMEOUT_S,
        )
        argv = ["map", "-U", "--output=json", "--start-offset=0", f"--max-length={SECTOR_BYTES}"]
        async with self._parts.disks.reach(row.volume_id):
            await self._parts.tools.run([*argv, json_image(node)], call)

    async def _empty(self, monitor: Monitor, row: Volume, name: str, key: str) -> None:
        """Empty every slot of a key; fine when there is none."""
        secret = graph.secret_id(row.volume_id, key)
        try:
            await self._amend(monitor, row, name, {"state": "inactive", "old-secret": secret})
        except ChvError as error:
            if "No keyslots match" not in error.message:
                raise
            log.debug("no_slot_to_empty", volume_id=row.volume_id, key=key)

    async def _amend(
        self, monitor: Monitor, row: Volume, name: str, change: dict[str, object]
    ) -> None:
        kind = (await _image(monitor, name))["format"]
        options: graph.Node = {"driver": kind, **change}
        if kind == "qcow2":
            options = {"driver": kind, "encrypt": {"format": "luks", **change}}
        job = block_jobs.job_name(JOB_WORD, row.volume_id)
        await block_jobs.cancel(monitor, job)
        await monitor.call(
            "x-blockdev-amend",
            {"job-id": job, "node-name": name, "options": options},
            timeout_s=AMEND_TIMEOUT_S,
        )
        ended = await _ended(monitor, job)
        await block_jobs.dismiss(monitor, job)
        if is_wrong_key(ended.error):
            raise wrong_key(row.key, row.volume_id)
        if ended.error:
            raise block_jobs.failure(ended, row.volume_id)


async def _ended(monitor: Monitor, name: str) -> block_jobs.BlockJob:
    """Return the job when it has ended.

    To derive a key, and to measure how many rounds that shall take, the storage daemon stops
    answering: for a second on an idle machine, on a busy one for several.
    """
    job: block_jobs.BlockJob | None = None
    with anyio.move_on_after(AMEND_TIMEOUT_S):
        while True:
            job = (await block_jobs.find_all(monitor, timeout_s=AMEND_TIMEOUT_S)).get(name)
            if job is None or job.status == block_jobs.CONCLUDED:
                break
            await anyio.sleep(block_jobs.QUERY_PAUSE_S)
    if job is None or job.status != block_jobs.CONCLUDED:
        raise Internal(f"job {name} did not end within {AMEND_TIMEOUT_S:g} s")
    return job


async def _image(monitor: Monitor, name: str) -> dict[str, Any]:
    answer = await monitor.call("query-named-block-nodes", {"flat": True})
    nodes = cast(list[dict[str, Any]], answer)
    image: dict[str, Any] = next(node["image"] for node in nodes if node["node-name"] == name)
    return image


async def _slots(monitor: Monitor, name: str) -> list[bool]:
    """Return which slots of an encrypted layer are in use."""
    details = (await _image(monitor, name))["format-specific"]["data"]
    return [slot["active"] for slot in details.get("encrypt", details)["slots"]]


def _free_slot(slots: list[bool], volume_id: str) -> int:
    if all(slots):
        raise ResourceExhausted(
            "every key slot of the volume is in use",
            resource=volume_id,
            hint="remove keys that CHV does not know of, with cryptsetup luksKillSlot",
        )
    return slots.index(False)
