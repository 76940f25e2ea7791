"""What keeps an object from being as wanted, and what to type: rules on what is shown. Pure."""

from __future__ import annotations

import re

from chv.agent.condition_table import OVERDUE, base_reason
from chv.agent.context import phase_of
from chv.agent.records import StoredObject
from chv.agent.references import references
from chv.agent.tables import Tables
from chv.agent.vm.desired import facts_of, wants_to_run
from chv.common.wire.agent import Operation
from chv.common.wire.agent_history import Obstacle
from chv.common.wire.resources import KIND_ALIASES, Condition, ConditionStatus, VirtualMachine

# These are well while they are False.
WELL_WHEN_FALSE = frozenset({"Paused", "StorageLost", "RestartRequired"})
# These say only that something else is not there, or was not looked at yet.
CONSEQUENCES = frozenset({"NotRunning", "NotProbedYet", "NoInterface", "PortNotDeclared"})
GOOD_PHASES = frozenset({"Ready", "Attached", "Running"})
FIXES_MAX = 6
WORD_MAX = 8  # a longer kind is typed by its alias
# `chv stop web` in the middle of a message of ours.
_COMMAND = re.compile(r"\bchv [a-z][^;,()`]*?(?= makes|[;,()`]|$)")
_BY_REASON = {
    ("VMMRunning", "GivenUp"): ("chv logs {me}", "chv start {name}"),
    ("VMMRunning", "Failed"): ("chv logs {me}", "chv start {name}"),
    ("VMMRunning", "BackOff"): ("chv logs {me}",),
    ("VMMRunning", "ResourcesCommitted"): ("chv node inventory", "chv get vm -A"),
    ("VMMRunning", "HeldByNode"): ("chv node status", "chv node resume"),
    ("VMMRunning", "MonitorSilent"): ("chv restart {name} --force",),
    ("VMMRunning", "Stopping"): ("chv stop {name} --force", "chv logs {me}"),
    ("VMMRunning", "Starting"): ("chv logs {me}",),
    ("NetworkReady", "TapLost"): ("chv restart {name}",),
    ("NetworkReady", "NetworkUnavailable"): ("chv node status", "chv logs daemon/nwd"),
    ("VolumesReady", "StorageUnavailable"): ("chv node status", "chv logs daemon/stord"),
    ("GuestBooted", "NoSignYet"): ("chv logs {me}",),
    ("SSHReady", "NoBanner"): ("chv logs {me}",),
}
_BY_TYPE = {
    "Paused": ("chv resume {name}",),
    "RestartRequired": ("chv restart {name}",),
    "StorageLost": ("chv storage status", "chv restart {name}"),
}


def short_kind(kind: str) -> str:
    """Return the kind as one types it."""
    short = next(alias for alias, known in KIND_ALIASES.items() if known == kind)
    return kind.lower() if len(kind) <= WORD_MAX else short


def typed(stored: StoredObject) -> str:
    """Return the object as one types it: `vm/web`."""
    return f"{short_kind(stored.key[0])}/{stored.key[2]}"


def is_to_run(stored: StoredObject) -> bool:
    """Tell whether this is a VM that should run."""
    vm = stored.resource
    return isinstance(vm, VirtualMachine) and wants_to_run(vm, facts_of(stored))


def wants(stored: StoredObject) -> str:
    """Say in a word or two what is wanted."""
    vm = stored.resource
    if stored.deleting:
        return "to be deleted"
    if isinstance(vm, VirtualMachine):
        return f"runStrategy {vm.spec.run_strategy.value}"
    return "to be ready"


def is_well(stored: StoredObject) -> bool:
    """Tell whether the phase is the one that is wanted, as seen for this generation."""
    status = stored.resource.status
    if status is None or status.observed_generation < stored.resource.metadata.generation:
        return False
    rests = isinstance(stored.resource, VirtualMachine) and not is_to_run(stored)
    if stored.facts is not None and stored.facts.given_up:
        return False
    phase = phase_of(status)
    return not stored.deleting and (phase == "Stopped" if rests else phase in GOOD_PHASES)


def blocking(stored: StoredObject) -> list[Condition]:
    """Return the conditions that are not as wanted, without what only follows from others."""
    status = stored.resource.status
    if status is None:
        return []
    if phase_of(status) == "Stopped" and is_well(stored):
        return []
    bad = [each for each in status.conditions if _is_bad(each)]
    # What a VM that is held down lacks, it lacks because of that.
    return [each for each in bad if each.reason == "HeldByNode"] or bad


def overdue(stored: StoredObject) -> str:
    """Return what has gone on for longer than it may, in the words of its condition; or nothing."""
    status = stored.resource.status
    conditions = status.conditions if status is not None else []
    late = [each for each in conditions if each.reason.endswith(OVERDUE)]
    return f"{late[0].type} {late[0].reason}: {late[0].message}" if late else ""


def _is_bad(condition: Condition) -> bool:
    well = "False" if condition.type in WELL_WHEN_FALSE else "True"
    return condition.status.value != well and condition.reason not in CONSEQUENCES


def obstacles(tables: Tables, stored: StoredObject) -> list[Obstacle]:
    """Return what it refers to that is not there, or not as wanted itself."""
    found = {}
    for reference in references(stored.resource):
        if not reference.holds:
            continue
        kind, _, name = reference.key
        other = tables.find(*reference.key)
        if other is None:
            found[reference.key] = Obstacle(kind=kind, name=name, problem="it does not exist")
        elif not is_well(other):
            found[reference.key] = Obstacle(kind=kind, name=name, problem=_problem(other))
    return list(found.values())


def _problem(stored: StoredObject) -> str:
    status = stored.resource.status
    bad = [each for each in blocking(stored) if each.message]
    why = f": {bad[0].message}" if bad else ""
    return f"it is {phase_of(status)}{why}"


def fixes(
    stored: StoredObject,
    conditions: list[Condition],
    waits_for: list[Obstacle],
    operation: Operation | None,
) -> list[str]:
    """Return what to type, the likeliest first: hints of errors, then what a condition needs."""
    namespace = stored.key[1]
    where = "" if namespace == "default" else f" -n {namespace}"
    found = []
    if operation is not None and operation.error is not None and operation.error.hint:
        found.append(operation.error.hint)
    for obstacle in waits_for:
        there = obstacle.problem != "it does not exist"
        me = f"{short_kind(obstacle.kind)}/{obstacle.name}"
        found.append(f"chv why {me}{where}" if there else f"apply {me}: chv apply -f FILE")
    for condition in conditions:
        words = {"me": typed(stored), "name": stored.key[2]}
        found += _COMMAND.findall(condition.message)
        known = _BY_REASON.get((condition.type, base_reason(condition.reason)), ())
        bad = condition.status is not ConditionStatus.UNKNOWN
        known = known or (_BY_TYPE.get(condition.type, ()) if bad else ())
        found += [command.format(**words) + where for command in known]
    return list(dict.fromkeys(text.strip() for text in found))[:FIXES_MAX]
