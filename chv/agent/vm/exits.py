"""What follows from the end of a VMM: pure rules on run strategy, kind of end, and crash count."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import msgspec

from chv.agent.moments import Moment
from chv.agent.records import Ending, EndKind, RestoreRequest, VmFacts
from chv.agent.vm.crashes import ASKED_FOR
from chv.common.wire.resources import RunStrategy

BACKOFF_S_MAX = 60.0


class Follow(Enum):
    """What the node does next."""

    AS_WANTED = "as wanted"  # the spec alone decides
    HALT = "halt"  # record runStrategy Halted
    RESTART = "restart"  # after the back-off
    GIVE_UP = "give up"
    REST = "rest"  # Manual: stays down until `start`


@dataclass(frozen=True, slots=True)
class Consequence:
    """What follows, and how long to wait before it."""

    follow: Follow
    delay_s: float = 0.0


def consequence(
    kind: EndKind, strategy: RunStrategy, crashes: int, restarts_max: int
) -> Consequence:
    """Return what follows. `crashes` counts this end too, within the restart window."""
    if kind in ASKED_FOR or strategy is RunStrategy.HALTED:
        return Consequence(Follow.AS_WANTED)
    if kind is EndKind.RESTORE_FAILED:
        return Consequence(Follow.GIVE_UP)
    if kind is EndKind.GUEST_SHUTDOWN:
        if strategy is RunStrategy.ALWAYS:
            return Consequence(Follow.RESTART, _delay_s(crashes))
        return Consequence(Follow.HALT)
    if strategy is RunStrategy.MANUAL:
        return Consequence(Follow.REST)
    if kind is EndKind.HOST_REBOOT:
        return Consequence(Follow.RESTART)
    if crashes > restarts_max:
        return Consequence(Follow.GIVE_UP)
    return Consequence(Follow.RESTART, _delay_s(crashes))


def _delay_s(crashes: int) -> float:
    """The first restart comes at once, later ones ever slower."""
    return 0.0 if crashes <= 1 else float(min(BACKOFF_S_MAX, 2 ** (crashes - 2)))


def facts_after(
    facts: VmFacts, ending: Ending, follows: Consequence, crashes: tuple[Moment, ...], moment: str
) -> VmFacts:
    """Return the facts after the end of the VMM; `crashes` with this one, where it is one."""
    follow = follows.follow
    by_itself = follow is Follow.RESTART and ending.kind is not EndKind.RESTART
    given_up = facts.given_up
    if ending.kind is EndKind.RESTORE_FAILED:
        given_up = f"it was not restored: {ending.reason}; its disks are those of the snapshot"
    elif follow is Follow.GIVE_UP:
        given_up = f"ended too often, last by {ending.kind.value}"
    return msgspec.structs.replace(
        facts,
        replace_worker="",
        reset_request="",
        storage_request="",
        paused=False,
        force_stop=False,
        restore=_restore_after(facts, ending.kind, follow),
        saving="",
        started=facts.started and follow not in (Follow.HALT, Follow.REST),
        given_up=given_up,
        restarts=facts.restarts + (1 if by_itself else 0),
        last_stop=describe(ending, moment),
        crashes=crashes,
        backoff_s=follows.delay_s,
    )


def _restore_after(facts: VmFacts, kind: EndKind, follow: Follow) -> RestoreRequest | None:
    """A restore goes on over the end of the VMM before it, not of the one that has the memory."""
    request = facts.restore
    over = kind in (EndKind.STOP, EndKind.DELETE, EndKind.RESTORE_FAILED)
    if request is None or request.resuming or over or follow is Follow.GIVE_UP:
        return None
    return request


def describe(ending: Ending, moment: str) -> str:
    """Return one line on how and why a VM stopped."""
    words = {
        EndKind.STOP: "stopped",
        EndKind.DRAIN: "stopped with all VMs of the node",
        EndKind.RESTART: "stopped for a restart",
        EndKind.RESTORE: "stopped to be restored",
        EndKind.REBUILD: "stopped for a new root disk",
        EndKind.DELETE: "stopped for deletion",
        EndKind.GUEST_SHUTDOWN: "GuestShutdown: the guest powered off",
        EndKind.CRASH: "Crash: the VMM ended by itself",
        EndKind.PANIC: "GuestPanicked: the guest's kernel panicked",
        EndKind.START_TIMEOUT: "StartTimeout: the VMM did not come up in time",
        EndKind.SPAWN_FAILED: "SpawnFailed: the VMM could not be started",
        EndKind.RESTORE_FAILED: "RestoreFailed: its VMM did not take the snapshot",
        EndKind.STORAGE_LOST: "StorageLost: its disks could not be brought back",
        EndKind.HOST_REBOOT: "HostReboot: the host booted while it ran",
    }
    reason = f" ({ending.reason})" if ending.reason else ""
    return f"{moment} {words[ending.kind]}{_how(ending)}{reason}"


def _how(ending: Ending) -> str:
    """Return the rung in words: a VMM that quits after its guest is off is nothing to tell."""
    rung = ending.rung or ending.tried  # an agent that was killed did not see it work
    if not rung or (ending.kind is EndKind.GUEST_SHUTDOWN and rung == "quit"):
        return ""
    if ending.kind in ASKED_FOR:
        return f" by {rung}"
    return f"; its VMM was ended by {rung}"
