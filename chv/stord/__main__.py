"""`python -m chv.stord --config FILE`: the storage daemon of one node, in the foreground.

Takes its lock, binds its socket and answers UNAVAILABLE while it re-reads the world, then serves
until SIGTERM or SIGINT. Its end, however it comes, tears nothing down: storage daemons go on.
Fails to start with one JSON line that says why and exit code of that error.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread

from chv import VERSION
from chv.common import config as configuration
from chv.common import failpoint, logs
from chv.common.clock import SystemClock, boot_id
from chv.common.errors import ChvError
from chv.common.files import FileLock, ensure_dir
from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import choose_provider
from chv.common.rpc import Server
from chv.common.store import Store
from chv.common.wire.hello import common_version
from chv.common.wire.stord import METHODS
from chv.common.wire.types import HELLO, HelloReply, HelloRequest
from chv.stord.backends.registry import Backends
from chv.stord.disks import Disks
from chv.stord.events import Events
from chv.stord.jobs import Jobs
from chv.stord.keeper import Keeper
from chv.stord.qsd.monitors import Monitors
from chv.stord.records import MIGRATIONS, Records
from chv.stord.service import Service
from chv.stord.tools import Tools
from chv.stord.work import Parts

log = logs.get("chv.stord")
DAEMON = "stord"
CLOSE_TIMEOUT_S = 5.0
READY_FD = "CHV_READY_FD"
ALLOW_UIDS = frozenset({0})  # the agent; nobody else speaks to stord


async def serve(config: configuration.Config, layout: Layout) -> None:
    """Run the daemon until a signal comes."""
    server = Server(DAEMON, METHODS, allow_uids=ALLOW_UIDS)
    server.recovering = "reading its records and the storage daemons"
    server.add(HELLO, _hello(layout, server))
    async with (
        Store.open(layout.database(DAEMON), MIGRATIONS) as store,
        _monitors() as monitors,
        anyio.create_task_group() as tasks,
    ):
        records = await Records.load(store)
        ids = Ids()
        tools = Tools(layout, ids)
        backends = Backends(layout, config.storage, tools)
        parts = Parts(
            layout=layout,
            records=records,
            provider=choose_provider(layout),
            disks=Disks(records, backends, config.storage.aio),
            tools=tools,
            clock=SystemClock(),
            ids=ids,
            boot_id=boot_id(),
            storage=config.storage,
            monitors=monitors,
        )
        events = Events()
        keeper = Keeper(parts, events, tasks)
        jobs = Jobs(records, parts.clock, events, tasks)
        service = Service(keeper, backends.file, events, jobs)
        service.register(server)
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            await tasks.start(server.serve, layout.socket(DAEMON))
            tasks.start_soon(_bring_up, server, service, keeper)
            async for number in signals:
                log.info("stopping", signal=number.name)
                break
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def _monitors() -> AsyncIterator[Monitors]:
    monitors = Monitors()
    try:
        yield monitors
    finally:
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await monitors.close()


async def _bring_up(server: Server, service: Service, keeper: Keeper) -> None:
    await service.restore()
    server.recovering = None
    log.info("ready", vms=len(keeper.parts.records.backends))
    number = os.environ.get(READY_FD, "")
    if number.isdigit():
        await anyio.to_thread.run_sync(_tell, int(number))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.space.run)
        await keeper.pulse_forever()


def _hello(
    layout: Layout, server: Server
) -> Callable[[HelloRequest], Coroutine[None, None, HelloReply]]:
    async def hello(request: HelloRequest) -> HelloReply:
        return HelloReply(
            daemon=DAEMON,
            version=VERSION,
            protocol=common_version(request),
            instance=layout.instance,
            boot_id=boot_id(),
            pid=os.getpid(),
            state="ready" if server.recovering is None else "recovering",
        )

    return hello


def _tell(fd: int) -> None:
    os.write(fd, b"ready\n")
    os.close(fd)


def prepare(layout: Layout) -> None:
    """Make the directories that the daemon itself needs."""
    for directory in (layout.run, layout.vms, layout.state):
        ensure_dir(directory, mode=0o711)
    ensure_dir(layout.api, mode=0o750, gid=-1)
    ensure_dir(layout.logs, mode=0o750, gid=-1)


def main(arguments: list[str] | None = None) -> int:
    """Start from the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="chv-stord", description="The storage daemon of CHV.")
    parser.add_argument("--config", type=Path, required=True, help="the node's TOML file")
    options = parser.parse_args(arguments)
    logs.setup(DAEMON)
    try:
        _run(options.config)
    except ChvError as error:
        return _failed(error)
    except BaseExceptionGroup as group:  # what ended a task of the daemon
        known, others = group.split(ChvError)
        if known is None or others is not None:
            raise
        return _failed(_leaf(known))
    return 0


def _run(path: Path) -> None:
    failpoint.require_allowed()
    config = configuration.load(path)
    logs.setup(DAEMON, config.node.log_level)
    layout = configuration.resolve_layout(config)
    prepare(layout)
    with FileLock.acquire(layout.lock(DAEMON)):
        anyio.run(serve, config, layout)


def _leaf(error: BaseException) -> ChvError:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ChvError)
    return error


def _failed(error: ChvError) -> int:
    log.error("failed", error=error)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
