"""A NIC's frames for somebody else to read: a packet socket that leaves with the reply.

No byte passes this daemon, and the capture goes on while it restarts. Only root may have such a
socket, since its holder could bind it to another link of the namespace: who may ask is the
agent's to check, which alone speaks to us.
"""

from __future__ import annotations

from chv.common.errors import FailedPrecondition, NotFound
from chv.common.rpc import WithFds
from chv.common.wire.nwd_policy import OpenCapture
from chv.common.wire.types import Done
from chv.nwd.kernel import netns, packet_socket
from chv.nwd.parts import Parts
from chv.nwd.records import Nic


class Captures:
    """Opens captures."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def open(self, request: OpenCapture) -> WithFds[Done]:
        """See the wire."""
        nic = attached(self._parts, request.nic_id)
        tap = self._parts.layout.tap(nic.nic_id)
        path = self._parts.netns_path(nic.network_id)
        fd = await netns.inside(path, lambda: packet_socket.open_capture(tap))
        return WithFds(Done(), [fd])


def attached(parts: Parts, nic_id: str) -> Nic:
    """Return the record of a NIC that is there."""
    row = parts.records.nics.get(nic_id)
    if row is None:
        raise NotFound("there is no such NIC", resource=nic_id)
    if not (parts.is_due(row) and parts.is_due(parts.records.networks[row.network_id])):
        raise FailedPrecondition("the NIC is absent", resource=nic_id, hint="attach it again")
    return row
