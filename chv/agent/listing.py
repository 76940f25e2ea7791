"""One list call shared by everybody who asks while it is due (single flight).

`fresh` returns what a call said that started after the caller asked. Hundreds of objects that
reconcile at once thus cost two calls, not hundreds. Fails with the error of the call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio

from chv.common.errors import ChvError, Unavailable, from_data

R = TypeVar("R")


class _Flight(Generic[R]):
    def __init__(self) -> None:
        self.done = anyio.Event()
        self.result: list[R] = []
        self.error: ChvError = Unavailable("the call was given up")

    def take(self) -> R:
        if not self.result:
            raise from_data(self.error.data())
        return self.result[0]


class Listing(Generic[R]):
    """A list that is fetched at most once at a time."""

    def __init__(self, fetch: Callable[[], Awaitable[R]]) -> None:
        self._fetch = fetch
        self._lock = anyio.Lock(fast_acquire=True)
        self._due: _Flight[R] | None = None

    async def fresh(self) -> R:
        """Return the list as of now or later."""
        flight = self._due
        if flight is None:
            flight = self._due = _Flight()
            await self._fly(flight)
        else:
            await flight.done.wait()
        return flight.take()

    async def _fly(self, flight: _Flight[R]) -> None:
        try:
            async with self._lock:
                # From here on the call may miss what newcomers have just done.
                self._due = None
                flight.result.append(await self._fetch())
        except ChvError as error:
            flight.error = error
        finally:
            if self._due is flight:
                self._due = None
            flight.done.set()
