"""Drives networks towards their records: on a call, on the end of a dnsmasq, every RESYNC_S.

A pass observes, plans and applies until the plan is empty. The caller of `converge` and its kin
holds the network's lock. What fails is raised to the caller, kept as the network's problem and
tried again at the next resync; other networks go on. Nothing is made for a network or NIC that was
not asked for since the last boot. A change of groups or exposures alone goes a shorter way: the
rules are loaded without a look at the rest.
"""

from __future__ import annotations

from functools import partial

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from chv.common import logs
from chv.common.clock import Clock, SystemClock
from chv.common.errors import ChvError, Internal, Unavailable
from chv.common.failpoint import failpoint
from chv.common.process import WorkerRecord
from chv.nwd import dnsmasq, plan, runfiles, sweeping
from chv.nwd.apply import Work
from chv.nwd.balancing import Balancer, without_health
from chv.nwd.blueprint import Blueprint, gateway6
from chv.nwd.host import Host
from chv.nwd.kernel import conntrack, dhcp6_release, dhcp_release, netns
from chv.nwd.loading import load_rules, restore_rules
from chv.nwd.locks import NetworkLocks
from chv.nwd.metadata_server import MetadataServer
from chv.nwd.nft import rules
from chv.nwd.nic_pass import NicPass
from chv.nwd.observe import observe
from chv.nwd.parts import Parts
from chv.nwd.plan import BRIDGE, DnsState
from chv.nwd.policy import takes_new
from chv.nwd.records import Health, Network, Nic, Wanted
from chv.nwd.steps import Step, step_name
from chv.nwd.watching_kernel import KernelWatch

log = logs.get(__name__)
RESYNC_S = 15.0
PASSES_MAX = 4
RESYNC, DETACH, DELETE = "resync", "detach", "delete"
HEALTH, DRAIN = "health", "drain"


