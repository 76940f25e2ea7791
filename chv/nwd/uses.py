"""What of a network others rest on, and a change of it must leave them. Decides only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import ip_address, ip_network

from chv.common.errors import ChvError, InUse
from chv.common.wire.nwd import L2Mode, Topology, UplinkMode
from chv.nwd.records import ExposureRow, Nic


def refuse_orphans(
    topology: Topology, before: Topology, nics: Sequence[Nic], exposures: Iterable[ExposureRow]
) -> None:
    """Raise InUse where NICs or exposures would lose what they have of the network."""
    public = topology.public_addresses
    for nic in nics:
        if nic.public_address and nic.public_address not in public:
            raise _in_use(nic.public_address, "NIC", nic.nic_id, "spec.publicAddresses")
        if nic.groups and topology.tenant != before.tenant:
            raise _in_use(f"tenant {before.tenant!r}", "NIC", nic.nic_id, "tenant")
    subnets = [ip_network(text) for text in (topology.subnet, topology.subnet6) if text]
    for row in exposures:
        exposure_id = row.exposure.exposure_id
        if row.host_addresses and topology.uplink is UplinkMode.NONE:
            raise _in_use("the uplink", "exposure", exposure_id, "spec.uplink")
        for text in row.exposure.addresses:
            if text in row.host_addresses or text in public:
                continue
            if not any(ip_address(text) in subnet for subnet in subnets):
                raise _in_use(text, "exposure", exposure_id, "spec")
            if topology.l2 is L2Mode.OPEN:
                raise _in_use(f"{text}, which isolation needs,", "exposure", exposure_id, "spec.l2")


def _in_use(what: str, kind: str, uid: str, field: str) -> ChvError:
    return InUse(
        f"{what} is used by {kind} {uid}",
        field=field,
        resource=uid,
        hint=f"change the {kind} first",
    )
