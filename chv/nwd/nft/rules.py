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
from chv.nwd.nft.dynamic import Dynamic
from chv.nwd.nft.groups import Profile
from chv.nwd.nft.model import NetworkRules, NicRules
from chv.nwd.nft.text import Part, Ruleset, SetKey

TABLES = (spoof.TABLE, gateway.TABLE)


def render(network: NetworkRules) -> Ruleset:
    """Return the ruleset of a network."""
    some = {nic.groups: nic for nic in network.nics if nic.groups}
    profiles = {each: groups.profile_of(nic) for each, nic in some.items()}
    numbers = groups.number({*profiles.values(), *((each,) for each in groups.named(network))})
    dynamic = Dynamic()
    groups.add(dynamic, network, numbers)
    exposures.add(dynamic, network)
    return Ruleset(
        TABLES,
        _frame(network),
        {key: frozenset(values) for key, values in dynamic.elements.items()},
        dynamic.sets,
        dynamic.chains,
        _parts(network, profiles, numbers),
    )


def _parts(
    network: NetworkRules, profiles: Mapping[tuple[str, ...], Profile], numbers: dict[Profile, int]
) -> frozenset[Part]:
    of_groups: dict[tuple[str, ...], tuple[int, tuple[int, ...]]] = {
        each: (numbers[profile], tuple(numbers[group,] for group in profile))
        for each, profile in profiles.items()
    }
    of_groups[()] = (0, ())
    items = ((nic.nic_id, (nic, *of_groups[nic.groups])) for nic in network.nics)
    return frozenset(_PARTS.get_each(items, _of_nic))


def _of_nic(nic: NicRules, profile_number: int, group_numbers: tuple[int, ...]) -> Part:
    """A change of one NIC renders all: what did not change comes from memory."""
    found: dict[SetKey, frozenset[str]] = spoof.elements(nic)
    found |= gateway.elements(nic)
    return Part(found | groups.elements(nic, profile_number, group_numbers))


_PARTS: Kept[Part] = Kept()


def _frame(network: NetworkRules) -> str:
    """Return the text that neither NICs, groups nor exposures change."""
    alone = replace(network, nics=(), groups=(), exposures=())
    return _FRAMES.get(network.identity, (alone,), _frame_of)


def _frame_of(network: NetworkRules) -> str:
    body = spoof.table(v6=bool(network.subnet6)) + gateway.table(network)
    comment = text.comment(f"{network.identity}:{text.digest(body)}")
    return body.replace("COMMENT", comment)


_FRAMES: Kept[str] = Kept()
