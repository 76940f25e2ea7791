"""One pass over a VM: look, plan, act, look again; and what accompanies the VM meanwhile.

Knows the order of things, the start queue and the node's gate; the rules are in `plan`, the
effects in `apply`. Errors go to the worker (`chv.agent.actors`).
"""

from __future__ import annotations

from dataclasses import replace

from anyio.abc import TaskGroup

from chv.agent.actors import Again, Done, Gone, Outcome, Waiting
from chv.agent.context import Context
from chv.agent.records import StoredObject
from chv.agent.vm.apply import Applier
from chv.agent.vm.cloning import unmade
from chv.agent.vm.desired import desired_vm, facts_of, same_wish, vm_of
from chv.agent.vm.model import (
    DesiredVm,
    Life,
    RebuildStage,
)
from chv.agent.vm.observe import Memory, Sight, look_at_monitor, observe
from chv.agent.vm.pending import pending_changes
from chv.agent.vm.plan import (
    plan,
)
from chv.agent.vm.probe import Prober
from chv.agent.vm.reboots import Reboots
from chv.agent.vm.rebuild_rules import former_disk, progress
from chv.agent.vm.status import Picture, vm_status
from chv.agent.vm.steps import (
    FinishDeleteStep,
    ResetStep,
    SpawnStep,
    Step,
    StopStep,
    WaitStep,
)
from chv.common import logs
from chv.common.errors import ChvError, DeadlineExceeded, OutcomeUnknown, ResourceExhausted
from chv.common.process.records import WorkerRecord
from chv.common.wire.agent import Operation, OperationState
from chv.common.wire.agent_operations import QueuePlace
from chv.vmm.driver import VmmState

log = logs.get(__name__)

QUEUED = Waiting(30.0)  # keeps its place in the start queue
MEMORY_RETRY_S = 5.0  # a VM that ends wakes nobody for its memory
QUEUES = ("Queued", "DrainQueued")
ASKED_VERBS = ("start", "restart", "restore")
UNSEEN = Waiting(5.0)  # a daemon did not answer: what it knows of the VM is shown soon after
OPERATION_S = 900.0  # after so long without success an operation fails; the node goes on trying


