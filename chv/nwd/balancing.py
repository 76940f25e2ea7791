"""Who of an exposure's targets is well, found out again and again; and when a drain is over.

One task per target that is checked, one per network in which something drains; all of them follow
from the records, so `refresh` is all that anybody calls. A check takes no longer than the interval
of its checks. What a target has come to is recorded by `changed` before anything rests on it, and
outlives this process. A task never ends by an error: it is logged, and the next check tries again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from ipaddress import IPv6Network

import anyio
import anyio.abc
import msgspec

from chv.common import logs
from chv.common.clock import Clock, timestamp
from chv.common.wire.nwd_policy import HealthProtocol
from chv.nwd import asking, policy
from chv.nwd.addresses import gateway6
from chv.nwd.asking import Question
from chv.nwd.parts import Parts
from chv.nwd.records import ExposureRow, Health, Network, Wanted

log = logs.get(__name__)
DRAIN_RETRY_S = 1.0
Changed = Callable[[str, str, Health], Awaitable[None]]  # exposure, NIC, what it came to
Drained = Callable[[str], Awaitable[None]]  # network
Ask = Callable[[Question], Awaitable[str]]


@dataclass
class Judgement:
    """What checks in a row amount to: `rise` good ones, `fall` bad ones. Pure.

    `healthy` is None until one of the two has come about for the first time.
    """

    rise: int
    fall: int
    healthy: bool | None = None
    _good: int = field(default=0, init=False)
    _bad: int = field(default=0, init=False)

    def note(self, *, is_well: bool) -> bool | None:
        """Take in one check; return the new state where it changed, else None."""
        self._good = self._good + 1 if is_well else 0
        self._bad = 0 if is_well else self._bad + 1
        if self.healthy is not True and self._good >= self.rise:
            return True
        if self.healthy is not False and self._bad >= self.fall:
            return False
        return None


@dataclass(frozen=True, slots=True)
class _Watch:
    """One target that is checked. Another value is another task."""

    exposure_id: str
    nic_id: str
    question: Question
    interval_s: float
    rise: int
    fall: int


@dataclass(frozen=True, slots=True)
class _Drain:
    """The next end of a drain in a network."""

    network_id: str
    end_s: float


_Task = _Watch | _Drain


class Balancer:
    """All checks and drains of this node."""

    def __init__(
        self,
        parts: Parts,
        clock: Clock,
        tasks: anyio.abc.TaskGroup,
        changed: Changed,
        drained: Drained,
    ) -> None:
        self._parts = parts
        self._clock = clock
        self._tasks = tasks
        self._changed = changed
        self._drained = drained
        self._running: dict[str, dict[_Task, anyio.CancelScope]] = {}
        self.ask: Ask = asking.ask

    def refresh(self, network_id: str) -> None:
        """Let what runs for a network be what its records say."""
        wanted = set(self._wanted(network_id))
        running = self._running.setdefault(network_id, {})
        for task in running.keys() - wanted:
            running.pop(task).cancel()
        for task in wanted - running.keys():
            running[task] = scope = anyio.CancelScope()
            self._tasks.start_soon(self._run, task, scope)
        if not running:
            del self._running[network_id]

    def _wanted(self, network_id: str) -> list[_Task]:
        network = self._parts.records.networks.get(network_id)
        if network is None or not self._parts.is_due(network):
            return []
        rows = self._parts.records.exposures_of(network_id)
        rows = [row for row in rows if row.wanted is Wanted.PRESENT]
        tasks: list[_Task] = [each for row in rows for each in self._watches(network, row)]
        ends = [drain.end_s for row in rows for drain in row.draining]
        if ends:
            tasks.append(_Drain(network_id, min(ends)))
        return tasks

    def _watches(self, network: Network, row: ExposureRow) -> list[_Watch]:
        exposure, check = row.exposure, row.exposure.health
        if check.protocol is HealthProtocol.NONE:
            return []
        watches = []
        for nic in filter(None, map(self._parts.nic_due, exposure.targets)):
            address = policy.checked_address(exposure, nic)
            question = Question(
                netns_path=self._parts.netns_path(network.network_id),
                gateway=_gateway(network, address),
                address=address,
                port=policy.checked_port(exposure),
                protocol=check.protocol,
                path=check.path,
                timeout_s=min(check.timeout_s, check.interval_s),
            )
            watches.append(
                _Watch(
                    exposure.exposure_id,
                    nic.nic_id,
                    question,
                    check.interval_s,
                    check.rise,
                    check.fall,
                )
            )
        return watches

    async def _run(self, task: _Task, scope: anyio.CancelScope) -> None:
        with scope:
            if isinstance(task, _Watch):
                await self._watch(task)
            else:
                await self._drain(task)

    # --- checks
    async def _watch(self, watch: _Watch) -> None:
        judgement = Judgement(watch.rise, watch.fall, self._known(watch))
        due_s = self._clock.monotonic()
        while True:
            try:
                await self._check(watch, judgement)
            except Exception as error:  # noqa: BLE001  the firewall of one target
                log.warning(
                    "target_not_checked",
                    exposure_id=watch.exposure_id,
                    nic_id=watch.nic_id,
                    error=error,
                )
            due_s = max(due_s + watch.interval_s, self._clock.monotonic())
            await self._clock.sleep(max(0.0, due_s - self._clock.monotonic()))

    def _known(self, watch: _Watch) -> bool | None:
        row = self._parts.records.exposures.get(watch.exposure_id)
        health = row.health.get(watch.nic_id) if row is not None else None
        return health.healthy if health is not None else None

    async def _check(self, watch: _Watch, judgement: Judgement) -> None:
        """Ask once; what that changes is recorded and acted on, or else told at the next check."""
        wrong = await self.ask(watch.question)
        verdict = judgement.note(is_well=not wrong)
        if verdict is None:
            return
        health = Health(healthy=verdict, since=timestamp(self._clock.now()), message=wrong)
        await self._changed(watch.exposure_id, watch.nic_id, health)
        judgement.healthy = verdict
        log.info(
            "target_changed",
            exposure_id=watch.exposure_id,
            nic_id=watch.nic_id,
            healthy=verdict,
            message=wrong,
        )

    # --- drains
    async def _drain(self, drain: _Drain) -> None:
        await self._clock.sleep(max(0.0, drain.end_s - self._clock.monotonic()))
        while True:
            try:
                await self._drained(drain.network_id)  # its refresh ends this task
            except Exception as error:  # noqa: BLE001  the firewall of one network's drains
                log.warning("not_drained", network_id=drain.network_id, error=error)
            await self._clock.sleep(DRAIN_RETRY_S)


def _gateway(network: Network, address: str) -> str:
    if ":" not in address:
        return network.topology.gateway
    return str(gateway6(IPv6Network(network.topology.subnet6)))


def without_health(row: ExposureRow, nic_id: str) -> ExposureRow:
    """Return an exposure that knows nothing of a target: it is new once more."""
    health = {uid: each for uid, each in row.health.items() if uid != nic_id}
    return msgspec.structs.replace(row, health=health)
