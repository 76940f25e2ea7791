"""GetHealth and GetMetrics: what stord says of itself and of all volumes. Reads only."""

from __future__ import annotations

import anyio.to_thread

from chv.common.files import free_bytes
from chv.common.rpc import Server
from chv.common.wire import stord as wire
from chv.common.wire.types import Empty, Feature
from chv.stord import confinement, growth
from chv.stord.keeper import Keeper
from chv.stord.metrics import Metrics
from chv.stord.proxy import command
from chv.stord.qsd import graph
from chv.stord.space import SpaceMonitor
from chv.stord.volumes import Volumes

NOT_LOOKED = Feature(name=graph.BINARY, present=False, detail="not looked for yet")


class Reports:
    """See the module. `binary`: what the probe of the storage daemon has found."""

    def __init__(self, keeper: Keeper, volumes: Volumes, space: SpaceMonitor) -> None:
        self._keeper = keeper
        self._parts = parts = keeper.parts
        self._volumes = volumes
        self._space = space
        self._metrics = Metrics(parts.records, parts.provider, parts.errors)
        self.binary = NOT_LOOKED

    def register(self, server: Server) -> None:
        """Add the handlers."""
        server.add(wire.STORD_HEALTH, self.health)
        server.add(wire.GET_METRICS, self.metrics)

    async def metrics(self, _request: Empty) -> wire.StorageMetrics:
        """See the wire."""
        known = self._parts.records.volumes
        infos = [await self._volumes.info(item) for item in sorted(known) if item in known]
        places = await anyio.to_thread.run_sync(self._space.places)
        return await self._metrics.collect(infos, places)

    async def health(self, _request: Empty) -> wire.StordHealth:
        """See the wire."""
        records = self._parts.records
        lost = self._keeper.open_losses()
        places = await anyio.to_thread.run_sync(self._space.places)
        full = [each for each in places if each.level is wire.SpaceLevel.CRITICAL]
        problem = "" if self.binary.present else self.binary.detail
        if full:
            problem = f"hardly any space is left in {full[0].location}"
        if lost:
            problem = lost[0].message
        return wire.StordHealth(
            status="degraded" if problem else "healthy",
            storage_daemon_version=self.binary.detail if self.binary.present else "",
            features=self._features(),
            volumes=len(records.volumes),
            attachments=len(records.attachments),
            free_bytes=await anyio.to_thread.run_sync(free_bytes, self._parts.layout.state),
            last_error=problem,
            places=places,
        )

    def _features(self) -> list[Feature]:
        wanted, able = self._parts.storage.proxy == "auto", command.is_runnable()
        detail = "of writable raw disks" if wanted else "switched off: storage.proxy"
        if wanted and not able:
            detail = f"other users cannot run {command.interpreter()}"
        tracking = Feature(name="in_flight_tracking", present=wanted and able, detail=detail)
        return [self.binary, tracking, self._online_growth(), confinement.feature()]

    def _online_growth(self) -> Feature:
        major = self.binary.detail.partition(".")[0]
        able = self.binary.present and major.isdigit() and int(major) >= growth.MAJOR_MIN
        detail = (
            "with QEMU as VMM" if able else f"needs QEMU {growth.MAJOR_MIN}, else at next start"
        )
        return Feature(name="online_grow", present=able, detail=detail)
