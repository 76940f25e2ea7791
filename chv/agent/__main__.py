"""chv-agent: composes the node and runs until a signal. Its long-lived tasks, all in one group:

server          the local API; bound first, `recovering` until the store is read
daemons         supervises stord and nwd (daemons.py)
engine          reconciles every object (engine.py)
console         keeps the console holder and its lines (console/keeper.py)
images          receives uploads; removes once an hour what no Image has
storage events  hands stord's losses to the engine
census          looks for what no record explains (census.py)
metrics         answers scrapes on metrics.sock (metrics.py)
probes          tries the VMMs, so that the first start need not wait

A signal ends them and touches nothing in the world: VMs, storage daemons and networks go on.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import anyio

from chv.agent import host_checks
from chv.agent.census import Census, CensusParts
from chv.agent.console.api import ConsoleApi
from chv.agent.console.keeper import ConsoleKeeper
from chv.agent.daemons import DaemonEvents, Daemons
from chv.agent.engine import Engine
from chv.agent.events_news import (
    daemon_down,
    daemon_up,
    host_news,
    leak_news,
    node_news,
)
from chv.agent.events_record import Sighting
from chv.agent.guest_access import GuestProbe
from chv.agent.images import Images
from chv.agent.metrics import Metrics
from chv.agent.metrics_sample import Sampler
from chv.agent.metrics_tasks import serve_metrics
from chv.agent.node import Node, NodeState, Predicate
from chv.agent.node_gate import NodeGate
from chv.agent.operations import SYSTEM
from chv.agent.ports import Limits, World
from chv.agent.probes import Probes, settings_of
from chv.agent.requesters import stamped
from chv.agent.resources import machine
from chv.agent.resources.commitment import Budget
from chv.agent.resources.inventory import InventoryApi, InventoryParts
from chv.agent.saves import Saves
from chv.agent.seeds import Seeds
from chv.agent.service import Parts, Service, add_hello
from chv.agent.store_sqlite import open_store
from chv.agent.upkeep_api import UpkeepApi
from chv.agent.upstream.desk import view_of
from chv.agent.upstream.link import Link
from chv.agent.vmms import Vmms
from chv.common import config as configuration
from chv.common import failpoint, logs
from chv.common.clock import SystemClock
from chv.common.config import Config
from chv.common.errors import ChvError, DataLoss, Unavailable
from chv.common.files import FileLock, ensure_dir
from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import choose_provider
from chv.common.rpc import Server, connect
from chv.common.wire.agent import CollectImages, DaemonStatus
from chv.common.wire.agent_methods import AGENT_METHODS
from chv.common.wire.nwd_policy import WATCH_NETWORKS
from chv.common.wire.stord import WATCH_STORAGE
from chv.common.wire.types import Empty
from chv.vmm.registry import known_binaries, make_drivers

log = logs.get("chv.agent")
RETRY_S = 0.2
HOST_CHECK_EVERY_S = 30.0
COLLECT_EVERY_S = 3600.0


class Agent:
    """Everything that the tasks share."""

    def __init__(self, config_path: Path, config: Config, layout: Layout) -> None:
        self.config, self.layout = config, layout
        self.clock, self.ids = SystemClock(), Ids()
        self._host_due = anyio.Event()  # set where the state waits for a look at the host
        self.node = Node(self.clock, self._on_state)
        self.daemons = Daemons(
            config_path,
            layout,
            self.clock,
            DaemonEvents(
                ready=self._daemon_ready,
                lost=self._daemon_lost,
                failed=self._daemon_failed,
                answered=lambda name: self.node.confirm(_predicate(name)),
            ),
        )
        self.provider = choose_provider(layout)
        self.console = ConsoleKeeper(layout, self.provider, self.ids, config.console)
        self.images = Images(layout.images, Path(config.images.cache_dir))
        self.seeds = Seeds(layout)
        settings = settings_of(config.vmm, os.environ)
        drivers = make_drivers(
            qemu_binary=settings.qemu_binary,
            cloud_hypervisor_binary=settings.cloud_hypervisor_binary,
            cloud_hypervisor_sha256=settings.cloud_hypervisor_sha256,
            kvm=settings.kvm,
            environment=os.environ,
        )
        binaries = known_binaries(
            qemu_binary=settings.qemu_binary,
            cloud_hypervisor_binary=settings.cloud_hypervisor_binary,
            environment=os.environ,
        )
        self.probes = Probes(settings, drivers, Path(config.images.cache_dir), binaries)
        nwd = self.daemons.link("nwd")
        self.vmms = Vmms(layout, self.provider, self.probes, nwd, self.console)
        self.guest = GuestProbe(nwd, layout)
        self.budget = Budget(machine.capacity(config.limits), self.probes.expected)
        self.engine: Engine | None = None
        self.census: Census | None = None

    def world(self) -> World:
        """Return the engine's view of everything."""
        link = Link(self.clock, embedded=True)  # the node is its own control plane
        limits = self.config.limits
        return World(
            stord=self.daemons.link("stord"),
            nwd=self.daemons.link("nwd"),
            vmm=self.vmms,
            images=self.images,
            seeds=self.seeds,
            saves=Saves(self.layout, self.config.storage),
            guest=self.guest,
            gate=NodeGate(self.node, lambda: link.connected),
            clock=self.clock,
            ids=self.ids,
            layout=self.layout,
            limits=Limits(
                vms_max=limits.vms_max,
                parallel_starts=limits.parallel_starts,
                parallel_drains=limits.parallel_drains,
                restarts_max=limits.restarts_max,
                restart_window_s=limits.restart_window_s,
                capacity=self.budget.capacity,
            ),
            expect=self.budget.expect,
            link=link,
        )

    def census_parts(self, engine: Engine) -> CensusParts:
        """Return what the census looks at and through."""
        return CensusParts(
            layout=self.layout,
            provider=self.provider,
            link=self.daemons.link,
            vmms=self.vmms,
            console=self.console,
            records=engine.leak_records,
            clock=self.clock,
            ids=self.ids,
            config=self.config.census,
            on_look=lambda book: engine.news.tell(*leak_news(engine.tables(), book)),
        )

    def inventory_parts(self, engine: Engine) -> InventoryParts:
        """Return what the inventory looks at and through."""
        return InventoryParts(
            config=self.config,
            layout=self.layout,
            clock=self.clock,
            provider=self.provider,
            probes=self.probes,
            daemons=self.daemons,
            tables=engine.tables,
            budget=self.budget,
        )

    # --- what the daemons' supervisor tells
    def _daemon_ready(self, name: str) -> None:
        self.node.observe(_predicate(name), holds=True, reason="Answering")
        self._tell(daemon_up(self._daemon(name)))
        if self.engine is not None:
            self.engine.notify_daemon_ready(name)

    def _daemon_lost(self, name: str, reason: str) -> None:
        known = _predicate(name) in self.node.held
        self.node.observe(_predicate(name), holds=False, reason="NotAnswering", message=reason)
        state = "hung" if self._daemon(name).state == "hung" else "down"
        self._tell(daemon_down(name, state, reason))
        if known and self.engine is not None:
            self.engine.notify_daemon_lost(name)

    def _daemon_failed(self, name: str, reason: str) -> None:
        self._tell(daemon_down(name, "failed", reason))
        self.node.fatal(f"{name}: {reason}")

    def _daemon(self, name: str) -> DaemonStatus:
        return next(each for each in self.daemons.statuses() if each.name == name)

    def _tell(self, *sightings: Sighting) -> None:
        if self.engine is not None:
            self.engine.news.tell(*sightings)

    def _on_state(self, state: NodeState) -> None:
        log.info("node.state", state=state, transition=self.node.transitions[-1])
        self._tell(node_news(state, self.node.transitions[-1]))
        if self.engine is not None:
            self.engine.upstream.tell_node(view_of(self.node))
        if state is NodeState.TENANT_READY and self.engine is not None:
            self.engine.notify_daemon_ready("node")
        if state is NodeState.BOOTSTRAPPING:
            self._host_due.set()

    # --- tasks
    async def watch_storage(self) -> None:
        """Hand storage losses to the engine; over and over, as stord comes and goes."""
        assert self.engine is not None
        while True:
            try:
                async with connect(self.layout.socket("stord")) as client:
                    await client.stream(WATCH_STORAGE, Empty(), self.engine.notify_storage_event)
            except Unavailable:
                await anyio.sleep(RETRY_S)

    async def watch_networks(self) -> None:
        """Hand what nwd sees to the engine; over and over, as nwd comes and goes."""
        assert self.engine is not None
        while True:
            try:
                async with connect(self.layout.socket("nwd")) as client:
                    await client.stream(WATCH_NETWORKS, Empty(), self.engine.notify_network_event)
            except ChvError as error:
                if not isinstance(error, Unavailable):
                    log.warning("networks.not_watched", error=str(error))
                await anyio.sleep(RETRY_S)

    async def collect_images(self) -> None:
        """Remove what no Image has, an hour after the start and each hour."""
        assert self.engine is not None
        while True:
            await anyio.sleep(COLLECT_EVERY_S)
            try:
                request = CollectImages(requester=SYSTEM, dry_run=True)
                if not (await self.engine.collect_images(request)).removed:
                    continue  # nothing to be done, so no operation
                done = await self.engine.collect_images(CollectImages(requester=SYSTEM))
            except (ChvError, OSError) as error:
                log.warning("images.collect_failed", error=str(error))
                continue
            if done.removed:
                log.info("images.collected", removed=done.removed, freed_bytes=done.freed_bytes)

    async def watch_host(self) -> None:
        """Keep the host predicate true to the machine."""
        while True:
            self._host_due = anyio.Event()
            await self.check_host()
            with anyio.move_on_after(HOST_CHECK_EVERY_S):
                await self._host_due.wait()

    async def check_host(self) -> None:
        """Look once."""
        found = await anyio.to_thread.run_sync(host_checks.failures, self.config)
        if self.node.state is not NodeState.BOOTSTRAPPING:
            found += await anyio.to_thread.run_sync(host_checks.shortages, self.layout)
        reason = "ChecksFailed" if found else "ChecksPassed"
        self.node.observe(Predicate.HOST, holds=not found, reason=reason, message="; ".join(found))
        self._tell(host_news(found))

    async def adopt(self) -> None:
        """Judge what runs before anything is done."""
        assert self.engine is not None
        report = await self.engine.recover()
        log.info("agent.adopted", report=report)
        for worker_id in report.orphans:
            log.warning("agent.orphan", worker_id=worker_id)
        self.node.observe(Predicate.ADOPTED, holds=True, reason="CensusDone")


