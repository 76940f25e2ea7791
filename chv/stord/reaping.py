"""Removes one thing of stord's kinds that no record explains, having looked again.

Nobody calls this but on an operator's word. Looking and removing is one step under the lock of the
thing's owner, so that no call of the agent makes use of it in between. Errors as in
`chv.common.evidence.require_unexplained`.
"""

from __future__ import annotations

from pathlib import Path

import anyio.to_thread

from chv.common import logs
from chv.common.evidence import process_identity, require_unexplained
from chv.common.process import terminate
from chv.common.removal import remove_path
from chv.common.wire.types import CensusItem, Done, ReapUnexplained
from chv.stord.backends.file import FileBackend
from chv.stord.census import census
from chv.stord.locks import KeyedLocks
from chv.stord.records import Records
from chv.stord.work import Parts

log = logs.get(__name__)
STOP_GRACE_S = 2.0


class Reaping:
    """See the module."""

    def __init__(
        self, parts: Parts, records: Records, files: FileBackend, locks: KeyedLocks
    ) -> None:
        self._parts = parts
        self._records = records
        self._files = files
        self._locks = locks

    async def items(self) -> list[CensusItem]:
        """Look at everything."""
        parts = self._parts
        return await anyio.to_thread.run_sync(
            census, parts.layout, self._records, parts.provider, self._files
        )

    async def reap(self, request: ReapUnexplained) -> Done:
        """See the wire."""
        owner = require_unexplained(await self.items(), request).owner
        async with self._locks.hold(owner):
            item = require_unexplained(await self.items(), request)
            log.info("unexplained_removed", kind=item.kind, name=item.name, evidence=item.evidence)
            if item.kind == "process":
                await self._end(item)
            else:
                await anyio.to_thread.run_sync(remove_path, Path(item.name))
        return Done()

    async def _end(self, item: CensusItem) -> None:
        for found in await anyio.to_thread.run_sync(self._parts.provider.find, item.name):
            if process_identity(found) == item.identity:
                await terminate(found.record(), grace_s=STOP_GRACE_S)
                await self._parts.provider.cleanup(found.record())
