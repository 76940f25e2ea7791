"""`DaemonLink`: what becomes of calls when the daemon behind it is lost."""

from __future__ import annotations

from typing import Any, cast

import anyio
import pytest

from chv.agent.links import DaemonLink
from chv.common.errors import Unavailable
from chv.common.rpc import Client, Method
from chv.common.wire.types import Done, Empty

ASK = Method("Ask", Empty, Done, mutating=False)
CHANGE = Method("Change", Empty, Done)


class SlowClient:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.asked, self.answer = anyio.Event(), anyio.Event()

    async def call(self, method: Method[Any, Any], params: Any) -> Done:
        self.asked.set()
        await self.answer.wait()
        return Done()


def attached() -> tuple[DaemonLink, SlowClient]:
    link, client = DaemonLink("stord"), SlowClient()
    link.attach(cast(Client, client))
    return link, client


async def test_question_under_way_ends_when_the_daemon_is_lost() -> None:
    link, client = attached()
    errors: list[Unavailable] = []

    async def ask() -> None:
        with pytest.raises(Unavailable) as caught:
            await link.call(ASK, Empty())
        errors.append(caught.value)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await client.asked.wait()
            link.detach()
    assert errors[0].resource == "daemon/stord"


async def test_change_under_way_keeps_waiting_for_its_outcome() -> None:
    link, client = attached()
    replies: list[Done] = []

    async def change() -> None:
        replies.append(await link.call(CHANGE, Empty()))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(change)
            await client.asked.wait()
            link.detach()
            await anyio.lowlevel.checkpoint()
            assert not replies
            client.answer.set()
    assert replies == [Done()]


async def test_detached_link_refuses_until_it_is_attached_again() -> None:
    link, client = attached()
    link.detach()
    with pytest.raises(Unavailable, match="chv-stord is not ready"):
        await link.call(ASK, Empty())
    link.attach(cast(Client, client))
    client.answer.set()
    assert await link.call(ASK, Empty()) == Done()


async def test_cancelled_caller_is_cancelled_and_not_told_of_a_loss() -> None:
    link, client = attached()
    with anyio.move_on_after(0.01) as scope:
        await link.call(ASK, Empty())
    assert scope.cancelled_caught
    client.answer.set()
    assert await link.call(ASK, Empty()) == Done()


async def test_call_waits_for_a_daemon_that_is_restarted_on_purpose() -> None:
    link, _ = attached()
    link.hold()
    link.detach()
    replies: list[Done] = []

    async def ask() -> None:
        replies.append(await link.call(ASK, Empty()))

    after = SlowClient()
    after.answer.set()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            assert replies == []
            link.attach(cast(Client, after))
    assert replies == [Done()]


async def test_call_that_waits_fails_when_the_daemon_does_not_come_back() -> None:
    link, _ = attached()
    link.hold()
    link.detach()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_refused, link)
            await anyio.wait_all_tasks_blocked()
            link.release()


async def _refused(link: DaemonLink) -> None:
    with pytest.raises(Unavailable):
        await link.call(CHANGE, Empty())


async def test_idle_returns_when_the_last_call_has_ended() -> None:
    link, client = attached()
    done: list[str] = []

    async def change() -> None:
        await link.call(CHANGE, Empty())
        done.append("call")

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(change)
            await client.asked.wait()
            client.answer.set()
            await link.idle()
            done.append("idle")
    assert done == ["call", "idle"]
