"""Work that ends early when something else happens first. Nothing of the two outlives the call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

T = TypeVar("T")


async def unless(
    happens: Callable[[], Awaitable[object]], work: Callable[[], Awaitable[T]]
) -> list[T]:
    """Return what `work` returns, alone in a list; an empty one where `happens` returned first.

    What `work` raises comes out as it is, not as part of a group.
    """
    results, failures = list[T](), list[Exception]()
    async with anyio.create_task_group() as race:

        async def watch() -> None:
            await happens()
            race.cancel_scope.cancel()

        race.start_soon(watch)
        try:
            results.append(await work())
        except Exception as error:  # noqa: BLE001  raised below, outside the group
            failures.append(error)
        race.cancel_scope.cancel()
    if failures:
        raise failures[0]
    return results