def _predicate(name: str) -> Predicate:
    return Predicate.STORD if name == "stord" else Predicate.NWD


async def run(config_path: Path, config: Config, layout: Layout) -> None:
    """Run the agent until SIGTERM or SIGINT."""
    make_directories(layout, config)
    with FileLock.acquire(layout.lock("agent")):
        agent = Agent(config_path, config, layout)
        uids = frozenset(config.api.allow_uids)
        server = Server("agent", AGENT_METHODS, allow_uids=uids, stamp=stamped)
        server.recovering = "reading the store"
        add_hello(server, layout)
        async with open_store(layout.database("agent")) as store:
            agent.engine = Engine(store, agent.world())
            Service(
                Parts(
                    config=config,
                    layout=layout,
                    node=agent.node,
                    engine=agent.engine,
                    daemons=agent.daemons,
                    probes=agent.probes,
                    vmms=agent.vmms,
                    seeds=agent.seeds,
                )
            ).register(server)
            agent.census = Census(agent.census_parts(agent.engine))
            ConsoleApi(agent.console, agent.engine).register(server)
            InventoryApi(agent.inventory_parts(agent.engine)).register(server)
            upkeep = UpkeepApi(agent.census, agent.daemons, agent.console, agent.engine)
            upkeep.register(server)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_until_signal, tasks.cancel_scope)
                await tasks.start(server.serve, layout.socket("agent"))
                sampler = Sampler(agent.engine.tables, agent.daemons.link, agent.clock)
                parts = (agent.config, agent.node, agent.daemons, agent.engine, agent.census)
                metrics = Metrics(*parts, sampler, agent.budget)
                await tasks.start(serve_metrics, metrics, layout.socket("metrics"))
                await _start(agent, server, tasks)


