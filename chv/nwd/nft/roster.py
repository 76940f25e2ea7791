"""The NICs of one network as its rules see them: met once each, and remembered by kind. Pure.

Groups and limits ask which kinds of NICs there are, never how many; what belongs to one NIC is a
part, made when it comes and when the number of one of its groups becomes another. So a change of
one among a thousand looks at that one alone. What fails to render is tried again the next time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from chv.nwd.kept import Followed
from chv.nwd.nft import gateway, groups, spoof
from chv.nwd.nft.model import NicRules
from chv.nwd.nft.text import Part, SetKey

Kind: TypeAlias = tuple[tuple[str, ...], int]  # groups, limit of connections
Numbers: TypeAlias = tuple[int, tuple[int, ...]]  # of the profile, and of each group in it


class Roster:
    """Follows the NICs of one network."""

    def __init__(self) -> None:
        self._followed: Followed[NicRules] = Followed()
        self._kinds: dict[Kind, dict[int, NicRules]] = {}
        self._parts: dict[int, Part] = {}
        self._numbers: Mapping[tuple[str, ...], Numbers] = {}
        self._all: frozenset[Part] | None = None  # until a NIC or a number changes

    def follow(self, nics: Sequence[NicRules]) -> None:
        """Take in who is there now."""
        before = self._followed.sources
        went, came = self._followed.follow(nics)
        if went or came:
            self._all = None
        for key in went:
            kind = _kind(before[key])
            del self._kinds[kind][key]
            if not self._kinds[kind]:
                del self._kinds[kind]
            self._parts.pop(key, None)
        for key in came:
            nic = self._followed.sources[key]
            self._kinds.setdefault(_kind(nic), {})[key] = nic

    def one_of_each(self) -> list[NicRules]:
        """Return a NIC of each kind."""
        return [next(iter(same.values())) for same in self._kinds.values()]

    def parts(self, numbers: Mapping[tuple[str, ...], Numbers]) -> frozenset[Part]:
        """Return the parts of all; `numbers` by the groups of NICs."""
        if self._all is not None and numbers == self._numbers:
            return self._all
        self._all = None
        for (own, _), same in self._kinds.items():
            if numbers[own] != self._numbers.get(own):
                for key in same:
                    self._parts.pop(key, None)
        self._numbers = numbers
        nics = self._followed.sources
        for key in nics.keys() - self._parts.keys():
            self._parts[key] = _part(nics[key], *numbers[nics[key].groups])
        self._all = frozenset(self._parts.values())
        return self._all


def _kind(nic: NicRules) -> Kind:
    return nic.groups, nic.connections_max


def _part(nic: NicRules, profile_number: int, group_numbers: tuple[int, ...]) -> Part:
    found: dict[SetKey, frozenset[str]] = spoof.elements(nic)
    found |= gateway.elements(nic)
    return Part(found | groups.elements(nic, profile_number, group_numbers))
