"""When a disk may grow under its VM. Pure.

`block_resize` below an export without a connected client ends the storage daemon (QEMU 10, 11),
it cuts a client off that gave no channel for requests of ours (Cloud Hypervisor, and a proxy
that no VMM is behind), and before QEMU 8 the guest does not see it. So a caller's word that its
VMM takes up a new size is not enough: the channel must be seen (`chv.stord.clients`). Whatever
is not surely safe waits for the next start.
"""

from __future__ import annotations

import msgspec

from chv.common.wire.stord import VmmClient

MAJOR_MIN = 8
ONLINE, NEXT_START, DETACHED = "online", "on_next_start", "detached"


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one attachment.

    `connected`: a client is on the export right now. `told`: every client of the storage daemon
    was seen to have given it a channel.
    """

    client: VmmClient
    major: int  # version of the storage daemon that runs
    serving: bool
    connected: bool
    told: bool
    read_only: bool = False


def may_grow_online(now: Situation) -> bool:
    """Tell whether `block_resize` is safe and seen by the guest."""
    return (
        now.serving
        and now.connected
        and now.told
        and now.client is VmmClient.QEMU
        and now.major >= MAJOR_MIN
        and not now.read_only
    )
