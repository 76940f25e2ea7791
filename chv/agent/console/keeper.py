"""The agent's side of the console holder: find it, start it, attach lines to it.

One holder per instance, proven by its lock and found again by its socket; in a new holder
everything is attached again by the engine's next pass, since `attached` is then empty. A holder
that listens and stays silent is replaced: every start of a VM needs one, and no guest is lost
with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import anyio

from chv.agent.console.wire import (
    ATTACH_CONSOLE,
    BOUND_RECORDINGS,
    DETACH_CONSOLE,
    LIST_CONSOLES,
    SHUT_DOWN,
    AttachConsole,
    BoundRecordings,
    DetachConsole,
)
from chv.common import logs
from chv.common.clock import SystemClock, timestamp
from chv.common.config_console import ConsoleConfig
from chv.common.errors import (
    ChvError,
    DeadlineExceeded,
    FailedPrecondition,
    Unavailable,
    Unsupported,
)
from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import (
    FoundWorker,
    Provider,
    SpawnSpec,
    WorkerRecord,
    terminate,
    wait_gone,
)
from chv.common.rpc import Client, connect
from chv.common.wire.agent import DaemonStatus
from chv.common.wire.agent_console import OPEN_LINE, ConsoleReply, OpenLine
from chv.common.wire.hello import check_reply
from chv.common.wire.types import HELLO, Empty, HelloReply, HelloRequest

log = logs.get(__name__)
KIND = "console"
START_TIMEOUT_S = 10.0
RETRY_S = 0.05
CHECK_EVERY_S = 5.0
ANSWER_TIMEOUT_S = 2.0
KILL_GRACE_S = 1.0
NODE_UID = "00000000-0000-4000-8000-000000000000"


class ConsoleKeeper:
    """Keeps a holder running and remembers which lines it has."""

    def __init__(self, layout: Layout, provider: Provider, ids: Ids, config: ConsoleConfig) -> None:
        self._config = config
        self._layout = layout
        self._provider = provider
        self._ids = ids
        self._client: Client | None = None
        self._attached: set[str] = set()
        self._silent = False  # the last that was asked listened and did not answer
        self._record: WorkerRecord | None = None
        self._holder: HelloReply | None = None
        self._since = ""
        self._restarts = -1  # the first start is none
        self._poked = anyio.Event()
        self._up = anyio.Event()
        # Told of every holder that answers anew: it has no lines yet.
        self.on_up: Callable[[], None] = _nobody

    def attached(self, vm_uid: str) -> bool:
        """Whether the line is held, from memory."""
        return vm_uid in self._attached

    @property
    def pid(self) -> int:
        """The holder that answers, 0 while there is none."""
        return self._holder.pid if self._holder is not None else 0

    def status(self) -> DaemonStatus:
        """How the holder is, from memory."""
        holder = self._holder
        return DaemonStatus(
            name=KIND,
            state="ready" if holder is not None else "starting",
            pid=self.pid,
            restarts=max(self._restarts, 0),
            since=self._since,
            version=holder.version if holder is not None else "",
        )

    async def restart(self) -> None:
        """End the holder and return when another answers; Unavailable where none does.

        Lines are attached again by the engine. What guests write in between is not recorded.
        """
        client, self._up = self._connected(), anyio.Event()
        await client.call(SHUT_DOWN, Empty())
        with anyio.move_on_after(KILL_GRACE_S):
            for holder in self._holders():
                await wait_gone(holder.record())
        await self._end_holders()
        self._poked.set()
        with anyio.move_on_after(START_TIMEOUT_S):
            await self._up.wait()
            self._restarts -= 1  # asked for: it does not count
            return
        raise Unavailable("no console holder came up", resource="daemon/console")

    async def run(self) -> None:
        """Hold a connection to the holder until cancelled; start one where there is none."""
        while True:
            try:
                await self._session()
            except (ChvError, OSError) as error:
                log.warning("console.lost", error=str(error))
            self._client = self._holder = None
            self._attached.clear()
            await anyio.sleep(RETRY_S)

    async def _session(self) -> None:
        await self._ensure_process()
        async with connect(self._layout.socket(KIND)) as client:
            self._holder = await self._hello(client)
            await self._bound(client)
            self._record = self._recorded(self._holder.pid)
            self._client, self._since = client, timestamp(SystemClock().now())
            self._restarts += 1
            self._poked = anyio.Event()
            self._up.set()
            if self._restarts > 0:
                self.on_up()
            while True:
                listed = await client.call(LIST_CONSOLES, Empty(), timeout_s=CHECK_EVERY_S)
                self._attached = set(listed.vm_ids)
                await self._pause(self._record)

    async def _pause(self, record: WorkerRecord | None) -> None:
        """Wait for the next look, a poke or the holder's death: guests are not recorded then."""
        with anyio.move_on_after(CHECK_EVERY_S):
            async with anyio.create_task_group() as tasks:
                if record is not None:
                    tasks.start_soon(_poke_when_gone, record, self._poked)
                await self._poked.wait()
                tasks.cancel_scope.cancel()

    async def _hello(self, client: Client) -> HelloReply:
        """Greet; a holder that outlived an upgrade and speaks otherwise is replaced."""
        try:
            hello = await client.call(HELLO, HelloRequest(client="agent"))
            check_reply(hello)
        except FailedPrecondition as error:
            refused = error
        else:
            return hello
        log.warning("console.incompatible", error=refused.message)
        await self._end_holders()
        raise refused

    async def _bound(self, client: Client) -> None:
        """Give the bound; a holder of before there was one has none until it is restarted."""
        bound = BoundRecordings(bytes_max=self._config.recordings_bytes_max)
        try:
            await client.call(BOUND_RECORDINGS, bound)
        except Unsupported:
            log.warning("console.unbounded", fix="chv daemon restart console")

    async def _ensure_process(self) -> None:
        """Return when a holder answers; starts one only where the scan proves there is none."""
        with anyio.move_on_after(START_TIMEOUT_S):
            while not await self._answers():
                if not self._holders():
                    await self._tidy()
                    await self._start()
                await anyio.sleep(RETRY_S)
            return
        if self._silent:
            await self._end_holders()
        raise Unavailable("the console holder does not answer", resource="daemon/console")

    def _recorded(self, pid: int) -> WorkerRecord | None:
        return next((each.record() for each in self._holders() if each.pid == pid), None)

    def _holders(self) -> list[FoundWorker]:
        return self._provider.find(self._layout.worker_id(KIND, NODE_UID, ""))

    async def _tidy(self) -> None:
        """Remove what is left of the last one that answered."""
        record, self._record = self._record, None
        if record is not None:
            await self._provider.cleanup(record)

    async def _end_holders(self) -> None:
        for holder in self._holders():
            if holder.uid == os.geteuid():  # anybody can carry our id in its arguments
                log.warning("console.replaced", pid=holder.pid)
                await terminate(holder.record(), grace_s=KILL_GRACE_S)

    async def _answers(self) -> bool:
        try:
            async with connect(self._layout.socket(KIND)) as client:
                await client.call(HELLO, HelloRequest(client="agent"), timeout_s=ANSWER_TIMEOUT_S)
        except DeadlineExceeded:
            self._silent = True  # it listens, so it is not just starting
            return False
        except Unavailable:
            self._silent = False
            return False
        self._silent = False
        return True

    async def _start(self) -> None:
        worker_id = self._layout.worker_id(KIND, NODE_UID, self._ids.nonce())
        argv = (
            sys.executable, "-m", "chv.agent.console",
            "--instance", self._layout.instance,
            "--run-root", str(self._layout.run_root),
            "--state-root", str(self._layout.state_root),
            "--worker-id", worker_id,
        )  # fmt: skip
        record = self._record = await self._provider.spawn(
            SpawnSpec(
                worker_id=worker_id,
                argv=argv,
                cgroup=KIND,
                # Its two threads share a heap: what is on every node must be small.
                environment={"MALLOC_ARENA_MAX": "1"},
                log_path=str(self._layout.logs / "console.log"),
            )
        )
        log.info("console.started", pid=record.pid)

    async def attach(self, vm_uid: str, serial: Path) -> None:
        """Record the serial line of one VMM incarnation."""
        await self._connected().call(
            ATTACH_CONSOLE,
            AttachConsole(
                vm_id=vm_uid,
                socket=str(serial),
                directory=str(self._layout.vm_state(vm_uid)),
            ),
        )
        self._attached.add(vm_uid)

    async def detach(self, vm_uid: str) -> None:
        """Let go of a line; without a holder there is nothing to let go of."""
        self._attached.discard(vm_uid)
        if self._client is not None:
            await self._client.call(DETACH_CONSOLE, DetachConsole(vm_id=vm_uid))

    async def open_line(self, request: OpenLine) -> tuple[ConsoleReply, list[int]]:
        """Return a viewer's socket from the holder; FailedPrecondition: it has no such line."""
        return await self._connected().call_fds(OPEN_LINE, request)

    def _connected(self) -> Client:
        if self._client is None:
            raise Unavailable("the console holder is not up yet", resource="daemon/console")
        return self._client


async def _poke_when_gone(record: WorkerRecord, poked: anyio.Event) -> None:
    await wait_gone(record)
    poked.set()


def _nobody() -> None:
    return None
