"""What is kept of a VM's rebuild between the request and its end. Pure types."""

from __future__ import annotations

import msgspec

from chv.common.wire.types import FrozenMeta


class Rebuild(msgspec.Struct, metaclass=FrozenMeta):
    """A rebuild that was asked for, until the former root disk is of no more use.

    Until `swapped` the VM has the former disk, and all can be taken back. From then on it has the
    new one, and the former disk goes once the VM has run from that.
    """

    operation_id: str
    old_uid: str  # of the root volume as it was
    new_uid: str
    keep_old: bool = False
    force: bool = False
    swapped: bool = False
