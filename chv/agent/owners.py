"""Owners by name: ownerReferences without a uid, as a file has them, get that of their owner.

A file cannot know the uid of an object that it makes. An owner is in the same namespace as what
it owns; it is there already, or comes in the same request. Fails with InvalidArgument, or with
FailedPrecondition where the owner is being deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from chv.agent.references import Key
from chv.agent.tables import Tables
from chv.common.errors import FailedPrecondition, InvalidArgument
from chv.common.wire.resources import OwnerReference, Resource

_replace = msgspec.structs.replace


def with_owners(
    tables: Tables,
    resources: list[Resource],
    known: Mapping[Key, str],
    new_uid: Callable[[], str],
) -> tuple[list[Resource], dict[Key, str]]:
    """Return the objects with their owners' uids, and the uids of objects that are yet to be.

    `known`: those of them that have one elsewhere already.
    """
    coming = {_key(each): each for each in resources}
    uids = dict(known)

    def uid_of(resource: Resource, owner: OwnerReference, field: str) -> str:
        key = (owner.kind, resource.metadata.namespace, owner.name)
        title = "{} {}/{}".format(*_key(resource))
        found = tables.find(*key)
        if found is not None and found.deleting:
            raise FailedPrecondition(f"{found.title} is being deleted", resource=title, field=field)
        if found is not None:
            return found.uid
        if key not in coming:
            raise InvalidArgument(
                f"there is no {owner.kind} {owner.name!r} in namespace {key[1]}",
                resource=title,
                field=field,
                hint=f"apply the {owner.kind} before, or in the same file",
            )
        if key not in uids:
            uids[key] = new_uid()
        return uids[key]

    return [_owned(each, uid_of) for each in resources], uids


def _key(resource: Resource) -> Key:
    return (resource.kind, resource.metadata.namespace, resource.metadata.name)


def _owned(resource: Resource, uid_of: Callable[[Resource, OwnerReference, str], str]) -> Resource:
    owners = resource.metadata.owner_references
    if all(each.uid for each in owners):
        return resource
    found = [
        each
        if each.uid
        else _replace(each, uid=uid_of(resource, each, f"metadata.ownerReferences[{index}]"))
        for index, each in enumerate(owners)
    ]
    return _replace(resource, metadata=_replace(resource.metadata, owner_references=found))