async def _start(agent: Agent, server: Server, tasks: anyio.abc.TaskGroup) -> None:
    """Bring the node up in the order of its state machine."""
    assert agent.engine is not None
    await agent.engine.load()  # first of all: it says whether the node is drained
    agent.node.bootstrap()
    await agent.check_host()
    await agent.images.recover()
    await anyio.to_thread.run_sync(agent.seeds.operator_key)
    agent.node.observe(Predicate.STORE, holds=True, reason="Read")
    server.recovering = None
    for task in (
        agent.daemons.run,
        agent.console.run,
        agent.images.run,
        agent.collect_images,
        agent.watch_storage,
        agent.watch_networks,
        agent.watch_host,
        agent.probes.ensure,
    ):
        tasks.start_soon(task)
    await agent.adopt()
    await tasks.start(agent.engine.run)
    assert agent.census is not None
    tasks.start_soon(agent.census.run)
    log.info("agent.ready")
    _tell_ready()


def make_directories(layout: Layout, config: Config) -> None:
    """Make the node's directories with their modes. Idempotent."""
    ensure_dir(layout.run_root, mode=0o711)
    ensure_dir(layout.run, mode=0o711)
    ensure_dir(layout.api, mode=0o750, gid=_group(config.api.group))
    ensure_dir(layout.vms, mode=0o711)
    ensure_dir(layout.state_root, mode=0o711)
    ensure_dir(layout.state, mode=0o711)
    ensure_dir(layout.logs, mode=0o700)


