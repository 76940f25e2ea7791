"""Who asked: the caller's own name for himself, and the uid that the kernel vouches for. Pure.

A caller names himself as he likes (`cli:ann`, `executor`); what follows as `(uid=N)` is not his
to choose. So nobody can ask in another uid's name, nor as the node itself (`system`).
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from chv.common.rpc.channel import Peer

P = TypeVar("P", bound=msgspec.Struct)

NAME_MAX = 200  # with the uid it stays a ShortText
NOBODY = "unnamed"
_UID = re.compile(r"\(?uid\s*=[^)]*\)?", re.IGNORECASE)


def vouched(claimed: str, uid: int) -> str:
    """Return the name that is claimed, without any uid in it, and the uid of the caller."""
    name = _UID.sub("", "".join(each for each in claimed if each.isprintable())).strip()
    return f"{name[:NAME_MAX] or NOBODY}(uid={uid})"


def stamped(params: P, peer: Peer) -> P:
    """Return the parameters of a call with the requester that is true; without one as they are."""
    if "requester" not in params.__struct_fields__:
        return params
    said = str(getattr(params, "requester", ""))
    return msgspec.structs.replace(params, requester=vouched(said, peer.uid))
