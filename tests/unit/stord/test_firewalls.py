"""What fails in a task of stord's own fails alone: the daemon, and every other VM, go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from chv.common.errors import Internal
from chv.stord.integrity import Integrity
from chv.stord.keeper import Keeper


class _Broken(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise OSError(30, "Read-only file system")

    def get(self, key: str, default: Any = None) -> Any:
        raise OSError(30, "Read-only file system")


async def test_a_check_that_breaks_is_an_error_of_its_volume() -> None:
    records = SimpleNamespace(unclean={"v"}, volumes=_Broken())
    async with anyio.create_task_group() as tasks:
        parts = cast(Any, SimpleNamespace(records=records))
        integrity = Integrity(parts, tasks)
        with anyio.fail_after(5), pytest.raises(Internal, match="check failed"):
            await integrity.require("v")


async def test_a_watch_that_breaks_ends_nothing_else() -> None:
    keeper = object.__new__(Keeper)

    async def broken(_vm_id: str, _worker: object) -> None:
        raise OSError(24, "Too many open files")

    cast(Any, keeper)._after_end = broken
    await keeper._until_gone("vm", cast(Any, None))
