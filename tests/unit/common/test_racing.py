"""Work that ends early when something else happens first."""

from __future__ import annotations

import anyio
import pytest

from chv.common.errors import Unavailable
from chv.common.racing import unless


async def test_work_that_is_done_first_gives_its_result() -> None:
    assert await unless(anyio.Event().wait, lambda: _after(0.0, None)) == [None]


async def test_work_ends_when_the_other_happens_first() -> None:
    happened, ended = anyio.Event(), list[str]()
    happened.set()

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("work")

    assert await unless(happened.wait, work) == []
    assert ended == ["work"]


async def test_an_error_of_the_work_is_no_group() -> None:
    async def work() -> None:
        raise Unavailable("no server")

    with pytest.raises(Unavailable, match="no server"):
        await unless(anyio.Event().wait, work)


async def _after(delay_s: float, result: None) -> None:
    await anyio.sleep(delay_s)
    return result
