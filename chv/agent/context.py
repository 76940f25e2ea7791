"""What all reconcilers share: the world, the ledger, the journal, lists of the daemons, wake-ups.

A plain bundle with the few helpers that every kind of object needs. No state of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

import anyio
import msgspec

from chv.agent.deadlines import Deadlines, passes
from chv.agent.ledger import Ledger
from chv.agent.listing import Listing
from chv.agent.naming import named_error
from chv.agent.operations import Operations
from chv.agent.ports import Caller, P, R, World
from chv.agent.ranks import start_rank, stop_rank, to_start, to_stop
from chv.agent.records import PutStatus, Status, StoredObject
from chv.agent.references import references, referrers
from chv.agent.resources.commitment import Budget
from chv.agent.starts import Order, StartQueue
from chv.common.clock import timestamp
from chv.common.errors import ChvError
from chv.common.pages import Call, whole
from chv.common.rpc import Method
from chv.common.wire import nwd, nwd_policy, stord
from chv.common.wire.agent_operations import QueuePlace
from chv.common.wire.resources import ConditionStatus, Resource
from chv.common.wire.types import CallMeta, ListPage, PageReply

BUGS_MAX = 20
Listed = TypeVar("Listed", bound=PageReply)
CALLS_MAX = 32  # at a time to each daemon; it serves twice as many


def _listing(call: Call, method: Method[ListPage, Listed], field: str) -> Listing[Listed]:
    """Return the list of all that a daemon has of one kind."""
    return Listing(lambda: whole(call, method, ListPage(), field))


class _Limited:
    """A caller with a bound on calls at a time, and with names in what the daemon says."""

    def __init__(self, inner: Caller, ledger: Ledger) -> None:
        self._inner = inner
        self._ledger = ledger
        self._limiter = anyio.Semaphore(CALLS_MAX, fast_acquire=True)

    async def call(self, method: Method[P, R], params: P) -> R:
        async with self._limiter:
            try:
                return await self._inner.call(method, params)
            except ChvError as error:
                told = named_error(self._ledger.tables, error)
                if told is error:
                    raise
                raise told from error


class Context:
    """See the module. `wake` looks at one object now."""

    def __init__(self, world: World, ledger: Ledger, wake: Callable[[str], None]) -> None:
        self.world = world
        self.ledger = ledger
        self.operations = Operations(ledger, world.clock, world.ids)
        self.progress = self.operations.progress
        self.places: dict[str, QueuePlace] = {}  # VMs that wait for their turn, by uid
        self.wake = wake
        self.stord: Caller = _Limited(world.stord, ledger)
        self.nwd: Caller = _Limited(world.nwd, ledger)
        self.budget = Budget(world.limits.capacity, world.expect)
        self.starts = StartQueue(world.limits.parallel_starts, wake)
        self.drains = StartQueue(world.limits.parallel_drains, wake)  # stops of a drained node
        self.start_order = Order(lambda uid: start_rank(ledger.tables, uid), wake)
        self.stop_order = Order(lambda uid: stop_rank(ledger.tables, uid), wake)
        self.strangers: dict[str, str] = {}  # short uid of a VM -> worker id nobody recorded
        self.volumes = Listing(
            lambda: whole(self.stord.call, stord.LIST_VOLUMES, ListPage(), "volumes")
        )
        self.sessions = Listing(
            lambda: whole(self.stord.call, stord.LIST_SESSIONS, ListPage(), "sessions")
        )
        self.networks = Listing(
            lambda: whole(self.nwd.call, nwd.LIST_NETWORKS, ListPage(), "networks")
        )
        self.groups = Listing(
            lambda: whole(self.nwd.call, nwd_policy.LIST_GROUPS, ListPage(), "groups")
        )
        self.exposures = Listing(
            lambda: whole(self.nwd.call, nwd_policy.LIST_EXPOSURES, ListPage(), "exposures")
        )
        self.nics = _listing(self.nwd.call, nwd.LIST_NICS, "nics")
        self.holding: set[str] = set()  # VMs whose vCPUs stand for somebody who needs a moment
        self._vcpus: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        self.freezing: set[str] = set()  # VMs whose guest is frozen by somebody who will thaw it
        self.encoded: dict[str, tuple[Resource, msgspec.Raw]] = {}  # objects as JSON, by uid
        self.bugs: deque[str] = deque(maxlen=BUGS_MAX)  # what the firewall caught
        self.seen_at: dict[str, float] = {}  # monotonic time of the last full look at an object
        self.probed: dict[str, dict[str, str]] = {}  # uid -> condition -> when evidence was seen
        self.deadlines = Deadlines(world.clock)

    def begin_round(self) -> None:
        """Let all VMs that are to start, or to stop for the node, do so in their order."""
        self.start_order.begin(to_start(self.ledger.tables, self.world.boot_id))
        held = self.ledger.tables.node.holds_vms
        self.stop_order.begin(to_stop(self.ledger.tables) if held else ())

    def stored(self, uid: str) -> StoredObject | None:
        """Return an object from memory."""
        return self.ledger.tables.objects.get(uid)

    def vcpus(self, vm_uid: str) -> anyio.Lock:
        """Return the lock of who stops a VM's vCPUs for a moment or lets them run on."""
        return self._vcpus.setdefault(vm_uid, anyio.Lock())

    def now(self) -> str:
        """Return the stamp of this moment."""
        return timestamp(self.world.clock.now())

    def meta(self, operation_id: str, generation: int) -> CallMeta:
        """Return who asks for which generation, for a call to a daemon."""
        return CallMeta(operation_id=operation_id, generation=generation)

    def looked_at(self, uid: str) -> None:
        """Remember that an object was observed just now."""
        self.seen_at[uid] = self.world.clock.monotonic()

    async def publish(self, stored: StoredObject, status: Status) -> None:
        """Store and show a status where it tells more than another moment of looking."""
        current = self.stored(stored.uid)
        if current is None:
            return
        status = self._dated(current, self.deadlines.judged(current, status))
        if same_status(current.resource.status, status):
            return
        before = current.resource.status
        await self.ledger.commit(PutStatus(uid=stored.uid, status=status))
        seen = before.observed_generation if before is not None else 0
        if phase_of(before) != phase_of(status) or seen != status.observed_generation:
            self.wake_referrers(current)
            for owner in current.resource.metadata.owner_references:
                self.wake(owner.uid)

    def _dated(self, stored: StoredObject, status: Status) -> Status:
        """Return the status, where what is Unknown has the moment when it was known last."""
        before = stored.resource.status
        shown = {each.type: each.last_probe_time for each in before.conditions} if before else {}
        shown |= self.probed.get(stored.uid, {})
        conditions = [
            msgspec.structs.replace(each, last_probe_time=shown.get(each.type, ""))
            if each.status is ConditionStatus.UNKNOWN
            else each
            for each in status.conditions
        ]
        self.probed[stored.uid] = {each.type: each.last_probe_time for each in conditions}
        return msgspec.structs.replace(status, conditions=conditions)

    async def tell_overdue(self) -> None:
        """Show what has become overdue while nobody looked: a step may take its time."""
        due = [each.uid for each in self.ledger.tables.objects.values() if passes(each)]
        for uid in due:
            async with self.ledger.writing() as tables:
                stored = tables.objects.get(uid)
                status = stored.resource.status if stored is not None else None
                if stored is None or status is None:
                    continue
                judged = self.deadlines.judged(stored, status)
                if not same_status(status, judged):
                    await self.ledger.commit_held(PutStatus(uid=uid, status=judged))

    def forget(self, uid: str) -> None:
        """The object is gone: nothing is remembered of it."""
        for remembered in (self.seen_at, self.probed, self.encoded, self.places):
            remembered.pop(uid, None)
        self.deadlines.forget(uid)

    def wake_referrers(self, stored: StoredObject) -> None:
        """Look at those who refer to an object: it has changed."""
        for referrer in referrers(self.ledger.tables, stored.key):
            self.wake(referrer.uid)

    def referred(self, stored: StoredObject) -> list[tuple[str, int]]:
        """Return uid and generation of each object that it names: another form may cure it."""
        named = (self.ledger.tables.find(*each.key) for each in references(stored.resource))
        return [(o.uid, o.resource.metadata.generation) for o in named if o is not None]

    def wake_referred(self, stored: StoredObject) -> None:
        """Look at those whom an object refers to: it let go of them."""
        for reference in references(stored.resource):
            found = self.ledger.tables.find(*reference.key)
            if found is not None:
                self.wake(found.uid)


def phase_of(status: Status | None) -> str:
    """Return the phase, Pending where there is no status yet."""
    return str(status.phase) if status is not None else "Pending"


def same_status(before: Status | None, now: Status) -> bool:
    """Compare without the moments of looking."""
    return before is not None and _unprobed(before) == _unprobed(now)


def _unprobed(status: Status) -> Status:
    conditions = [msgspec.structs.replace(each, last_probe_time="") for each in status.conditions]
    return msgspec.structs.replace(status, conditions=conditions)
