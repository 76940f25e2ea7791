"""A file that says nothing of `runStrategy` does not start a VM that was stopped. Pure.

What `chv stop` or the guest's own power-off made Halted stays so; what a file itself had said is
replaced like every other field.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from chv.agent.records import StoredObject
from chv.agent.tables import Tables
from chv.common.wire.resources import Resource, RunStrategy, VirtualMachine

BY_FILE = "runStrategy is Halted"  # the reason of a stop that a file asked for
Key = tuple[str, str, str]  # kind, namespace, name
_replace = msgspec.structs.replace


class _Spec(msgspec.Struct, rename="camel"):
    run_strategy: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Document(msgspec.Struct):
    spec: _Spec


def silent(resources: Sequence[Resource], raws: Sequence[msgspec.Raw]) -> frozenset[Key]:
    """Return the VMs whose documents, which have been parsed to `resources`, leave it out."""
    return frozenset(
        _key(resource)
        for resource, raw in zip(resources, raws, strict=True)
        if isinstance(resource, VirtualMachine)
        and msgspec.json.decode(raw, type=_Document).spec.run_strategy is msgspec.UNSET
    )


def keep_stopped(
    tables: Tables, resources: Sequence[Resource], silent: frozenset[Key]
) -> list[Resource]:
    """Return the objects as they are meant."""
    return [_kept(tables, each) if _key(each) in silent else each for each in resources]


def _key(resource: Resource) -> Key:
    return resource.kind, resource.metadata.namespace, resource.metadata.name


def _kept(tables: Tables, resource: Resource) -> Resource:
    before = tables.find(*_key(resource))
    if before is None or not _was_stopped(before):
        return resource
    assert isinstance(resource, VirtualMachine)
    return _replace(resource, spec=_replace(resource.spec, run_strategy=RunStrategy.HALTED))


def _was_stopped(before: StoredObject) -> bool:
    assert isinstance(before.resource, VirtualMachine)
    by_file = before.facts is not None and before.facts.stop_reason == BY_FILE
    return before.resource.spec.run_strategy is RunStrategy.HALTED and not by_file