def _group(name: str) -> int:
    """Return the gid of the API's group; root's where it does not exist (root alone then)."""
    import grp

    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return 0


def _tell_ready() -> None:
    fd = os.environ.get("CHV_READY_FD")
    if fd is not None:
        os.write(int(fd), b"ready\n")
        os.close(int(fd))


async def _until_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            log.info("agent.stopping", signal=number.name)
            scope.cancel()
            return


def main(argv: list[str] | None = None) -> int:
    """Parse arguments, read the configuration, run."""
    parser = argparse.ArgumentParser(prog="chv-agent", description="The node's orchestrator.")
    parser.add_argument("--config", type=Path, required=True, help="the node's chv.toml")
    parser.add_argument("--worker-id", help="carried for whoever looks for this process")
    arguments = parser.parse_args(argv)
    try:
        config = configuration.load(arguments.config)
        logs.setup("agent", config.node.log_level)
        failpoint.require_allowed()
        layout = configuration.resolve_layout(config)
        anyio.run(run, arguments.config, config, layout)
    except ChvError as error:
        print(f"chv-agent: {error.code}: {error}", file=sys.stderr)
        return error.exit_code
    except BaseExceptionGroup as group:
        lost = group.subgroup(DataLoss)
        log.exception("agent.crashed", lost or group)  # noqa: TRY401  our log, not logging
        return DataLoss.exit_code if lost else 70
    return 0


if __name__ == "__main__":
    sys.exit(main())
