"""The watchers: a socket that breaks is told of, replaced by the next pass, and ends nothing."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from chv.common.clock import SystemClock
from chv.nwd.host import Host
from chv.nwd.kernel import netns, nft_events
from chv.nwd.kernel.link_events import Heard
from chv.nwd.locks import NetworkLocks
from chv.nwd.watching_kernel import KernelWatch
from tests.helpers import wait_until
from tests.unit.nwd.nwd_rows import network, open_parts

pytestmark = pytest.mark.root
PATIENCE_S = 30.0


class Watched:
    """A watch over a network whose namespace is this thread's own; passes are only counted."""

    def __init__(self, watch: KernelWatch, uid: str) -> None:
        self.watch, self.uid = watch, uid
        self.passes: list[str] = []

    async def follow(self) -> None:
        await self.watch._follow(self.uid, netns.OWN)


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    async with open_parts(tmp_path / "db") as parts:
        row = network()
        await parts.records.put_network(row)
        watch = KernelWatch(
            parts, Host(parts), NetworkLocks(), SystemClock(), lambda uid: look(uid)
        )
        under_test = Watched(watch, row.network_id)

        async def look(uid: str) -> None:
            under_test.passes.append(uid)
            await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch.run)
            await under_test.follow()
            yield under_test
            tasks.cancel_scope.cancel()
        watch.forget(row.network_id)
        watch.stop("")


async def test_a_socket_that_breaks_leads_to_a_pass_and_is_opened_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = watched.watch._places[watched.uid]

    def broken(_: Heard, __: socket.socket) -> bool:
        raise OSError(9, "Bad file descriptor")

    with monkeypatch.context() as patched:
        patched.setattr(Heard, "receive", broken)
        watched.watch._read(watched.uid)
    assert place.broken
    await wait_until(lambda: watched.passes == [watched.uid], timeout_s=PATIENCE_S)
    await watched.follow()
    again = watched.watch._places[watched.uid]
    assert again is not place
    assert not again.broken
    assert place.links.fileno() == -1, "the broken one is closed"


async def test_what_cannot_be_opened_is_left_to_the_resync(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.watch.stop(watched.uid)

    def refused() -> socket.socket:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(nft_events, "open_socket", refused)
        await watched.follow()
        assert watched.uid not in watched.watch._places
    await watched.follow()
    assert watched.uid in watched.watch._places


async def test_a_pass_that_fails_ends_nothing(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(uid: str) -> None:
        watched.passes.append(uid)
        await anyio.lowlevel.checkpoint()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(watched.watch, "_converge", failing)
    for count in (1, 2):
        watched.watch._case(watched.uid).told.lost = True
        watched.watch._wake(watched.uid)
        await wait_until(lambda: len(watched.passes) == count, timeout_s=PATIENCE_S)  # noqa: B023


async def test_a_network_that_is_not_due_is_not_looked_at(watched: Watched) -> None:
    watched.watch._case("unknown").told.lost = True
    watched.watch._wake("unknown")
    watched.watch._case(watched.uid).told.lost = True
    watched.watch._wake(watched.uid)
    await wait_until(lambda: watched.passes, timeout_s=PATIENCE_S)
    assert watched.passes == [watched.uid]
