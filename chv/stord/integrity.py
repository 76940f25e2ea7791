"""qcow2 files whose storage daemon ended uncleanly are checked before anybody opens them again.

A kill can leave clusters that no table names (harmless) and, where the file system lost writes,
tables that are wrong: a guest would read other data than it wrote. The check goes on when its
caller has given up waiting, so that a large volume gets through however short their patience.
Errors: DataLoss, with file and remedy; those of the tools.
"""

from __future__ import annotations

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from chv.common import logs
from chv.common.errors import ChvError, DataLoss, Internal
from chv.common.failpoint import failpoint
from chv.common.secret import Secret
from chv.common.wire.stord import VolumeFormat
from chv.stord.keys import read_key
from chv.stord.qsd import graph
from chv.stord.records import Volume
from chv.stord.tools import Call, json_image
from chv.stord.work import Parts

log = logs.get(__name__)
CHECK_TIMEOUT_S = 3600.0
KEY_ID = "k"
# qemu-img check: in order; corrupt; only leaks, which cost space and nothing else.
CLEAN, CORRUPT, LEAKS = 0, 2, 3


class Integrity:
    """Checks, one at a time per volume."""

    def __init__(self, parts: Parts, tasks: TaskGroup) -> None:
        self._parts = parts
        self._records = parts.records
        self._tasks = tasks
        self._running: dict[str, anyio.Event] = {}
        self._failed: dict[str, ChvError] = {}

    async def require(self, volume_id: str) -> None:
        """Return when the volume is known to be in order; raise where it is not."""
        if volume_id not in self._records.unclean:
            return
        if volume_id not in self._running:
            self._running[volume_id] = anyio.Event()
            self._failed.pop(volume_id, None)
            self._tasks.start_soon(self._run, volume_id)
        await self._running[volume_id].wait()
        failure = self._failed.get(volume_id)
        if failure is not None:
            raise failure

    async def _run(self, volume_id: str) -> None:
        """Check, remember; the firewall of one check."""
        ended = self._running[volume_id]
        try:
            await self._check(self._records.volumes[volume_id])
            await failpoint("stord.check.before_clean")
            await self._records.mark_clean(volume_id)
        except ChvError as error:
            log.error("volume_damaged", volume_id=volume_id, error=error)
            self._failed[volume_id] = error
        except Exception as error:
            log.exception("volume_unchecked", error, volume_id=volume_id)  # noqa: TRY401  our logger
            self._failed[volume_id] = Internal("the check failed inside stord", resource=volume_id)
        finally:
            del self._running[volume_id]
            ended.set()

    async def _check(self, row: Volume) -> None:
        """Check every layer: a snapshot or a merge may have been under way in any of them."""
        for layer in row.layers:
            node = await anyio.to_thread.run_sync(
                self._parts.disks.layer, row.volume_id, layer.number
            )
            if node.format == VolumeFormat.QCOW2.value:
                await self._check_layer(row, node)

    async def _check_layer(self, row: Volume, layer: graph.LayerNode) -> None:
        keys: dict[str, Secret] = {}
        if layer.key:
            keys[KEY_ID] = await anyio.to_thread.run_sync(read_key, self._parts.layout, layer.key)
        path = layer.protocol.options["filename"]
        owns = [p for p in self._parts.disks.paths(row.volume_id) if str(p) == path]
        call = Call(
            owns=tuple(owns),
            keys=keys,
            volume_id=row.volume_id,
            accept=(CLEAN, CORRUPT, LEAKS),
            timeout_s=CHECK_TIMEOUT_S,
        )
        node = graph.image_node(layer, KEY_ID) | {"backing": None}
        completed = await self._parts.tools.run(["check", "-q", json_image(node)], call)
        log.info("volume_checked", volume_id=row.volume_id, outcome=completed.returncode)
        if completed.returncode == CORRUPT:
            raise DataLoss(
                f"{path!r} is damaged since its storage daemon ended uncleanly",
                resource=row.volume_id,
                hint=f"chv volume repair {row.volume_id}, or restore a backup or a snapshot",
            )