class VmReconciler:
    """The reconciler of one VM."""

    def __init__(self, context: Context, uid: str) -> None:
        self._context = context
        self._uid = uid
        self._memory = Memory()
        self._prober = Prober(context, uid, lambda: self._boot, lambda: self._reboots.reset_at_s)
        self._boot = ""  # names the boot that runs now
        self._resets = 0
        self._reboots = Reboots()
        self._group: TaskGroup | None = None
        self._watched = ""
        self._state: VmmState | None = None
        self._started_at = ""
        self._serving = ""  # the operation that the pass works for; a newer one is not its to end
        self._since: tuple[str, float] = ("", 0.0)
        self._problem = ""

    def serve(self, group: TaskGroup) -> None:
        """Listen to the guest for as long as the worker runs."""
        self._group = group
        group.start_soon(self._prober.run)

    async def reconcile(self, stored: StoredObject) -> Outcome:
        """Make one pass."""
        self._problem = ""
        self._serving = self._context.operations.current_id(self._uid)
        outcome: Outcome | None = None
        try:
            outcome = await self._look_and_act(stored)
        finally:
            if outcome != QUEUED:
                self._context.starts.leave(self._uid)
                self._context.drains.leave(self._uid)
        return outcome

    async def _look_and_act(self, stored: StoredObject) -> Outcome:
        desired = desired_vm(self._context.ledger.tables, stored)
        sight = await observe(self._context, stored, desired, self._memory)
        self._context.looked_at(self._uid)
        self._report(desired, sight)
        steps = self._admitted(plan(desired, sight.vm))
        if desired.held and any(isinstance(step, StopStep) for step in steps):
            steps = self._drained(steps, desired, sight)
        self._note_place(steps)
        self._accompany(sight)
        await self._show(desired, sight, steps)
        return await self._carry_out(desired, sight, steps)

    def _report(self, desired: DesiredVm, sight: Sight) -> None:
        """Let those go who wait for this one, in either order."""
        worker = sight.vm.worker
        if worker is None:
            self._context.stop_order.drop(self._uid)
        elif worker.life is Life.ALIVE and worker.booted:
            now_s = self._context.world.clock.monotonic()
            self._context.start_order.arrived(self._uid, now_s)
        if not desired.running:
            self._context.start_order.drop(self._uid)

    async def _carry_out(self, desired: DesiredVm, sight: Sight, steps: list[Step]) -> Outcome:
        applier = Applier(self._context, desired, sight, self._memory)
        for step in steps:
            if isinstance(step, WaitStep):
                await self._wait(step)
                return QUEUED if step.reason in QUEUES else Waiting(step.retry_s)
            if not self._still(desired):
                return Again()
            await self._apply(applier, step)
            if isinstance(step, FinishDeleteStep):
                self._context.start_order.drop(self._uid)
                self._context.stop_order.drop(self._uid)
                return Gone()
        if steps:
            return Again()
        await self._settle(desired)
        return Done() if sight.vm.storage_known and sight.vm.network_known else UNSEEN

    async def _apply(self, applier: Applier, step: Step) -> None:
        failure: ChvError | None = None
        try:
            await applier.apply(step)
        except ChvError as error:
            failure = error
        except TimeoutError:
            failure = OutcomeUnknown("a step took too long")
        if failure is not None:
            operation = self._context.operations.current(self._uid)
            if operation is not None:
                await self._context.operations.fail_step(operation.id, failure)
            raise failure
        if isinstance(step, ResetStep):
            self._boots_anew()

    def _boots_anew(self) -> None:
        """What was heard is of an earlier boot."""
        self._resets += 1
        self._boot = f"{self._boot.partition('+')[0]}+{self._resets}" if self._boot else ""
        self._prober.stir()

    def _still(self, desired: DesiredVm) -> bool:
        """Tell whether what is wanted is what was planned for, as far as it concerns the plan."""
        stored = self._context.stored(self._uid)
        if stored is None:
            return False
        now = desired_vm(self._context.ledger.tables, stored)
        return same_wish(now, desired)

    def _admitted(self, steps: list[Step]) -> list[Step]:
        """Hold back a start until the node may start VMs and the queue has come to this one."""
        if not any(isinstance(step, SpawnStep) for step in steps):
            return steps
        if not self._context.world.gate.starts_allowed():
            return [WaitStep("VMMRunning", "NodeNotReady", "the node may not start VMs now", 5.0)]
        asked = self._is_asked_for()
        if asked:
            self._context.start_order.exempt(self._uid)
        turn = self._context.start_order.turn(self._uid, self._context.world.clock.monotonic())
        if turn is not None:
            what = "the startDelay of " if turn.delayed else ""
            message = f"waits for {what}{turn.whom}, position {turn.position}"
            return [WaitStep("VMMRunning", "StartOrder", message, turn.retry_s, turn.position)]
        lacking = self._lacking()
        if lacking:
            self._context.start_order.drop(self._uid)  # others are not held up by it
            return [WaitStep("VMMRunning", "ResourcesCommitted", lacking, MEMORY_RETRY_S)]
        position = self._context.starts.enter(self._uid, first=asked)
        if position > 0:
            message = f"waits for a start slot, position {position}"
            return [WaitStep("VMMRunning", "Queued", message, position=position)]
        return steps

    def _is_asked_for(self) -> bool:
        """Tell whether somebody waits for this very start: it is not held up by others."""
        operation = self._context.operations.current(self._uid)
        return operation is not None and operation.verb in ASKED_VERBS

    def _lacking(self) -> str:
        """Say what of the machine is lacking for a VMM, all of them counted that may live."""
        stored = self._context.stored(self._uid)
        assert stored is not None
        try:
            self._context.budget.refuse_start(self._context.ledger.tables, stored)
        except ResourceExhausted as error:
            return error.message
        return ""

    def _drained(self, steps: list[Step], desired: DesiredVm, sight: Sight) -> list[Step]:
        """Hold back a stop of the node's drain until its turn; till then the VM is served."""
        turn = self._context.stop_order.turn(self._uid, self._context.world.clock.monotonic())
        position = self._context.drains.enter(self._uid) if turn is None else turn.position
        if position == 0:
            return steps
        served = plan(replace(desired, running=True, held=""), sight.vm)
        if served and isinstance(served[-1], WaitStep):
            return served
        if turn is not None:
            message = f"waits until {turn.whom} has stopped, position {position}"
            wait = WaitStep("VMMRunning", "StopOrder", message, turn.retry_s, turn.position)
            return [*served, wait]
        message = f"waits for its turn to be stopped, position {position}"
        return [*served, WaitStep("VMMRunning", "DrainQueued", message, position=position)]

    def _note_place(self, steps: list[Step]) -> None:
        """Let readers of its operation see where in a queue it waits."""
        last = steps[-1] if steps else None
        if isinstance(last, WaitStep) and last.position:
            what = last.message.removeprefix("waits for ").partition(", position")[0]
            place = QueuePlace(position=last.position, waits_for=what)
            self._context.places[self._uid] = place
        else:
            self._context.places.pop(self._uid, None)

    async def _wait(self, step: WaitStep) -> None:
        await self._context.operations.note(self._uid, step.message)
        await self._expire()

    async def _settle(self, desired: DesiredVm) -> None:
        """Everything is as wanted: say so on the operation."""
        operation = self._context.ledger.tables.operations.get(self._serving)
        stored = self._context.stored(self._uid)
        if operation is None or stored is None:
            return
        facts = facts_of(stored)
        if desired.rebuild is RebuildStage.MAKING:
            words = progress(self._context.ledger.tables, stored)
            await self._context.operations.note(self._uid, words)
            return
        if operation.verb == "clone" and (name := unmade(self._context.ledger.tables, stored)):
            await self._context.operations.note(self._uid, f"waits for volume {name}")
            await self._expire()
            return
        if desired.held:
            await self._settle_held(operation, desired)
            return
        if facts.given_up or (operation.verb in ("start", "restart") and not desired.running):
            message = facts.given_up or facts.last_stop
            await self._context.operations.end(operation.id, OperationState.FAILED, message)
            return
        row = self._context.ledger.tables.workers.get(self._uid)
        pending = pending_changes(row, vm_of(stored).spec) if desired.running else {}
        runs = "paused" if desired.paused else "running"
        message = runs if desired.running else (operation.message or "stopped")
        if pending and operation.verb == "update":
            message = f"stored; takes effect at the next start: {', '.join(pending)}"
        if operation.verb == "rebuild":
            former = former_disk(self._context.ledger.tables, stored)
            message = f"{runs if desired.running else 'stopped'}; {former}"
        await self._context.operations.end(operation.id, OperationState.SUCCEEDED, message)

    async def _settle_held(self, operation: Operation, desired: DesiredVm) -> None:
        """It is down because the node lets no VM run: what wanted it up has not worked."""
        if operation.verb == "restore":  # goes on when the node serves again
            await self._context.operations.note(self._uid, desired.held)
            await self._expire()
            return
        message, state = desired.held, OperationState.SUCCEEDED
        if operation.verb in ("start", "restart"):
            state = OperationState.FAILED
        elif operation.verb in ("create", "clone", "update", "rebuild"):
            done = "rebuilt" if operation.verb == "rebuild" else "stored"
            message = f"{done}; not started: {desired.held}"
        await self._context.operations.end(operation.id, state, message)

    async def failed(self, stored: StoredObject, error: ChvError, *, permanent: bool) -> None:
        """Show the error; a final one ends the operation."""
        if not permanent:
            await self._context.operations.note(self._uid, f"tries again: {error}")
            await self._expire()
            return
        self._problem = str(error)
        self._context.start_order.drop(self._uid)
        desired = desired_vm(self._context.ledger.tables, stored)
        sight = await observe(self._context, stored, desired, self._memory)
        await self._show(desired, sight, [])
        await self._context.operations.end(
            self._serving, OperationState.FAILED, str(error), error.data()
        )

    async def _expire(self) -> None:
        """Let the operation fail that has been going on for too long."""
        operation = self._context.operations.current(self._uid)
        now = self._context.world.clock.monotonic()
        if operation is None:
            return
        if operation.id != self._since[0]:
            self._since = (operation.id, now)
        elif now - self._since[1] > OPERATION_S:
            error = DeadlineExceeded(f"no success within {OPERATION_S:.0f} s: {operation.message}")
            await self._context.operations.end(
                operation.id, OperationState.FAILED, error.message, error.data()
            )

    # --- what accompanies the VM

    def _accompany(self, sight: Sight) -> None:
        """Watch the live process, listen to the guest, remember for the next glance."""
        worker = sight.vm.worker
        self._state = worker.state if worker is not None else None
        if worker is None or worker.life is not Life.ALIVE or sight.record is None:
            self._boot = ""
            return
        if self._boot.partition("+")[0] != worker.worker_id:
            self._boot = worker.worker_id
            self._started_at = self._context.now()
            self._prober.stir()
        self._count_reboots(worker.worker_id, sight)
        if self._watched != worker.worker_id and self._group is not None:
            self._watched = worker.worker_id
            self._group.start_soon(self._watch, worker.worker_id, sight.record)

    def _count_reboots(self, worker_id: str, sight: Sight) -> None:
        stored, record = self._context.stored(self._uid), sight.record
        if sight.monitor is None or sight.monitor.state is VmmState.UNKNOWN or record is None:
            return
        status = vm_of(stored).status if stored is not None else None
        same = status is not None and status.vmm.pid == record.pid
        shown = status.vmm if status is not None and same else None
        if self._reboots.see(worker_id, sight.monitor, shown, self._context.now()):
            self._boots_anew()

    async def _watch(self, worker_id: str, record: WorkerRecord) -> None:
        """Wake the worker when the process ends; a hint, the pass looks for itself."""
        try:
            await self._context.world.vmm.wait_gone(record)
        except (ChvError, OSError) as error:
            log.warning("agent.vm.watch_failed", vm_id=self._uid, error=str(error))
        if self._watched == worker_id:
            self._watched = ""
        self._context.wake(self._uid)

    @property
    def monitored(self) -> bool:
        """Tell whether there is a monitor to ask."""
        return bool(self._boot)

    async def glance(self) -> bool:
        """Ask the monitor alone; True where its answer differs from the last."""
        stored = self._context.stored(self._uid)
        if stored is None:
            return True
        seen = await look_at_monitor(self._context, stored)
        return seen.state is not self._state or self._reboots.is_news(seen)

    async def _show(self, desired: DesiredVm, sight: Sight, steps: list[Step]) -> None:
        stored = self._context.stored(self._uid)
        if stored is None:
            return
        picture = Picture(
            stored=stored,
            desired=desired,
            sight=sight,
            steps=tuple(steps),
            row=self._context.ledger.tables.workers.get(self._uid),
            evidence=self._prober.evidence(),
            started_at=self._started_at,
            now=self._context.world.moment(),
            window_s=self._context.world.limits.restart_window_s,
            problem=self._problem,
            same_boot="+" not in self._boot,
            reboots=self._reboots,
        )
        await self._context.publish(stored, vm_status(picture, self._context.now()))
