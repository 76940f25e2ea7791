"""What each condition rests on, and how long each state that is to pass may take. Pure.

One table for the code and for people: `docs/conditions.md` is made from it (`condition_page`), the
deadlines are kept by it (`deadlines`), and a condition or reason that is not in it fails a test.
A state whose deadline has passed keeps what it said and is shown with the reason `<state>Overdue`.
"""

from __future__ import annotations

from collections.abc import Mapping

from chv.agent.condition_vm import DAEMON_S, VM_CONDITIONS, VM_PHASES
from chv.agent.condition_words import ConditionRule, KindRule, Passing, Time
from chv.common import errors

OVERDUE = "Overdue"

_RETRIED = "it is tried on, ever slower; its operation fails after 900 s"
_PENDING = Passing(120.0, _RETRIED)
_WAITS = Passing(120.0, "it waits on; `chv why` shows for what")
_HELD = Passing(120.0, "it waits on for who holds it")
_MOVES = Passing(
    900.0, "it goes on; `chv ops` shows the job, which can be cancelled", progress=True
)
_STORAGE_SILENT = {"StorageUnavailable": f"stord does not answer; within {DAEMON_S:.0f} s"}
_NETWORK_SILENT = {"NetworkUnavailable": f"nwd does not answer; within {DAEMON_S:.0f} s"}

# The error of whoever failed, in its own words. What may pass is tried again all the time.
ERRORS = tuple(
    sorted(
        {
            errors.condition_reason(each.code)
            for each in vars(errors).values()
            if isinstance(each, type) and issubclass(each, errors.ChvError)
        }
    )
)


def _ready(
    evidence: str,
    *standing: str,
    unknown: Mapping[str, str],
    passing: Mapping[str, Passing] | None = None,
) -> ConditionRule:
    return ConditionRule(
        type="Ready",
        evidence=evidence,
        standing=(*standing, "Deleting"),
        passing=passing or {},
        unknown=unknown,
    )


def _of_nwd(evidence: str, *standing: str, passing: Mapping[str, Passing]) -> KindRule:
    """Return the rule of a kind that nwd makes: what is Degraded says why, and is repaired on."""
    return KindRule(
        leads="Ready",
        conditions=(
            _ready(
                evidence, "InKernel", "Degraded", *standing,
                passing=passing, unknown=_NETWORK_SILENT,
            ),
        ),
        phases={"Pending": _PENDING, "Deleting": _HELD},
        standing=("Ready", "Degraded", "Failed"),
    )  # fmt: skip


_VOLUME = KindRule(
    leads="Ready",
    conditions=(
        _ready(
            "stord's list of volumes; the path of the image or device",
            "Open",
            "Creating",
            unknown=_STORAGE_SILENT,
            passing={"Busy": _MOVES, "ImageNotReady": _WAITS, "SnapshotNotReady": _WAITS},
        ),
        ConditionRule(
            type="SizeApplied",
            evidence="stord's list of volumes: the size that the guest sees",
            standing=("Online", "Detached", "OnNextStart", "AsCreated", "Refused"),
            unknown=_STORAGE_SILENT,
        ),
        ConditionRule(
            type="SpaceAvailable",
            evidence="stord's last look at the place where the volume is",
            standing=("Enough", "Low", "Critical"),
            unknown={"NotMeasured": "stord has not looked, or cannot", **_STORAGE_SILENT},
        ),
    ),
    phases={"Pending": _PENDING, "Creating": _MOVES, "Deleting": _HELD},
    standing=("Ready", "Attached", "Failed"),
)

_TAKEN = "that it was taken is recorded; stord's list of what each volume holds"

