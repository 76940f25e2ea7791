"""The rules inside a tenant's namespace, put together. Pure.

Two tables: `spoof` is the bridge's, `gateway` the frame of the rest; `groups` and `exposures` add
chains and sets to it. What belongs to one NIC is a part of elements, kept from one rendering to
the next: a change of one NIC, group or exposure renders and compares that one alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from chv.nwd.kept import Kept
from chv.nwd.nft import exposures, gateway, groups, spoof, text
from chv.nwd.nft.groups import Profile
from chv.nwd.nft.model import NetworkRules
from chv.nwd.nft.roster import Numbers, Roster
from chv.nwd.nft.text import Ruleset

TABLES = (spoof.TABLE, gateway.TABLE)


def render(network: NetworkRules, roster: Roster | None = None) -> Ruleset:
    """Return the ruleset of a network; `roster`: in which its NICs were met before."""
    roster = roster or _ROSTERS.get(network.identity, (), Roster)
    roster.follow(network.nics)
    seen = groups.memberships(roster.one_of_each())
    alone = ((each,) for each in groups.named(network, seen))
    numbers = groups.number({*seen.profiles.values(), *alone})
    shared = [*groups.parts(network, seen, numbers), *map(exposures.part, network.exposures)]
    return Ruleset(
        TABLES,
        _frame(network),
        frozenset(shared),
        roster.parts(_numbers(seen.profiles, numbers)),
    )


def _numbers(
    profiles: Mapping[tuple[str, ...], Profile], numbers: Mapping[Profile, int]
) -> dict[tuple[str, ...], Numbers]:
    """Return the numbers of a NIC's profile and of its groups, by its groups."""
    found: dict[tuple[str, ...], Numbers] = {
        each: (numbers[profile], tuple(numbers[group,] for group in profile))
        for each, profile in profiles.items()
    }
    return found | {(): (0, ())}


_ROSTERS: Kept[Roster] = Kept()


def _frame(network: NetworkRules) -> str:
    """Return the text that neither NICs, groups nor exposures change."""
    alone = replace(network, nics=(), groups=(), exposures=())
    return _FRAMES.get(network.identity, (alone,), _frame_of)


def _frame_of(network: NetworkRules) -> str:
    body = spoof.table(v6=bool(network.subnet6)) + gateway.table(network)
    comment = text.comment(f"{network.identity}:{text.digest(body)}")
    return body.replace("COMMENT", comment)


_FRAMES: Kept[str] = Kept()
