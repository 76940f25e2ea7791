"""The rules inside a tenant's namespace, put together. Pure.

Two tables: `spoof` is the bridge's, `gateway` the frame of the rest; `groups` and `exposures` add
chains and sets to it. What belongs to one NIC is a part of elements, kept from one rendering to
the next: a change of one NIC, group or exposure renders and compares that one alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from chv.nwd.nft import exposures, gateway, groups, spoof, text
from chv.nwd.nft.groups import Dynamic, Profile
from chv.nwd.nft.model import NetworkRules, NicRules
from chv.nwd.nft.text import Part, Ruleset, SetKey

TABLES = (spoof.TABLE, gateway.TABLE)
NICS_KEPT_MAX = 16384


def render(network: NetworkRules) -> Ruleset:
    """Return the ruleset of a network."""
    profiles = {nic.groups: groups.profile_of(nic) for nic in network.nics if nic.groups}
    numbers = groups.number(set(profiles.values()))
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
    by_groups = {each: numbers[profile] for each, profile in profiles.items()}
    return frozenset(_of_nic(nic, by_groups.get(nic.groups, 0)) for nic in network.nics)


@lru_cache(NICS_KEPT_MAX)
def _of_nic(nic: NicRules, profile_number: int) -> Part:
    """A change of one NIC renders all: what did not change comes from memory."""
    elements: dict[SetKey, frozenset[str]] = spoof.elements(nic)
    return Part(elements | gateway.elements(nic) | groups.elements(nic, profile_number))


def _frame(network: NetworkRules) -> str:
    body = spoof.table(v6=bool(network.subnet6)) + gateway.table(network)
    comment = text.comment(f"{network.identity}:{text.digest(body)}")
    return body.replace("COMMENT", comment)
