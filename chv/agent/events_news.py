"""What is seen and not desired (the node's state, daemons, storage daemons, leaks) on its way into
the log of events.

Whoever sees something tells `News` and goes on; what differs from what was last stored is stored
soon after, in order, so that it is told once, also over an end of the agent. Bounded: beyond
NEWS_MAX the oldest goes, which is logged; the newest state of everything is told in any case.
"""

from __future__ import annotations

from collections import deque

import anyio
import msgspec

from chv.agent.events_record import PutSighting, Sighting
from chv.agent.leaks import LeakBook
from chv.agent.ledger import Ledger
from chv.agent.node import NodeState
from chv.agent.node_record import NODE_UID
from chv.agent.records import StoredObject
from chv.agent.tables import Tables
from chv.common import logs
from chv.common.errors import ChvError
from chv.common.wire.agent import DaemonStatus
from chv.common.wire.agent_events import EventType
from chv.common.wire.stord import StorageEvent

log = logs.get(__name__)

NEWS_MAX = 1000
RETRY_S = 1.0
BAD_STATES = (NodeState.DEGRADED, NodeState.FAILED)
WARNING, NORMAL = EventType.WARNING, EventType.NORMAL


class News:
    """See the module. One per engine."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waiting: deque[Sighting] = deque()
        self._come = anyio.Event()

    def tell(self, *sightings: Sighting) -> None:
        """Say how something is; returns at once."""
        for sighting in sightings:
            if len(self._waiting) >= NEWS_MAX:
                lost = self._waiting.popleft()
                log.warning("events.news_dropped", kind=lost.kind, name=lost.name, state=lost.state)
            self._waiting.append(msgspec.structs.replace(sighting, at=self._ledger.now()))
        self._come.set()

    async def run(self) -> None:
        """Store what is told until cancelled; what the store refuses now is tried again."""
        while True:
            await self._come.wait()
            self._come = anyio.Event()
            while True:
                if await self._stored():
                    break
                await anyio.sleep(RETRY_S)

    async def _stored(self) -> bool:
        """Store all that waits in one transaction."""
        batch = tuple(self._waiting)
        try:
            async with self._ledger.writing() as tables:
                changes = [PutSighting(sighting=each) for each in news(tables, batch)]
                if changes:
                    await self._ledger.commit_held(*changes)
        except ChvError as error:
            log.warning("events.news_delayed", error=str(error), waiting=len(batch))
            return False
        done = set(map(id, batch))
        self._waiting = deque(each for each in self._waiting if id(each) not in done)
        return True


def news(tables: Tables, sightings: tuple[Sighting, ...]) -> list[Sighting]:
    """Return those that differ from what was seen before."""
    states = {key: each.state for key, each in tables.sightings.items()}
    found = []
    for each in sightings:
        if states.get(each.key, "") != each.state:
            states[each.key] = each.state
            found.append(each)
    return found


def node_news(state: NodeState, transition: str) -> Sighting:
    """The node's state machine has moved. `transition`: its time and words."""
    return Sighting(
        kind="Node",
        name=NODE_UID,
        uid=NODE_UID,
        topic="state",
        state=str(state),
        reason="NodeState",
        message=transition.partition(" ")[2],
        type=WARNING if state in BAD_STATES else NORMAL,
    )


def host_news(failures: list[str]) -> Sighting:
    """The host was looked at: what it lacks, space among it."""
    return Sighting(
        kind="Node",
        name=NODE_UID,
        uid=NODE_UID,
        topic="host",
        state="short" if failures else "",
        reason="HostChecksFailed" if failures else "HostChecksPassed",
        message="; ".join(failures),
        type=WARNING if failures else NORMAL,
    )


def daemon_up(status: DaemonStatus) -> Sighting:
    """A daemon answers; with another pid it is another one."""
    words = f"pid {status.pid}, version {status.version}, {status.restarts} restarts"
    return Sighting(
        kind="Daemon",
        name=status.name,
        state=f"ready {status.pid}",
        reason="DaemonUp",
        message=words,
    )


def daemon_down(name: str, state: str, why: str) -> Sighting:
    """A daemon does not answer, has ended or was given up on."""
    reasons = {"hung": "DaemonHung", "failed": "DaemonGivenUp"}
    return Sighting(
        kind="Daemon",
        name=name,
        state=state,
        reason=reasons.get(state, "DaemonDown"),
        message=why,
        type=WARNING,
    )


def storage_news(vm: StoredObject, event: StorageEvent) -> Sighting | None:
    """A VM has lost its storage daemon, or has it back."""
    told = {
        "backend_lost": ("lost", "StorageDaemonLost", WARNING),
        "backend_ready": ("", "StorageDaemonBack", NORMAL),
        "backend_restarted": (f"restarted {event.at}", "StorageDaemonRestarted", WARNING),
    }
    if event.kind not in told:
        return None
    state, reason, kind = told[event.kind]
    return Sighting(
        kind="VirtualMachine",
        namespace=vm.key[1],
        name=vm.key[2],
        uid=vm.uid,
        topic="storage",
        state=state,
        reason=reason,
        message=event.message or event.crash_class.value,
        type=kind,
    )


def leak_news(tables: Tables, book: LeakBook) -> list[Sighting]:
    """What the last look found that no record explains, and what of it is gone."""
    found = [
        Sighting(
            kind="Leak",
            name=leak.id,
            state="there",
            reason="LeakFound",
            message=f"{leak.item.kind} {leak.item.name}, since {leak.since}",
            type=WARNING,
        )
        for leak in book.leaks()
    ]
    if book.unread:
        return found
    gone = [
        Sighting(kind="Leak", name=each.name, state="", reason="LeakGone", message=each.message)
        for each in tables.sightings.values()
        if each.kind == "Leak" and not book.sees(each.name)
    ]
    return [*found, *gone]
