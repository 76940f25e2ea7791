"""How far the rebuild of a VM is, and what is in its way. Pure.

The new root disk is made beside the present one, which the VM keeps until the new one is there.
Then the VM ends and the two swap their names. Before the swap everything can be taken back.
"""

from __future__ import annotations

from dataclasses import dataclass

from chv.agent.rebuild_record import Rebuild
from chv.agent.records import FINAL_STATES, StoredObject
from chv.agent.references import holders
from chv.agent.tables import Tables
from chv.agent.vm.model import RebuildStage
from chv.common.wire.resources import ConditionStatus, OwnerReference, VirtualMachine, Volume
from chv.common.wire.types import API_VERSION

NEW, FORMER = "-rebuild", "-before-rebuild"


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a rebuild is; `why` it is off."""

    stage: RebuildStage
    why: str = ""


def standing(tables: Tables, stored: StoredObject) -> Standing | None:
    """Say how far the rebuild of a VM is; None: there is none."""
    facts = stored.facts
    wish = facts.rebuild if facts is not None else None
    if facts is None or wish is None:
        return None
    if wish.swapped:
        return Standing(RebuildStage.SWAPPED)
    why = _obstacle(tables, stored, wish)
    if why:
        return Standing(RebuildStage.OFF, why)
    busy = bool(facts.saving) or facts.restore is not None or is_busy(tables.objects[wish.old_uid])
    ready = _is_ready(tables.objects[wish.new_uid])
    return Standing(RebuildStage.DUE if ready and not busy else RebuildStage.MAKING)


def progress(tables: Tables, stored: StoredObject) -> str:
    """Say what a rebuild waits for while the new disk is being made."""
    wish = stored.facts.rebuild if stored.facts is not None else None
    old = tables.objects.get(wish.old_uid) if wish is not None else None
    if old is not None and is_busy(old):
        return f"{old.title} is busy with another operation"
    operation = tables.active_operation(wish.new_uid) if wish is not None else None
    said = operation.message if operation is not None else ""
    return f"the new root disk {said}" if said else "the new root disk is being made"


def former_disk(tables: Tables, stored: StoredObject) -> str:
    """Say what became of the former root disk after a swap."""
    name = f"{root_of(stored)}{FORMER}"
    former = tables.find("Volume", stored.key[1], name)
    if former is None or former.deleting:
        return "its former root disk is deleted"
    waits = stored.facts is not None and stored.facts.rebuild is not None
    return f"its former root disk is volume {name}" + (" until it has run" if waits else "")


def root_of(stored: StoredObject) -> str:
    """Return the name of a VM's root volume: its first disk; empty: it has no disk."""
    assert isinstance(stored.resource, VirtualMachine)
    disks = stored.resource.spec.disks
    return disks[0].volume if disks else ""


def owned_by(vm: StoredObject) -> OwnerReference:
    """Return what lets an object go with a VM."""
    return OwnerReference(
        api_version=API_VERSION, kind="VirtualMachine", name=vm.key[2], uid=vm.uid
    )


def _obstacle(tables: Tables, stored: StoredObject, wish: Rebuild) -> str:
    """Say why the disks can never be swapped."""
    operation = tables.operations.get(wish.operation_id)
    if operation is None or operation.state in FINAL_STATES:
        return "its operation has ended"
    old, new = tables.objects.get(wish.old_uid), tables.objects.get(wish.new_uid)
    if old is None or old.deleting or root_of(stored) != old.key[2]:
        return "the VM has another root disk by now"
    others = users(tables, old, stored)
    if others:
        return f"its root volume is used by {others}"
    if new is None or new.deleting:
        return "the new root volume was deleted"
    if _has_failed(tables, new):
        return f"the new root volume could not be made: {_said(new)}"
    return ""


def users(tables: Tables, volume: StoredObject, vm: StoredObject) -> str:
    """Name what needs a volume beside its VM, empty: nothing does."""
    found = [each.title for each in holders(tables, volume.key) if each.uid != vm.uid]
    return ", ".join(found[:5])


def _is_ready(stored: StoredObject) -> bool:
    status = volume_of(stored).status
    if status is None or status.phase != "Ready":
        return False
    return any(c.type == "Ready" and c.status is ConditionStatus.TRUE for c in status.conditions)


def _has_failed(tables: Tables, stored: StoredObject) -> bool:
    """Tell whether it was not made. One that was made may be out of sight while stord starts."""
    status = volume_of(stored).status
    phase = status.phase if status is not None else "Pending"
    given_up = phase in ("Pending", "Creating") and tables.active_operation(stored.uid) is None
    return phase == "Failed" or given_up


def is_busy(stored: StoredObject) -> bool:
    """Tell whether a verb or a move is under way on a volume."""
    facts = stored.volume_facts
    if facts is None:
        return False
    moves = facts.move is not None and not facts.move.failed  # that one stays recorded
    return facts.request is not None or moves


def _said(stored: StoredObject) -> str:
    status = volume_of(stored).status
    conditions = status.conditions if status is not None else []
    found = next((each.message for each in conditions if each.type == "Ready"), "")
    return found or "it says nothing"


def volume_of(stored: StoredObject) -> Volume:
    assert isinstance(stored.resource, Volume)
    return stored.resource


def boot_image(vm: VirtualMachine, old: Volume, image: str) -> str:
    """Return what the VM boots: the kernel of its root disk's image, where it had that one's."""
    booted = vm.spec.boot.image
    return image if booted and booted == source_image(old) else booted


def source_image(volume: Volume) -> str:
    return volume.spec.source.image if volume.spec.source is not None else ""
