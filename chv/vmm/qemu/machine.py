"""What a QEMU is and what state its VM is in: asked anew each time, nothing is kept.

A VM that was handed over to another process must not run here again, whatever else is asked for.
QEMU stands alike after a snapshot and after a move, so that a move leaves a mark in QEMU itself
(an object that does nothing) before it begins. Fails as the monitor does, and with
FailedPrecondition or Unsupported saying what the VM is.
"""

from __future__ import annotations

import contextlib
from typing import Any

from chv.common.errors import FailedPrecondition, Unsupported
from chv.vmm.driver import VmmState
from chv.vmm.qemu.qmp import Monitor

SENDING = "chv-sending"
MICROVM_TYPE = "microvm-machine"
SAVED = "postmigrate"  # stands since a snapshot or a move was made of it
_STANDS_AFTER_A_MOVE = (SAVED, "finish-migrate")
_STATES = {
    "inmigrate": VmmState.EMPTY,
    "prelaunch": VmmState.CREATED,
    "running": VmmState.RUNNING,
    "paused": VmmState.PAUSED,
    "io-error": VmmState.PAUSED,
    SAVED: VmmState.PAUSED,
    "finish-migrate": VmmState.PAUSED,
    "save-vm": VmmState.PAUSED,
    "shutdown": VmmState.SHUTDOWN,
    "guest-panicked": VmmState.PANICKED,
}
HANDED_OVER = "handed-over"


async def status(monitor: Monitor) -> str:
    """Return QEMU's own word, or HANDED_OVER."""
    answer = await monitor.ask("query-status")
    word = str(answer["status"])
    if word in _STANDS_AFTER_A_MOVE and await is_sending(monitor):
        return HANDED_OVER
    return word


def state_of(word: str) -> VmmState:
    """Return the state that a word of `status` stands for."""
    return _STATES.get(word, VmmState.UNKNOWN)


async def state(monitor: Monitor) -> VmmState:
    """Ask for the state."""
    return state_of(await status(monitor))


def require(verb: str, present: VmmState, *allowed: VmmState) -> None:
    """Refuse what the state does not allow."""
    if present not in allowed:
        raise FailedPrecondition(f"{verb}: the VM is {present}, not {' or '.join(allowed)}")


async def machine_type(monitor: Monitor) -> str:
    """Return the type of the machine, which names its version where it has one."""
    return str(await monitor.ask("qom-get", {"path": "/machine", "property": "type"}))


async def is_microvm(monitor: Monitor) -> bool:
    """Tell whether the machine has no PCI."""
    return await machine_type(monitor) == MICROVM_TYPE


async def require_ports(monitor: Monitor, verb: str) -> None:
    """Refuse to plug where nothing can be plugged."""
    if await is_microvm(monitor):
        raise Unsupported(
            f"QEMU's microvm cannot {verb} while it runs",
            field="machine",
            hint="q35 can; the machine is chosen when the VM is made",
        )


async def require_button(monitor: Monitor) -> None:
    """Refuse to press a button that is not there."""
    if not await is_microvm(monitor):
        return
    acpi = await monitor.ask("qom-get", {"path": "/machine", "property": "acpi"})
    if acpi == "off":
        raise Unsupported("QEMU's microvm has no power button without KVM", field="machine")


async def is_sending(monitor: Monitor) -> bool:
    """Tell whether a move to another process was begun."""
    answer: list[dict[str, Any]] = await monitor.ask("qom-list", {"path": "/objects"})
    return SENDING in {str(entry["name"]) for entry in answer}


async def mark_sending(monitor: Monitor) -> None:
    """Note in QEMU that a move begins."""
    mark = {"qom-type": "authz-simple", "id": SENDING, "identity": "chv"}
    await monitor.tell("object-add", mark)


async def unmark_sending(monitor: Monitor) -> None:
    """Take the note away: the VM stays."""
    with contextlib.suppress(FailedPrecondition):  # not there
        await monitor.tell("object-del", {"id": SENDING})
