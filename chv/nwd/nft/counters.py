"""Why packets of a NIC were dropped: what to list, and what the listing says. Pure.

The bridge counts by port, the gateway by the NIC's address; `drops_of` puts both together. Counts
begin anew when rules are loaded as a whole, and a port's also when nothing was dropped there for a
week. A listing that is not what nft writes raises Internal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from chv.common.errors import Internal
from chv.nwd.nft import spoof
from chv.nwd.nft.gateway import NOT_ALLOWED, TOO_MANY
from chv.nwd.nft.text import SetKey

_SETS = (*(SetKey(*spoof.TABLE, reason) for reason in spoof.REASONS), *NOT_ALLOWED, *TOO_MANY)
# For Nft.list_counters: one call each, for nft looks for all sets of a text in one table.
COMMANDS = tuple(f"list set {key}" for key in _SETS)
_REASONS = {(key.family, key.name): key.name.rstrip("46") for key in _SETS}

Drops = Mapping[str, Mapping[str, int]]


class _Counter(msgspec.Struct, frozen=True):
    packets: int


class _Counted(msgspec.Struct, frozen=True):
    val: str
    counter: _Counter | None = None


class _Element(msgspec.Struct, frozen=True):
    elem: _Counted


class _Set(msgspec.Struct, frozen=True):
    family: str
    name: str
    elem: list[_Element | str] = []


class _Item(msgspec.Struct, frozen=True):
    set: _Set | None = None


class _Listing(msgspec.Struct, frozen=True):
    nftables: list[_Item]


_decoder = msgspec.json.Decoder(_Listing)


def drops(listing: str) -> dict[str, dict[str, int]]:
    """Return dropped packets by reason for each port or address that has any."""
    found: dict[str, dict[str, int]] = {}
    for each in _sets(listing):
        reason = _REASONS.get((each.family, each.name))
        if reason is None:
            continue
        for element in each.elem:
            if isinstance(element, str) or element.elem.counter is None:
                continue
            if packets := element.elem.counter.packets:
                of = found.setdefault(element.elem.val, {})
                of[reason] = of.get(reason, 0) + packets
    return found


def drops_of(found: Drops, tap: str, addresses: Sequence[str]) -> dict[str, int]:
    """Return dropped packets by reason of one NIC."""
    total: dict[str, int] = {}
    for key in (tap, *addresses):
        for reason, packets in found.get(key, {}).items():
            total[reason] = total.get(reason, 0) + packets
    return total


def _sets(listing: str) -> Iterator[_Set]:
    try:
        for line in listing.splitlines():
            if line.strip():
                yield from (item.set for item in _decoder.decode(line).nftables if item.set)
    except msgspec.MsgspecError as error:
        raise Internal(f"nft lists counters in an unknown form: {error}") from error