TABLE: Mapping[str, KindRule] = {
    "VirtualMachine": KindRule(
        leads="VMMRunning",
        conditions=VM_CONDITIONS,
        phases=VM_PHASES,
        # Unknown is loud, and lasts as long as the doubt: nothing is started meanwhile.
        standing=("Running", "Paused", "Stopped", "Failed", "Unknown"),
        rest=("Stopped", "Failed"),
    ),
    "Volume": _VOLUME,
    "VolumeSnapshot": KindRule(
        leads="Ready",
        conditions=(
            _ready(_TAKEN, "Taken", "NotTaken", passing={"Waiting": _WAITS},
                   unknown=_STORAGE_SILENT),
        ),
        phases={
            "Pending": Passing(120.0, "it fails for good when its operation does, after 900 s"),
            "Deleting": Passing(300.0, "it waits on for its volumes or who uses it", progress=True),
        },
        standing=("Ready", "Failed"),
    ),
    "VirtualMachineSnapshot": KindRule(
        leads="Ready",
        conditions=(
            _ready(_TAKEN + "; the files of its memory", "Taken", "NotTaken",
                   passing={"Waiting": _WAITS}, unknown=_STORAGE_SILENT),
        ),
        phases={
            "Pending": Passing(120.0, "it fails for good when its operation does, after 900 s"),
            "Saving": Passing(960.0, "the VMM has 900 s for its memory; then it fails for good"),
            "Deleting": Passing(300.0, "it waits on for its volumes or who uses it", progress=True),
        },
        standing=("Ready", "Failed"),
    ),
    "Network": _of_nwd("nwd's list of networks: what it found in the kernel", passing={}),
    "SecurityGroup": _of_nwd(
        "nwd's list of groups: what it found in the kernel",
        passing={"PeersNotReady": _WAITS},
    ),
    "Exposure": _of_nwd(
        "nwd's list of exposures: the kernel's rules and the health of each target",
        "NoHealthyTarget",
        passing={"NoNetwork": _WAITS},
    ),
    "Image": KindRule(
        leads="Ready",
        conditions=(
            _ready("the artifacts in the store of this node, by their sums", "Stored", "Importing",
                   unknown={}),
        ),
        phases={
            "Pending": _PENDING,
            "Importing": Passing(300.0, "the download is tried on, from where it was",
                                 progress=True),
            "Deleting": _HELD,
        },
        standing=("Ready", "Failed"),
    ),
}  # fmt: skip

NODE_CONDITIONS: tuple[ConditionRule, ...] = (
    ConditionRule(
        type="TenantReady",
        evidence="the state of the node, made from all of the following",
        standing=("TenantReady", "Degraded", "Draining", "Maintenance", "Failed"),
    ),
    ConditionRule(
        type="HostReady",
        evidence="the checks of the host, every 30 s",
        standing=("ChecksPassed", "ChecksFailed"),
    ),
    ConditionRule(
        type="StorageReady",
        evidence="stord's answer to GetHealth, every 2 s",
        time=Time.LOOK,
        stale_s=DAEMON_S,
        standing=("Answering", "NotAnswering"),
    ),
    ConditionRule(
        type="NetworkReady",
        evidence="nwd's answer to GetHealth, every 2 s",
        stale_s=DAEMON_S,
        standing=("Answering", "NotAnswering"),
    ),
    ConditionRule(
        type="StoreHealthy",
        evidence="that the agent's store was read",
        time=Time.RECORD,
        stale_s=float("inf"),
        standing=("Read",),
    ),
    ConditionRule(
        type="AdoptionDone",
        evidence="that every worker's record was judged when the agent came",
        time=Time.RECORD,
        stale_s=float("inf"),
        standing=("CensusDone",),
    ),
    ConditionRule(
        type="SchedulingPaused",
        evidence="what an operator has recorded",
        time=Time.RECORD,
        stale_s=float("inf"),
        standing=("AskedFor", "Node"),
    ),
    ConditionRule(
        type="UpstreamConnected",
        evidence="the last word of the control plane, on a clock that does not jump",
        time=Time.HEARD,
        stale_s=40.0,
        standing=("Embedded", "Connected", "Reconnecting", "NotYetSeen", "Silent"),
    ),
    ConditionRule(
        type="ReportsComplete",
        evidence="the count of outcomes that the full outbox has dropped",
        time=Time.RECORD,
        stale_s=float("inf"),
        standing=("NothingAmiss", "OutboxFull"),
    ),
    ConditionRule(
        type="UpstreamAgrees",
        evidence="the last whole list of the control plane",
        time=Time.HEARD,
        stale_s=float("inf"),
        standing=("NothingAmiss", "NotListed"),
    ),
)


# All objects are looked at for deadlines now and then.
_PASSING = {
    (kind, condition.type, reason): rule
    for kind, of_kind in TABLE.items()
    for condition in of_kind.conditions
    for reason, rule in condition.passing.items()
}


def base_reason(reason: str) -> str:
    """Return the reason without what a deadline added."""
    return reason.removesuffix(OVERDUE)


def passing_phase(kind: str, phase: str) -> Passing | None:
    """Return the rule of a phase that is to pass, None of one that may stand."""
    return TABLE[kind].phases.get(phase)


def passing_reason(kind: str, phase: str, type_: str, reason: str) -> Passing | None:
    """Return the rule of a condition's reason that is to pass in this phase."""
    found = _PASSING.get((kind, type_, reason))
    return None if found is None or phase in TABLE[kind].rest else found


def rule_of(kind: str, type_: str) -> ConditionRule | None:
    """Return the rule of a condition; None where there is no such condition."""
    return next((each for each in TABLE[kind].conditions if each.type == type_), None)


def silent_reason(kind: str) -> str:
    """Return the reason of a condition whose daemon does not answer; empty: it rests on none."""
    leading = rule_of(kind, TABLE[kind].leads)
    assert leading is not None
    silent = ("StorageUnavailable", "NetworkUnavailable")
    return next((each for each in silent if each in leading.unknown), "")
