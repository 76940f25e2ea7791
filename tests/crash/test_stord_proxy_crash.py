"""stord is killed at every step of the life of a VM with an in-flight proxy; the next converges.

Attach, death of the storage daemon, death of the proxy, deaths without end, recovery, detach:
whatever was cut short, a request of the guest is answered afterwards, there is one storage daemon
and one proxy, and at the end nothing. With CHV_LONG=1 every failpoint, else a sample.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from chv.common.errors import OutcomeUnknown, Unavailable
from chv.common.wire import stord as wire
from tests.helpers import wait_until
from tests.integration.stord_helpers import IDS, Node, needs_qsd, open_node
from tests.integration.vhost_client import VhostDisk

pytestmark = [pytest.mark.root, needs_qsd]

GRAPH = (
    *("after_grant", "before_spawn", "after_spawn", "after_worker_record", "after_prime"),
    "after_rename",
)
PROXY = ("before_proxy_spawn", "after_proxy_spawn", "after_proxy_record", "after_proxy_rename")
FAILPOINTS = (
    *(f"stord.attach.{place}" for place in PROXY),
    "stord.restart.after_intent",
    *(f"stord.restart.{place}" for place in GRAPH),
    *(f"stord.adopt.{place}" for place in PROXY),
    "stord.give_up.after_proxy_stop",
    "stord.give_up.after_stop",
    "stord.give_up.after_remove",
    *(f"stord.recover.{place}" for place in PROXY),
    "stord.detach.after_proxy_stop",
)
SAMPLE = 8
CHOSEN = (
    FAILPOINTS
    if os.environ.get("CHV_LONG")
    else tuple(sorted(random.Random(7).sample(FAILPOINTS, SAMPLE)))
)
T = TypeVar("T")


class Scenario:
    """The life of one raw volume at one VM."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.vm, self.volume = IDS.uid(), IDS.uid()
        self.kills = 0

    async def run(self) -> None:
        node = self.node
        await self.step(lambda: node.open(self.volume))
        info = await self.step(lambda: node.attach(self.volume, self.vm))
        assert info.crash_class is wire.CrashClass.KEEP_VM
        self.works(info)
        await self.kill_and_return(lambda row: row.backend_pid)
        self.works(info)
        await self.kill_and_return(lambda row: row.attachments[0].proxy_pid)
        self.works(info)
        await self.lose()
        await self.step(lambda: node.recover(self.vm))
        self.works(info)
        await self.step(lambda: node.detach(self.volume, self.vm))
        await self.step(lambda: node.delete(self.volume))

    async def step(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call; where it kills stord, start the next one and make it again."""
        try:
            return await call()
        except (OutcomeUnknown, Unavailable):
            await self.after_kill()
        return await call()

    async def after_kill(self) -> None:
        assert await self.node.ended() == -signal.SIGKILL
        self.kills += 1
        assert len(self.node.workers()) <= 2
        await self.node.start()
        assert len(self.node.workers()) <= 2

    async def session(self) -> wire.VmBackendInfo | None:
        """The VM's session; None while stord is dead, which is mended here."""
        try:
            return next(row for row in await self.node.sessions() if row.vm_id == self.vm)
        except (OutcomeUnknown, Unavailable):
            await self.after_kill()
            return None

    async def kill_and_return(self, pid_of: Callable[[wire.VmBackendInfo], int]) -> None:
        row = await self.session()
        assert row is not None
        old = pid_of(row)
        os.kill(old, signal.SIGKILL)

        async def is_back() -> bool:
            row = await self.session()
            serving = row is not None and row.backend is wire.BackendState.SERVING
            return serving and row is not None and pid_of(row) not in (0, old)

        await wait_until(is_back, timeout_s=20)
        assert len(self.node.workers()) == 2

    async def lose(self) -> None:
        """Kill the storage daemon whenever there is one, until stord gives up."""

        async def is_lost() -> bool:
            row = await self.session()
            if row is not None and row.backend is wire.BackendState.SERVING:
                os.kill(row.backend_pid, signal.SIGKILL)
            return row is not None and row.backend is wire.BackendState.LOST

        await wait_until(is_lost, timeout_s=20)

    def works(self, info: wire.AttachmentInfo) -> None:
        with VhostDisk(Path(info.export_path)) as disk:
            assert disk.write_back
            assert disk.write(0, b"d" * 512) == 0
            assert disk.read(0, 512) == b"d" * 512


async def leaves_nothing(node: Node) -> None:
    assert node.workers() == []
    assert node.run_files() == []
    assert node.volume_names() == []
    assert node.cgroups() == []
    assert await node.census() == []
    assert await node.sessions() == []


@pytest.mark.parametrize("name", CHOSEN)
async def test_a_kill_at_a_step_of_a_proxy_converges_and_leaks_nothing(name: str) -> None:
    async with open_node(start=False, storage='proxy = "auto"') as node:
        await node.start(failpoints=f"{name}=1*kill")
        scenario = Scenario(node)

        await scenario.run()

        assert scenario.kills == 1
        await leaves_nothing(node)


async def test_every_step_that_is_the_proxys_own_is_in_the_list() -> None:
    async with open_node(start=False, storage='proxy = "auto"') as node:
        log = node.config.with_name("hits")
        await node.start(failpoints="stord.never=off", failpoints_log=log)

        await Scenario(node).run()

        await leaves_nothing(node)
        names = {name for name in log.read_text().split() if name.startswith("stord.")}
    assert {name for name in names if "proxy" in name or ".restart." in name} <= set(FAILPOINTS)
    assert set(FAILPOINTS) <= names
