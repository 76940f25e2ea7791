"""A guest and an exposure never share an address: the one that comes later is refused. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from chv.agent.records import StoredObject
from chv.agent.tables import Tables
from chv.common.errors import InUse
from chv.common.wire.resources import Exposure, VirtualMachine

Place = tuple[str, str, str]  # namespace, network, address


def check_apart(tables: Tables, after: dict[str, StoredObject]) -> None:
    """Refuse a guest's address for an exposure, and the other way round."""
    if not any(isinstance(o.resource, Exposure | VirtualMachine) for o in after.values()):
        return
    exposed: dict[Place, tuple[StoredObject, str]] = {}
    for stored in _all(tables, after, "Exposure"):
        for place, field in _exposed(stored):
            exposed.setdefault(place, (stored, field))
    if not exposed:
        return
    for vm in _all(tables, after, "VirtualMachine"):
        for place, field in _of_guest(vm):
            if place in exposed:
                exposure, where = exposed[place]
                if exposure.uid in after:
                    raise _refusal(exposure, where, place[2], vm, "the network, or the node's")
                raise _refusal(vm, field, place[2], exposure, "the network, or leave it empty")


def _refusal(
    stored: StoredObject, field: str, address: str, holder: StoredObject, where: str
) -> InUse:
    return InUse(
        f"{address} is an address of {holder.title}",
        resource=stored.title,
        field=field,
        hint=f"take a free one of {where}",
    )


def _all(tables: Tables, after: dict[str, StoredObject], kind: str) -> Iterator[StoredObject]:
    yield from (o for o in tables.of_kind(kind) if o.uid not in after)
    yield from (o for o in after.values() if o.resource.kind == kind)


def _exposed(stored: StoredObject) -> Iterator[tuple[Place, str]]:
    exposure = stored.resource
    assert isinstance(exposure, Exposure)
    for index, address in enumerate(exposure.spec.addresses):
        place = (exposure.metadata.namespace, exposure.spec.network, address)
        yield place, f"spec.addresses[{index}]"


def _of_guest(stored: StoredObject) -> Iterator[tuple[Place, str]]:
    """What it asks for, and what it has been given."""
    vm = stored.resource
    assert isinstance(vm, VirtualMachine)
    given = {each.name: each for each in vm.status.interfaces} if vm.status is not None else {}
    for index, nic in enumerate(vm.spec.interfaces):
        has = given.get(nic.name)
        if has is not None and has.network != nic.network:
            has = None
        for name in ("address", "address6"):
            texts = {getattr(nic, name), getattr(has, name, "")} - {""}
            for text in sorted(texts):
                place = (vm.metadata.namespace, nic.network, text)
                yield place, f"spec.interfaces[{index}].{name}"
