"""Supervision of chv-stord and chv-nwd: the agent alone starts them.

Each is a child with a parent-death signal: a killed agent takes them along and the next one
starts them again, which is safe because the workers (storage daemons, dnsmasq, VMMs) are nobody's
children. A daemon is ready when its Hello says so, hung when GetHealth stays unanswered, and given
up on when it ends too often or speaks another protocol; then the node is Failed until an operator
resets it. A restart that was asked for is no loss while it takes its time: calls wait for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskStatus

from chv.agent.links import DaemonLink
from chv.common import logs
from chv.common.clock import Clock, timestamp
from chv.common.errors import (
    ChvError,
    Conflict,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Unavailable,
)
from chv.common.layout import Layout
from chv.common.process import Child, spawn_child
from chv.common.rpc import Client, Method, connect
from chv.common.supervise import (
    ChildSpec,
    ChildState,
    ChildStatus,
    GivenUp,
    PlannedRestart,
    supervise,
)
from chv.common.wire.agent import DaemonStatus
from chv.common.wire.hello import Incompatible, check_reply
from chv.common.wire.nwd import NWD_HEALTH
from chv.common.wire.stord import STORD_HEALTH
from chv.common.wire.types import HELLO, Empty, HelloReply, HelloRequest

log = logs.get(__name__)

LISTEN_TIMEOUT_S = 30.0  # from its start until it listens
READY_TIMEOUT_S = 300.0  # while it answers that it is re-reading the world
RESTART_TIMEOUT_S = 12.0  # of a restart on purpose, before it counts as lost
DRAIN_S_MAX = 5.0  # that calls under way are let finish before one
CONNECT_RETRY_S = 0.02
HEALTH_EVERY_S = 2.0
HEALTH_TIMEOUT_S = 2.0
HEALTH_MISSES_MAX = 5
STOP_GRACE_S = 3.0
# Settings of the test build that a daemon must see as well; nothing else is handed down.
PASSED_ENVIRONMENT = ("CHV_FAILPOINTS", "CHV_FAILPOINTS_LOG", "CHV_TEST_BUILD", "CHV_BOOT_ID")

HEALTH: dict[str, Method[Any, Any]] = {"stord": STORD_HEALTH, "nwd": NWD_HEALTH}


@dataclass(frozen=True)
class DaemonEvents:
    """What the supervisor tells: (name, reason). `lost` may come again, `failed` comes once."""

    ready: Callable[[str], None]
    lost: Callable[[str, str], None]
    failed: Callable[[str, str], None]
    answered: Callable[[str], None] = lambda name: None  # a question about its health


@dataclass
class _Daemon:
    name: str
    link: DaemonLink
    state: str = "stopped"
    pid: int = 0
    restarts: int = 0
    since: str = ""
    message: str = ""
    version: str = ""
    health: Any = None
    wanted: anyio.Event = field(default_factory=anyio.Event)  # a restart on purpose
    settled: anyio.Event | None = None  # one is under way: set when it is ready, or lost after all


class Daemons:
    """Runs both daemons and knows how they are."""

    def __init__(
        self, config_path: Path, layout: Layout, clock: Clock, events: DaemonEvents
    ) -> None:
        self._config_path = config_path
        self._layout = layout
        self._clock = clock
        self._events = events
        self._daemons = {name: _Daemon(name, DaemonLink(name)) for name in HEALTH}
        self._reset = anyio.Event()

    def link(self, name: str) -> DaemonLink:
        """Return the engine's way to a daemon."""
        return self._daemons[name].link

    def health(self, name: str) -> Any:
        """Return the last GetHealth reply of a daemon, None before the first."""
        return self._daemons[name].health

    def statuses(self) -> list[DaemonStatus]:
        """Return how each daemon is, for the node's status."""
        return [
            DaemonStatus(
                name=daemon.name,
                state=daemon.state,
                pid=daemon.pid,
                restarts=daemon.restarts,
                since=daemon.since,
                message=daemon.message,
                version=daemon.version,
            )
            for daemon in self._daemons.values()
        ]

    async def restart(self, name: str) -> None:
        """Start a daemon anew and return when it is ready; nothing counts as failed or lost.

        Calls under way are let finish, new ones wait. FailedPrecondition where it was given up on,
        Conflict while one is under way, Unavailable where it did not come back: then it is lost.
        """
        daemon = self._daemons[name]
        if daemon.state not in ("ready", "hung"):
            raise FailedPrecondition(
                f"chv-{name} is {daemon.state}: {daemon.message or 'there is nothing to restart'}",
                resource=f"daemon/{name}",
                hint="`chv node reset` starts what was given up on",
            )
        if daemon.settled is not None:
            raise Conflict(f"chv-{name} is being restarted already", resource=f"daemon/{name}")
        log.info("daemon.restart", name=name, pid=daemon.pid)
        daemon.settled = anyio.Event()
        try:
            await self._start_anew(daemon, daemon.settled)
        finally:
            daemon.settled = None
            daemon.link.release()
            if daemon.state != "ready":
                self._events.lost(name, daemon.message or "it is not back from its restart")
        if daemon.state != "ready":
            raise Unavailable(
                f"chv-{name} is {daemon.state}: {daemon.message}", resource=f"daemon/{name}"
            )

    async def _start_anew(self, daemon: _Daemon, settled: anyio.Event) -> None:
        daemon.link.hold()
        with anyio.move_on_after(DRAIN_S_MAX):
            await daemon.link.idle()
        self._set(daemon, "restarting", "it was asked for")
        daemon.wanted.set()
        with anyio.move_on_after(RESTART_TIMEOUT_S):
            await settled.wait()

    def reset(self) -> None:
        """Start daemons again that were given up on."""
        self._reset.set()

    async def run(self) -> None:
        """Supervise until cancelled; the daemons end with it, what they serve does not."""
        async with anyio.create_task_group() as tasks:
            for daemon in self._daemons.values():
                tasks.start_soon(self._keep, daemon)

    async def _keep(self, daemon: _Daemon) -> None:
        async def run(*, task_status: TaskStatus[None]) -> None:  # noqa: ASYNC128  by _serve
            await self._run(daemon, task_status.started)

        spec = ChildSpec(
            daemon.name, run, ready_timeout_s=READY_TIMEOUT_S, hopeless=(Incompatible,)
        )
        while True:
            try:
                await supervise(spec, lambda status: self._changed(daemon, status))
            except GivenUp as error:
                log.error("daemon.given_up", name=daemon.name, reason=error.message)
                self._events.failed(daemon.name, error.message)
            self._reset = anyio.Event()
            await self._reset.wait()

    def _changed(self, daemon: _Daemon, status: ChildStatus) -> None:
        daemon.restarts = status.restarts
        if status.state is ChildState.STARTING:
            if daemon.settled is None:
                self._set(daemon, "starting", "")
            return
        if status.state is ChildState.READY:
            self._set(daemon, "ready", "")
            self._events.ready(daemon.name)
        else:
            log.warning("daemon.ended", name=daemon.name, reason=status.reason)
            self._set(daemon, status.state.value, status.reason)
            self._events.lost(daemon.name, status.reason)
        if daemon.settled is not None:
            daemon.settled.set()

    def _set(self, daemon: _Daemon, state: str, message: str) -> None:
        if daemon.state != state:
            daemon.since = timestamp(self._clock.now())
        daemon.state, daemon.message = state, message

    async def _run(self, daemon: _Daemon, on_ready: Callable[[], None]) -> None:
        child = await spawn_child(
            (sys.executable, "-m", f"chv.{daemon.name}", "--config", str(self._config_path)),
            log_path=str(self._layout.logs / f"{daemon.name}.log"),
            environment={key: os.environ[key] for key in PASSED_ENVIRONMENT if key in os.environ},
        )
        daemon.pid = child.pid
        daemon.wanted = anyio.Event()
        log.info("daemon.started", name=daemon.name, pid=child.pid)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_raise_on_exit, child, daemon.name)
                tasks.start_soon(_raise_on_request, daemon.wanted)
                await self._serve(daemon, on_ready)
        finally:
            daemon.link.detach()
            daemon.pid = 0
            with anyio.CancelScope(shield=True):
                await child.terminate(grace_s=STOP_GRACE_S)

    async def _serve(self, daemon: _Daemon, on_ready: Callable[[], None]) -> None:
        """Hold the connection: wait until the daemon is ready, then watch its health."""
        path = self._layout.socket(daemon.name)
        was_ready = False
        late = anyio.current_time() + LISTEN_TIMEOUT_S
        while True:
            try:
                async with connect(path) as client:
                    await self._await_ready(daemon, client)
                    daemon.link.attach(client)
                    was_ready = True
                    on_ready()
                    await self._watch(daemon, client)
            except Unavailable:
                # Until it was ready it may just be starting; afterwards it is lost.
                if was_ready or anyio.current_time() > late:
                    raise
            await anyio.sleep(CONNECT_RETRY_S)

    async def _await_ready(self, daemon: _Daemon, client: Client) -> None:
        while True:
            hello = await _hello(client)
            _check_hello(hello, daemon, self._layout.instance)
            daemon.version = hello.version
            if hello.state == "ready":
                return
            if daemon.settled is None:
                self._set(daemon, "recovering", "re-reading the world")
            await anyio.sleep(CONNECT_RETRY_S)

    async def _watch(self, daemon: _Daemon, client: Client) -> None:
        """Ask for health for ever; raise when the daemon is hung or its connection is gone."""
        misses = 0
        while True:
            try:
                daemon.health = await client.call(
                    HEALTH[daemon.name], Empty(), timeout_s=HEALTH_TIMEOUT_S
                )
            except DeadlineExceeded as error:
                misses += 1
                # At once, so that no pass of a VM waits out a deadline on it.
                daemon.link.detach()
                self._set(daemon, "hung", f"GetHealth unanswered {misses} times")
                self._events.lost(daemon.name, f"not answering: {error.message}")
                if misses >= HEALTH_MISSES_MAX:
                    raise Unavailable(f"{daemon.name} hangs: {misses} health checks") from error
                continue
            self._events.answered(daemon.name)
            if misses:
                misses = 0
                daemon.link.attach(client)
                self._set(daemon, "ready", "")
                self._events.ready(daemon.name)
            await anyio.sleep(HEALTH_EVERY_S)


async def _raise_on_exit(child: Child, name: str) -> None:
    code = await child.wait()
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    if code == DataLoss.exit_code:
        how += " (DATA_LOSS: a person must look)"
    raise Unavailable(f"{name} ended {how}, see `chv logs daemon/{name}`")


async def _raise_on_request(wanted: anyio.Event) -> None:
    await wanted.wait()
    raise PlannedRestart


async def _hello(client: Client) -> HelloReply:
    try:
        return await client.call(HELLO, HelloRequest(client="agent"))
    except FailedPrecondition as error:  # the one reason there is to refuse a Hello
        raise Incompatible(error.message, hint=error.hint) from error


def _check_hello(hello: HelloReply, daemon: _Daemon, instance: str) -> None:
    """Refuse a daemon that speaks otherwise, or is not the one just started."""
    check_reply(hello)
    if hello.instance != instance or hello.daemon != daemon.name:
        raise ChvError(
            f"{hello.daemon} of instance {hello.instance} answers on the socket of {daemon.name}"
        )
    if hello.pid != daemon.pid:
        raise Unavailable(f"an older {daemon.name} (pid {hello.pid}) still holds the socket")
