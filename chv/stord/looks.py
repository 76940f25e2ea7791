"""What was seen last of volumes whose bytes a server has, for listings, which wait for no server.

A look that is older than `FRESH_S` is answered as it is, with its age, and taken anew meanwhile;
of a volume that was never looked at the first is waited for, but not long. Errors of a look are
in what it says; one that breaks is logged and taken again at the next listing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

import anyio
import msgspec
from anyio.abc import TaskGroup

from chv.common import logs
from chv.common.clock import Clock
from chv.stord.backends.base import Inspection, Space

log = logs.get(__name__)
FRESH_S = 5.0
FIRST_WAIT_S = 1.0
UNSEEN = Inspection(location="", state="broken", problem="its server has not answered yet")


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen; `age_s` seconds ago, when it is told."""

    found: Inspection
    space: Space | None = None
    age_s: int = 0


Taking = Callable[[], Awaitable[Look]]


class Looks:
    """The last look at each volume. Looks for listings are taken in `tasks`."""

    def __init__(self, clock: Clock, tasks: TaskGroup) -> None:
        self._clock = clock
        self._tasks = tasks
        self._last: dict[str, tuple[float, Look]] = {}
        self._under_way: dict[str, anyio.Event] = {}

    def remember(self, volume_id: str, look: Look) -> None:
        """Keep what somebody has just seen."""
        self._last[volume_id] = (self._clock.monotonic(), look)

    def keep(self, volume_ids: Collection[str]) -> None:
        """Forget all volumes but these."""
        for gone in self._last.keys() - set(volume_ids):
            del self._last[gone]

    async def recent(self, volume_id: str, take: Taking) -> Look:
        """Return what was seen last, and look again where that was long ago."""
        now = self._clock.monotonic()
        at, look = self._last.get(volume_id, (now - 2 * FRESH_S, None))
        if look is not None and now - at < FRESH_S:
            return look
        done = self._under_way.get(volume_id)
        if done is None:
            done = self._under_way[volume_id] = anyio.Event()
            self._tasks.start_soon(self._take, volume_id, take, done)
        if look is not None:
            return msgspec.structs.replace(look, age_s=int(now - at))
        with anyio.move_on_after(FIRST_WAIT_S):
            await done.wait()
        return self._last[volume_id][1] if volume_id in self._last else Look(found=UNSEEN)

    async def _take(self, volume_id: str, take: Taking, done: anyio.Event) -> None:
        """The firewall of one look."""
        try:
            self.remember(volume_id, await take())
        except Exception as error:
            log.exception("look_failed", error, volume_id=volume_id)  # noqa: TRY401  our logger
        finally:
            del self._under_way[volume_id]
            done.set()
