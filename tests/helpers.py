"""What tests share: waiting for something to become true, with a deadline; taps."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, overload

import anyio

T = TypeVar("T")
POLL_S = 0.01


@overload
async def wait_until(
    probe: Callable[[], Awaitable[T]], *, timeout_s: float = 5.0, what: str = ""
) -> T: ...
@overload
async def wait_until(probe: Callable[[], T], *, timeout_s: float = 5.0, what: str = "") -> T: ...
async def wait_until(probe: Callable[[], Any], *, timeout_s: float = 5.0, what: str = "") -> Any:
    """Return the first true value of `probe`, plain or async; fail when none comes in time."""
    with anyio.move_on_after(timeout_s):
        while True:
            seen = probe()
            value = await seen if inspect.isawaitable(seen) else seen
            if value:
                return value
            await anyio.sleep(POLL_S)
    raise AssertionError(f"not true within {timeout_s:g} s: {what or probe}")


def taps_of(pid: int) -> list[str]:
    """Return the name of the tap behind each descriptor of one that a process holds."""
    found = []
    for info in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(FileNotFoundError):  # closed since
            lines = info.read_text().splitlines()
            found += [line.split("\t")[1] for line in lines if line.startswith("iff:")]
    return found
