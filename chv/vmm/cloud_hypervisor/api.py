"""The calls of Cloud Hypervisor's API that this driver makes, typed, each with its time limit.

Limits are how long a caller waits, not how long the VMM works: see `line`. A refusal becomes an
error as `refusals` says. Nothing here knows what a VM should be like.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from chv.common.errors import Internal, Unavailable
from chv.vmm.cloud_hypervisor.line import Line
from chv.vmm.cloud_hypervisor.refusals import Refused, refusal

READ_S_MAX = 5.0
CHANGE_S_MAX = 5.0
BOOT_S_MAX = 75.0  # a vhost-user disk whose back end is gone holds a boot up for 60 s
SAVE_S_MAX = 900.0  # memory is written to or read from a disk meanwhile
MOVE_S_MAX = 3600.0

Body = Mapping[str, object]
T = TypeVar("T")


class Ping(msgspec.Struct, frozen=True):
    """`vmm.ping`. `features`: what it was built with."""

    version: str
    pid: int = 0
    features: list[str] = []


class Info(msgspec.Struct, frozen=True):
    """`vm.info`. `device_tree` lists what is there, being let go of or not."""

    config: dict[str, Any]
    state: str
    memory_actual_size: int = 0
    device_tree: dict[str, Any] | None = None

    def listed(self, kind: str) -> list[dict[str, Any]]:
        """Return the entries of a list of the configuration, which may be missing."""
        return self.config.get(kind) or []


class Api:
    """The API of the VMM at one socket."""

    def __init__(self, path: Path) -> None:
        self._line = Line(path)

    @property
    def path(self) -> Path:
        """Where it listens."""
        return self._line.path

    async def ping(self) -> Ping:
        """Ask who answers; works in every state but the last: a VMM that ends is Unavailable."""
        ending: Refused | None = None
        try:
            return _decoded(await self._ask("vmm.ping"), Ping)
        except Refused as error:
            ending = error
        raise Unavailable(f"{self.path}: {ending.message}") from ending

    async def info(self) -> Info:
        """Ask for state and configuration; NoVm where there is none."""
        return _decoded(await self._ask("vm.info"), Info)

    async def counters(self) -> dict[str, dict[str, int]]:
        """Ask for what is counted; 2^64-1 and the like are left in."""
        return _decoded(await self._ask("vm.counters"), dict[str, dict[str, int]])

    async def change(self, call: str, body: Body | None = None, fds: Sequence[int] = ()) -> None:
        """Make a change that takes milliseconds."""
        await self.put(call, body, fds, limit_s=CHANGE_S_MAX)

    async def put(
        self,
        call: str,
        body: Body | None = None,
        fds: Sequence[int] = (),
        *,
        limit_s: float,
    ) -> None:
        """Make a change, waiting up to `limit_s`."""
        data = None if body is None else msgspec.json.encode(body)
        response = await self._line.tell(call, data, fds, limit_s=limit_s)
        if response.status not in (200, 204):
            raise refusal(call, response)

    def close(self) -> None:
        """Drop the connection."""
        self._line.close()

    async def _ask(self, call: str) -> bytes:
        response = await self._line.ask(call, limit_s=READ_S_MAX)
        if response.status != 200:
            raise refusal(call, response)
        return response.body


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Internal(f"Cloud Hypervisor answers with something else: {error}") from error
