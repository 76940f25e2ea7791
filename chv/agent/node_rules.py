"""Who may do what in which state of the node: one table. Pure.

`refusal` is the only reader of `RULES`. A verb that is not listed raises KeyError: a bug of ours.
`connected` is whether the node sees its control plane; the embedded store is always seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from chv.agent.node import NodeState
from chv.agent.node_record import Hold
from chv.common.errors import FailedPrecondition

_SERVING = frozenset({NodeState.TENANT_READY})
_ALIVE = frozenset(NodeState) - {NodeState.FAILED}


class CutOff(Enum):
    """What a node does of a verb while it does not see its control plane."""

    REFUSED = "no"
    DESIRED = "only what the last desired state already allows"
    FORCED = "only what is already desired, or what a named operator forces"
    ALLOWED = "yes"


@dataclass(frozen=True, slots=True)
class Rule:
    """In which states a verb is admitted; whether it brings a VM to the node."""

    states: frozenset[NodeState]
    cut_off: CutOff
    brings_vm: bool = False


_BRING = Rule(_SERVING, CutOff.REFUSED, brings_vm=True)
_MAKE = Rule(_SERVING, CutOff.REFUSED)
_RUN = Rule(_SERVING, CutOff.DESIRED)
_HANDLE = Rule(_ALIVE, CutOff.ALLOWED)
_REMOVE = Rule(_ALIVE, CutOff.FORCED)

RULES: dict[str, Rule] = {
    "create": _BRING,  # of a VM
    "clone": _BRING,
    "migrate_in": _BRING,
    "restore": _MAKE,
    "rebuild": _MAKE,
    "define": _MAKE,  # of what is no VM: volumes, networks, images
    "update": _MAKE,
    "start": _RUN,
    "restart": _RUN,
    "attach": _RUN,
    "resize": _RUN,
    "grow_now": _RUN,
    "stop": _HANDLE,
    "reset": _HANDLE,
    "pause": _HANDLE,
    "resume": _HANDLE,
    "snapshot": _HANDLE,
    "detach": _HANDLE,
    "restart_storage": _HANDLE,
    "check": _HANDLE,
    "repair": _HANDLE,
    "backup": _HANDLE,
    "cancel": _HANDLE,
    "delete": _REMOVE,
}
_HINTS = {
    NodeState.DRAINING: "chv node drain --cancel",
    NodeState.MAINTENANCE: "chv node resume",
    NodeState.FAILED: "see `chv node status`, then `chv node reset`",
}


@dataclass(frozen=True, slots=True)
class Standing:
    """How the node is. `why`: who brought it there and why, or what is missing."""

    state: NodeState
    why: str = ""
    paused: Hold | None = None
    connected: bool = True


@dataclass(frozen=True, slots=True)
class Asked:
    """A verb. `desired`: the last desired state has it already. `forced_by`: a named operator."""

    verb: str
    desired: bool = False
    forced_by: str = ""


def refusal(asked: Asked, node: Standing) -> FailedPrecondition | None:
    """Return why the node refuses the verb in this state, None where it is admitted."""
    rule = RULES[asked.verb]
    if node.state not in rule.states:
        why = f" ({node.why})" if node.why else ""
        return FailedPrecondition(
            f"{asked.verb} refused: the node is {shown(node.state)}{why}",
            hint=_HINTS.get(node.state, "see `chv node status`"),
        )
    if rule.brings_vm and node.paused is not None:
        return FailedPrecondition(
            f"{asked.verb} refused: scheduling is paused ({node.paused.words})",
            hint="chv node resume-scheduling",
        )
    if not node.connected and not _admitted_cut_off(rule.cut_off, asked):
        return FailedPrecondition(
            f"{asked.verb} refused: the node does not see its control plane, "
            f"admitted is {rule.cut_off.value}",
            hint="ask the control plane, or wait until it is seen again",
        )
    return None


def shown(state: NodeState) -> str:
    """Return the state in a sentence."""
    return f"in {state}" if state is NodeState.MAINTENANCE else str(state)


def _admitted_cut_off(cut_off: CutOff, asked: Asked) -> bool:
    match cut_off:
        case CutOff.ALLOWED:
            return True
        case CutOff.DESIRED:
            return asked.desired
        case CutOff.FORCED:
            return asked.desired or bool(asked.forced_by)
        case CutOff.REFUSED:
            return False
