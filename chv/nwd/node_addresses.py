"""The node's own addresses as exposures use them: asked before one is made, and watched after.

What an exposure may have otherwise is in `exposure_rules`; here is what only the node can tell.
"""

from __future__ import annotations

from collections.abc import Iterable

import anyio.to_thread

from chv.common.errors import InvalidArgument
from chv.common.wire.nwd_policy import CheckExposure, Exposure
from chv.common.wire.types import Done
from chv.nwd.exposure_rules import check_form, refuse_listened
from chv.nwd.host import Host
from chv.nwd.kernel import listeners
from chv.nwd.records import ExposureRow, Records

SHOWN_MAX = 8


async def check(host: Host, records: Records, request: CheckExposure) -> Done:
    """Raise where an address is not the node's, or the node listens on the port itself."""
    exposure = request.exposure
    check_form(exposure)
    refuse_strange(exposure, await host.own_addresses())
    listening = await anyio.to_thread.run_sync(listeners.read)
    old = records.exposures.get(exposure.exposure_id)
    refuse_listened(exposure, exposure.addresses, old, listening)
    return Done()


def refuse_strange(exposure: Exposure, node: Iterable[str]) -> None:
    """Raise for an address that the node does not have."""
    own = sorted(node, key=lambda text: (":" in text, text))
    for index, text in enumerate(exposure.addresses):
        if text not in own:
            shown = ", ".join(own[:SHOWN_MAX]) + (", …" if len(own) > SHOWN_MAX else "")
            raise InvalidArgument(
                f"{text} is neither an address of the node, nor a public address or in a subnet of"
                " the network",
                field=f"exposure.addresses[{index}]",
                hint=f"the node has {shown or 'none'}; others go to the network's publicAddresses",
            )


def lost(row: ExposureRow, node: frozenset[str] | None) -> str:
    """Say which address of an exposure the node has no more; empty where it has them all."""
    gone = [text for text in row.host_addresses if node is not None and text not in node]
    return f"the node has no address {', '.join(gone)} any more" if gone else ""
