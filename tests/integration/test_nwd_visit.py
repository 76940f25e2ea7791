"""A thread that goes into a namespace comes back, whatever happens there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from chv.common.ids import Ids
from chv.nwd.kernel import netns
from tests.integration.nwd_helpers import ip

pytestmark = pytest.mark.root


@pytest.fixture
def place() -> Iterator[str]:
    name = f"nwdt-{Ids().nonce()}"
    ip("netns", "add", name)
    try:
        yield netns.path_of(name)
    finally:
        ip("netns", "delete", name)


def here() -> int:
    return os.stat(netns.THREAD).st_ino  # noqa: PTH116


async def test_it_is_there_in_between_and_at_home_afterwards(place: str) -> None:
    home = here()
    for _ in range(3):
        assert await netns.inside(place, here) == netns.inode(place)
        assert await anyio.to_thread.run_sync(here) == home


async def test_an_error_brings_it_home_too(place: str) -> None:
    def fail() -> None:
        assert here() == netns.inode(place)
        raise ValueError("there")

    with pytest.raises(ValueError, match="there"):
        await netns.inside(place, fail)
    assert await anyio.to_thread.run_sync(here) == here()


async def test_many_at_once_do_not_meet(place: str) -> None:
    home, seen = here(), []

    async def look(path: str) -> None:
        seen.append((path, await netns.inside(path, here)))

    async with anyio.create_task_group() as tasks:
        for number in range(40):
            tasks.start_soon(look, place if number % 2 else netns.OWN)
    assert {inode for path, inode in seen if path == place} == {netns.inode(place)}
    assert {inode for path, inode in seen if path == netns.OWN} == {home}


async def test_a_namespace_that_is_not_there_moves_nobody(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        await netns.inside(str(tmp_path / "none"), here)
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        await netns.inside(str(tmp_path / "file"), here)
    assert await anyio.to_thread.run_sync(here) == here()
