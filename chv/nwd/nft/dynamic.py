"""What a renderer adds under the gateway's frame: chains, sets that rules share, elements. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from chv.nwd.nft import text
from chv.nwd.nft.gateway import TABLE
from chv.nwd.nft.text import ChainKey, Part, SetKey


@dataclass(slots=True)
class Dynamic:
    """What is added so far. A shared set is named after its elements, and never changes."""

    sets: dict[SetKey, str] = field(default_factory=dict)
    chains: dict[ChainKey, tuple[str, ...]] = field(default_factory=dict)
    elements: dict[SetKey, set[str]] = field(default_factory=dict)

    def part(self) -> Part:
        """Return all of it as a part."""
        elements = {key: frozenset(values) for key, values in self.elements.items() if values}
        return Part(elements, self.sets, self.chains)

    def element(self, name: str, value: str) -> None:
        """Add an element of a set of the frame."""
        self.elements.setdefault(SetKey(*TABLE, name), set()).add(value)

    def ports(self, ranges: Iterable[str]) -> str:
        """Add a set of ports that do not overlap, and return its name."""
        return self._shared("q", "inet_service", ranges)

    def subnets(self, cidrs: Iterable[str], *, six: bool) -> str:
        """Add a set of subnets that do not overlap, and return its name."""
        return self._shared("a", "ipv6_addr" if six else "ipv4_addr", cidrs)

    def _shared(self, letter: str, kind: str, values: Iterable[str]) -> str:
        own = sorted(values)
        name = f"{letter}_{text.digest(f'{kind} {own}')}"
        key = SetKey(*TABLE, name)
        self.sets[key] = f"type {kind}; flags interval;"
        self.elements[key] = set(own)
        return name
