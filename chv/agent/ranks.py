"""How VMs stand in the order of a start and of a drain, and who takes part in a round.

A round of starts begins when the agent does, which is after each boot of the host, and when an
operator lets the node serve again: VMs that run by then have no part in it, and neither have VMs
that are made or started later. What is said here comes from the store's tables; changes nothing.
"""

from __future__ import annotations

from chv.agent.records import StoredObject, WorkerRow
from chv.agent.starts import Rank
from chv.agent.tables import Tables
from chv.agent.vm.desired import facts_of, vm_of, wants_to_run
from chv.common.quantity import parse_duration_s

START_WAIT_S = 120.0  # a level of starts waits no longer for one that does not come up
STOP_MARGIN_S = 30.0  # beyond the VM's own shutdownTimeout: TERM, KILL, and letting go


def start_rank(tables: Tables, uid: str) -> Rank | None:
    """Return how a VM stands among those that start: the highest priority first."""
    stored = _vm(tables, uid)
    if stored is None:
        return None
    spec = vm_of(stored).spec
    return Rank(
        title=_title(stored),
        priority=spec.start_priority,
        level=spec.start_priority,
        wait_s=START_WAIT_S,
        delay_s=parse_duration_s(spec.start_delay, field="spec.startDelay"),
    )


def stop_rank(tables: Tables, uid: str) -> Rank | None:
    """Return how a VM stands among those that a drain stops: the lowest priority first."""
    stored = _vm(tables, uid)
    if stored is None:
        return None
    spec = vm_of(stored).spec
    timeout_s = parse_duration_s(spec.shutdown_timeout, field="spec.shutdownTimeout")
    return Rank(
        title=_title(stored),
        priority=spec.start_priority,
        level=-spec.start_priority,
        wait_s=timeout_s + STOP_MARGIN_S,
    )


def to_start(tables: Tables, boot_id: str) -> list[str]:
    """Return the VMs that are to run and do not."""
    return [
        stored.uid
        for stored in tables.of_kind("VirtualMachine")
        if wants_to_run(vm_of(stored), facts_of(stored))
        and not _runs(tables.workers.get(stored.uid), boot_id)
    ]


def to_stop(tables: Tables) -> list[str]:
    """Return the VMs that have a VMM, or may have one."""
    return list(tables.workers)


def _runs(row: WorkerRow | None, boot_id: str) -> bool:
    """Tell whether its guest was let run in this boot of the host and nobody ends it."""
    if row is None or row.record is None or not row.booted or row.ending is not None:
        return False
    return row.record.boot_id == boot_id


def _vm(tables: Tables, uid: str) -> StoredObject | None:
    stored = tables.objects.get(uid)
    return stored if stored is not None and stored.facts is not None else None


def _title(stored: StoredObject) -> str:
    _, namespace, name = stored.key
    return name if namespace == "default" else f"{namespace}/{name}"
