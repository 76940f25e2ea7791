"""`python -m chv.nwd --config FILE`: the network daemon of one node, in the foreground.

Takes its lock, binds its socket and answers UNAVAILABLE while it re-reads the world, then serves
until SIGTERM or SIGINT. Its end, however it comes, tears nothing down: networks and their dnsmasq
go on. Fails to start with one JSON line that says why and the exit code of that error. The host's
namespace is the one it is started in, or the one that `network.host_netns` names.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread

from chv import VERSION
from chv.common import config as configuration
from chv.common import failpoint, logs
from chv.common.clock import SystemClock, boot_id
from chv.common.errors import ChvError, FailedPrecondition
from chv.common.files import FileLock, ensure_dir
from chv.common.layout import Layout
from chv.common.process import choose_provider, syscalls
from chv.common.rpc import Server
from chv.common.store import Store
from chv.common.wire.hello import common_version
from chv.common.wire.nwd import METHODS
from chv.common.wire.nwd_policy import POLICY_METHODS
from chv.common.wire.types import HELLO, HelloReply, HelloRequest
from chv.nwd import runfiles
from chv.nwd.blueprint import Settings
from chv.nwd.bounds import connections_default
from chv.nwd.host import Host
from chv.nwd.keeper import Keeper
from chv.nwd.kernel import sysctl
from chv.nwd.nft.ruleset import Nft
from chv.nwd.parts import Parts
from chv.nwd.records import MIGRATIONS, Records
from chv.nwd.service import Service
from chv.nwd.workers import Workers

log = logs.get("chv.nwd")
DAEMON = "nwd"
READY_FD = "CHV_READY_FD"
FILES_MAX = 16384
ALLOW_UIDS = frozenset({0})  # the agent; nobody else speaks to nwd


async def serve(config: configuration.Config, layout: Layout) -> None:
    """Run the daemon until a signal comes."""
    server = Server(DAEMON, (*METHODS, *POLICY_METHODS), allow_uids=ALLOW_UIDS)
    server.recovering = "reading its records and the kernel"
    server.add(HELLO, _hello(layout, server))
    async with (
        Store.open(layout.database(DAEMON), MIGRATIONS) as store,
        anyio.create_task_group() as tasks,
    ):
        parts = await _parts(config, layout, store)
        keeper = Keeper(parts, Host(parts), tasks)
        service = Service(keeper)
        service.register(server)
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            await tasks.start(server.serve, layout.socket(DAEMON))
            await service.restore()
            server.recovering = None
            tasks.start_soon(keeper.resync_forever)
            tasks.start_soon(keeper.kernel.run)
            tasks.start_soon(service.events.run)
            tasks.start_soon(service.watching.keep)
            await _ready(parts.records)
            async for number in signals:
                log.info("stopping", signal=number.name)
                break
        tasks.cancel_scope.cancel()


async def _parts(config: configuration.Config, layout: Layout, store: Store) -> Parts:
    records = await Records.load(store)
    provider = choose_provider(layout)
    limits = (config.limits.restarts_max, config.limits.restart_window_s)
    return Parts(
        layout=layout,
        settings=replace(Settings.of(config), connections_max=_connections_max()),
        records=records,
        provider=provider,
        workers=Workers(layout, records, provider, SystemClock(), limits),
        nft=Nft(),
        boot_id=boot_id(),
    )


def _connections_max() -> int:
    bound = connections_default(sysctl.read("net.netfilter.nf_conntrack_max"))
    log.info("connections_bound", nic_max=bound)
    return bound


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


async def _ready(records: Records) -> None:
    log.info("ready", networks=len(records.networks), nics=len(records.nics))
    number = os.environ.get(READY_FD, "")
    if number.isdigit():
        await anyio.to_thread.run_sync(_tell, int(number))


def _tell(fd: int) -> None:
    os.write(fd, b"ready\n")
    os.close(fd)


def _prepare(layout: Layout) -> None:
    for directory in (layout.run, runfiles.base(layout), layout.state):
        ensure_dir(directory, mode=0o711)
    ensure_dir(layout.api, mode=0o750, gid=-1)


def _raise_limits() -> None:
    """Let a thousand networks have their few sockets each, as far as this machine allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _enter(path: str) -> None:
    """Move this process into the host's namespace; before the first thread, so all are in it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            syscalls.join_netns(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise FailedPrecondition(
            f"cannot enter the network namespace {path!r}: {error.strerror}",
            field="network.host_netns",
            hint="it is gone after a reboot; `chv up` makes a sandbox's again",
        ) from error


def main(arguments: list[str] | None = None) -> int:
    """Start from the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="chv-nwd", description="The network daemon of CHV.")
    parser.add_argument("--config", type=Path, required=True, help="the node's TOML file")
    options = parser.parse_args(arguments)
    logs.setup(DAEMON)
    try:
        failpoint.require_allowed()
        config = configuration.load(options.config)
        logs.setup(DAEMON, config.node.log_level)
        layout = configuration.resolve_layout(config)
        _prepare(layout)
        _raise_limits()
        with FileLock.acquire(layout.lock(DAEMON)):
            if config.network.host_netns:
                _enter(config.network.host_netns)
            anyio.run(serve, config, layout)
    except ChvError as error:
        log.error("failed", error=error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