class Keeper:
    """Keeps every network as its record says."""

    def __init__(
        self,
        parts: Parts,
        host: Host,
        tasks: anyio.abc.TaskGroup,
        clock: Clock | None = None,
    ) -> None:
        self.parts = parts
        self.clock = clock or SystemClock()
        self.balancer = Balancer(parts, self.clock, tasks, self._health_changed, self._drained)
        self.host = host
        self.locks = NetworkLocks()
        self.problems: dict[str, str] = {}
        self.metadata = MetadataServer(parts, tasks)
        look_again = partial(self.converge, verb=RESYNC)
        self.kernel = KernelWatch(parts, host, self.locks, self.clock, look_again)
        self._tasks = tasks
        self._clean: set[str] = set()
        self._watched: dict[str, str] = {}

    # --- passes; the caller holds the lock
    async def converge(self, network_id: str, verb: str) -> None:
        """Bring the whole network to what its record says."""
        row = self.parts.records.networks.get(network_id)
        if row is None:
            return
        try:
            if row.wanted is Wanted.REMOVED:
                await self._remove(row)
            elif self.parts.is_due(row):
                await self._settle(row, verb)
                await self._afterwards(row, verb)
            self.problems.pop(network_id, None)
            return
        except (ChvError, OSError) as error:
            problem = error
        except BaseException:
            self._clean.discard(network_id)
            raise
        self._clean.discard(network_id)
        self.problems[network_id] = str(problem)
        await self._enforce(row, verb)
        raise problem

    async def _enforce(self, row: Network, verb: str) -> None:
        """What holds up the rest must not leave a network open: its rules stand all the same."""
        if row.wanted is Wanted.REMOVED or not self.parts.is_due(row):
            return
        try:
            ruleset = rules.render(self.parts.network_rules(row))
            restore = partial(restore_rules, self.parts, row.network_id, ruleset, verb)
            if await anyio.to_thread.run_sync(restore):
                log.warning("rules_alone_restored", network_id=row.network_id)
        except (ChvError, OSError) as error:
            log.warning("rules_not_restored", network_id=row.network_id, error=error)

    async def converge_nic(self, nic: Nic, verb: str) -> None:
        """Bring one NIC to what its record says; the whole network where that is not enough."""
        network_id = nic.network_id
        row = self.parts.records.networks[network_id]
        if not self.parts.is_due(row):
            return
        if network_id in self._clean:
            self._clean.discard(network_id)  # until it has worked
            if await self._settle_nic(row, nic, verb):
                await self._afterwards(row, verb)
                self._clean.add(network_id)
                return
        await self.converge(network_id, verb)

    async def converge_rules(self, network_id: str, verb: str) -> None:
        """Bring the rules of a network to what the records say, and what follows from them."""
        row = self.parts.records.networks.get(network_id)
        if row is None or not self.parts.is_due(row):
            return
        if network_id in self._clean:
            self._clean.discard(network_id)  # until it has worked
            is_busy = await self._load_rules(row, verb)
            if is_busy is not None:
                await self._afterwards(row, verb, is_busy)
                self._clean.add(network_id)
                return
        await self.converge(network_id, verb)

    async def _load_rules(self, row: Network, verb: str) -> bool | None:
        """Load the rules alone; None where the whole network must be looked at.

        Else tell whether connections may be tracked that came about before them.
        """
        try:
            if not self.host.has_exposed(row):
                await self.host.converge()
            ruleset = rules.render(self.parts.network_rules(row))
            load = partial(load_rules, self.parts, row.network_id, ruleset, verb)
            return await anyio.to_thread.run_sync(load)
        except (ChvError, OSError) as error:
            log.info("rules_not_loaded", network_id=row.network_id, verb=verb, error=error)
            return None

    async def _afterwards(self, row: Network, verb: str, is_busy: bool | None = None) -> None:
        """The rules stand: end what they do not allow; check and drain what the records say."""
        await sweeping.settle(self.parts, row, verb, self.clock.monotonic(), is_busy)
        self.balancer.refresh(row.network_id)

    async def finish_removal(self, nic: Nic) -> None:
        """Forget a NIC of which nothing is left; its lease and connections end with it."""
        path = self.parts.netns_path(nic.network_id)
        state = await self.parts.workers.state(nic.network_id, path)
        row = self.parts.records.networks[nic.network_id]
        if self.parts.is_due(row) and state is DnsState.ALIVE:
            gateway = row.topology.gateway
            await netns.inside(path, lambda: _end_traces(nic, gateway))
            await self.end_lease6(nic)
        await self.forget_health(nic)
        await self.parts.records.drop_nic(nic)

    async def end_lease6(self, nic: Nic) -> None:
        """Free the NIC's IPv6 address for whatever asks next, under another identity too."""
        gateway = gateway6(self.parts.records.networks[nic.network_id].topology)
        if not (gateway and nic.address6):
            return
        text = runfiles.read(self.parts.layout.network_run(nic.network_id) / dnsmasq.LEASES)
        server = dhcp6_release.server_id(dnsmasq.ENTERPRISE, dnsmasq.server_identifier(gateway))
        found = [lease for lease in dhcp6_release.leases(text) if lease.address == nic.address6]
        path = self.parts.netns_path(nic.network_id)
        for lease in found:
            await netns.inside(path, partial(dhcp6_release.send, lease, server, BRIDGE))

    async def forget_health(self, nic: Nic) -> None:
        """What was known of a NIC as a target says nothing of the next one in its place."""
        for row in self.parts.records.exposures_of(nic.network_id):
            if nic.nic_id in row.health:
                await self.parts.records.put_exposure(without_health(row, nic.nic_id))

    async def _settle(self, row: Network, verb: str) -> None:
        await self.host.converge()
        blueprint = self.parts.blueprint(row)
        for _ in range(PASSES_MAX):
            if not await self._pass(row.network_id, blueprint, verb):
                break
        else:
            raise Internal("the network does not settle", resource=row.network_id)
        await self.metadata.follow(row)
        await self.kernel.follow(row)
        self._watch(row.network_id)
        self._clean.add(row.network_id)
        for nic in self.parts.records.nics_of(row.network_id):
            if nic.wanted is Wanted.REMOVED:
                await self.finish_removal(nic)

    async def _pass(self, network_id: str, blueprint: Blueprint, verb: str) -> int:
        """Observe, plan, apply; return how many steps it took."""
        observed, found = await observe(self.parts, network_id)
        if observed.dns is DnsState.UNKNOWN:
            raise Unavailable(
                "it cannot be told whether the recorded dnsmasq lives", resource=network_id
            )
        steps = plan.plan_network(blueprint.desired, observed)
        work = Work(self.parts, network_id, blueprint, found, verb)
        await self._apply(work, steps, network_id, verb)
        return len(steps)

    async def _settle_nic(self, row: Network, nic: Nic, verb: str) -> bool:
        """Apply what concerns one NIC; False where the whole network must be looked at."""
        network_id = row.network_id
        path = self.parts.netns_path(network_id)
        if await self.parts.workers.state(network_id, path) is not DnsState.ALIVE:
            return False
        one = NicPass(self.parts, nic, self.parts.blueprint(row), verb)
        steps = await anyio.to_thread.run_sync(one.run)
        if steps is None:
            return False
        _note_applied(steps, network_id, verb)
        return True

    async def _remove(self, row: Network) -> None:
        network_id = row.network_id
        await self.metadata.stop(network_id)
        self.kernel.forget(network_id)
        for _ in range(PASSES_MAX):
            observed, found = await observe(self.parts, network_id)
            if observed.dns is DnsState.UNKNOWN:
                raise Unavailable("dnsmasq may still run", resource=network_id)
            has_files = self.parts.layout.network_run(network_id).exists()
            name = self.parts.layout.uplink(network_id)
            steps = plan.plan_removal(name, observed, has_files=has_files)
            work = Work(self.parts, network_id, None, found, DELETE)
            await self._apply(work, steps, network_id, DELETE)
            if not steps:
                break
        else:
            raise Internal("the network does not go", resource=network_id)
        await self.host.converge()
        await failpoint("nwd.delete.before_drop")
        await self.parts.records.drop_network(row)
        self._clean.discard(network_id)
        self.problems.pop(network_id, None)
        self.balancer.refresh(network_id)

    async def _apply(self, work: Work, steps: list[Step], network_id: str, verb: str) -> None:
        await work.apply(steps)
        _note_applied(steps, network_id, verb)

    # --- watching
    def _watch(self, network_id: str) -> None:
        """Look after the network's dnsmasq, once per incarnation."""
        process = self.parts.workers.process(network_id)
        if process is None or self._watched.get(network_id) == process.worker_id:
            return
        self._watched[network_id] = process.worker_id
        self._tasks.start_soon(self._until_end, network_id, process)

    async def _until_end(self, network_id: str, process: WorkerRecord) -> None:
        await self.parts.workers.until_end(process)
        if self._watched.get(network_id) == process.worker_id:
            del self._watched[network_id]
        current = self.parts.workers.process(network_id)
        if current is None or current.worker_id != process.worker_id:
            return  # we ended it
        log.warning("dnsmasq_ended", network_id=network_id, worker_id=process.worker_id)
        await self.try_converge(network_id)

    async def _health_changed(self, exposure_id: str, nic_id: str, health: Health) -> None:
        """Record what a target has come to; its exposure's rules follow."""
        row = self.parts.records.exposures.get(exposure_id)
        if row is None:
            return
        network_id = row.exposure.network_id
        async with self.locks.hold(network_id):
            row = self.parts.records.exposures.get(exposure_id)
            if row is None or row.wanted is Wanted.REMOVED or nic_id not in row.exposure.targets:
                return
            changed = msgspec.structs.replace(row, health={**row.health, nic_id: health})
            await self.parts.records.put_exposure(changed)
            if takes_new(row, nic_id) != takes_new(changed, nic_id):
                await failpoint("nwd.health.recorded")
                await self.converge_rules(network_id, HEALTH)

    async def _drained(self, network_id: str) -> None:
        """A target's time is over: what it still has ends."""
        async with self.locks.hold(network_id):
            await self.converge_rules(network_id, DRAIN)

    async def try_converge(self, network_id: str) -> None:
        """Converge for nobody in particular: a failure is logged and tried again later."""
        async with self.locks.hold(network_id):
            try:
                await self.converge(network_id, RESYNC)
            except Exception as error:  # noqa: BLE001  the firewall of one network
                log.warning("not_converged", network_id=network_id, error=error)

    async def resync(self) -> None:
        """Look at everything once."""
        for network_id in list(self.parts.records.networks):
            await self.try_converge(network_id)
        try:
            await self.kernel.follow_host()
            await self.host.converge()
            await self.host.check()
        except Exception as error:  # noqa: BLE001  the firewall of the host's side
            log.warning("host_not_converged", error=error)
        log.debug("resynced", networks=len(self.parts.records.networks))

    async def resync_forever(self) -> None:
        """Look at everything again and again."""
        while True:
            await anyio.sleep(RESYNC_S)
            await self.resync()


def _note_applied(steps: list[Step], network_id: str, verb: str) -> None:
    if steps:
        names = [step_name(step) for step in steps]
        log.info("applied", network_id=network_id, verb=verb, steps=names)


def _end_traces(nic: Nic, gateway: str) -> None:
    """In the namespace: what the next NIC with this address must not inherit."""
    conntrack.forget(*nic.addresses)
    dhcp_release.send(nic.mac, nic.address, gateway, BRIDGE)
