"""`[console]` of the node's configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class ConsoleConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[console]`: what is recorded of the guests' serial lines.

    `recordings_bytes_max`: of all VMs together. Where it is more, rotated parts go first; what is
    current of each VM, 4 MiB at most, stays.
    """

    recordings_bytes_max: Annotated[int, Meta(ge=16 << 20, le=2**50)] = 1 << 30
