"""The only way from typed values to nft text: checked values, and rulesets made of them. Pure.

A ruleset is a fixed frame and what changes under it: sets and chains that come and go, and
elements. Every value is checked here again, so that no text of a caller can end a statement,
whatever let it through before. Fails with InvalidArgument or ValueError, naming the value.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from ipaddress import IPv6Address, collapse_addresses
from operator import attrgetter

from chv.common.names import (
    Address,
    Network,
    check_address,
    check_cidr,
    check_interface,
    check_mac,
    check_uid,
)

_PORT_MAX = 65535
_NUMBER_MAX = 2**31 - 1
_COMMENT = re.compile(r"^[a-z0-9:-]{1,120}\Z")
_DIGEST_BITS = 128
CHECKED_MAX = 1024
DIGEST_CHARACTERS = 16
# Elements of a set that packets fill. The kernel takes memory for all of them at once when it
# has up to 65,535 (64 KiB for 4,096, a MiB for 65,535), and as they come when it has this many.
DYNAMIC_MAX = 65536


@dataclass(frozen=True, slots=True)
class SetKey:
    """A set or map: `family table name`, all of them made by us."""

    family: str
    table: str
    name: str

    def __str__(self) -> str:
        return f"{self.family} {self.table} {self.name}"


class ChainKey(SetKey):
    """A chain."""

    __slots__ = ()


Elements = Mapping[SetKey, frozenset[str]]


class Part:
    """Elements, sets and chains that come and go together, such as those of one NIC or group.

    Parts are kept by whoever makes them: the same object again means that nothing has changed,
    and a change of one among a thousand looks at that one alone.
    """

    __slots__ = ("chains", "elements", "number", "sets")

    def __init__(
        self,
        elements: Elements,
        sets: Mapping[SetKey, str] | None = None,
        chains: Mapping[ChainKey, tuple[str, ...]] | None = None,
    ) -> None:
        self.elements = elements
        self.sets = sets or {}
        self.chains = chains or {}
        lines = [f"{key}={what}" for key, what in self.sets.items()]
        lines += [f"{key}={what!r}" for key, what in self.chains.items()]
        self.number = _number("\n".join(sorted([*lines, *_lines(elements)])))


_numbered = attrgetter("number")


@dataclass(frozen=True)
class Ruleset:
    """Tables of ours in one namespace.

    The frame is fixed; it reaches what is under it by the elements of its verdict maps. `shared`:
    parts with sets and chains, few of which change; two of them may have the same set or element.
    `parts`: elements that no other part has, as those of NICs, of which there are many.
    """

    tables: tuple[tuple[str, str], ...]  # (family, name)
    frame: str
    shared: frozenset[Part] = frozenset()
    parts: frozenset[Part] = frozenset()

    @cached_property
    def frame_digest(self) -> str:
        """Tells two frames apart."""
        return digest(self.frame)

    @cached_property
    def digest(self) -> str:
        """Tells two rulesets apart, everything included."""
        # A sum does not depend on the order, and needs no look at what each part has said once.
        total = sum(map(_numbered, self.shared)) + sum(map(_numbered, self.parts))
        return digest(f"{self.frame}\n{total % 2**_DIGEST_BITS}")

    @property
    def elements(self) -> dict[SetKey, set[str]]:
        """Return the elements of shared parts."""
        return _merged(part.elements for part in self.shared)

    @property
    def sets(self) -> dict[SetKey, str]:
        """Return what each set is that comes and goes."""
        return {key: what for part in self.shared for key, what in part.sets.items()}

    @property
    def chains(self) -> dict[ChainKey, tuple[str, ...]]:
        """Return the rules of each chain that comes and goes, in order."""
        return {key: rules for part in self.shared for key, rules in part.chains.items()}

    def all_elements(self) -> dict[SetKey, set[str]]:
        """Return the elements of every set, wherever they come from."""
        return _merged(part.elements for part in (*self.shared, *self.parts))

    def replacement(self) -> str:
        """Return one transaction that replaces whatever our tables hold now."""
        return self.removal() + self.content()

    def content(self) -> str:
        """Return what fills tables that are not there, or hold neither rules nor elements."""
        lines, chains = [self.frame], self.chains
        lines += [f"add set {key} {{ {what} }}" for key, what in self.sets.items()]
        lines += [f"add chain {key}" for key in chains]
        lines += _filled(chains)
        lines += _changes("add", self.all_elements())
        return "\n".join(lines) + "\n"

    def removal(self) -> str:
        """Return one transaction after which our tables are not there."""
        # Adding first makes the deletion work when there is no such table.
        return "".join(
            f"add table {family} {name}\ndelete table {family} {name}\n"
            for family, name in self.tables
        )

    def difference(self, before: Ruleset) -> str:
        """Return one transaction from `before` to here; empty when they are the same.

        It is a replacement where the frame, or what a set is, has changed. What is referred to
        is made first and goes last; an element leaves before one with its key comes.
        """
        gone = replace(before, shared=before.shared - self.shared, parts=before.parts - self.parts)
        come = replace(self, shared=self.shared - before.shared, parts=self.parts - before.parts)
        old_sets, new_sets, stay = gone.sets, come.sets, self.shared & before.shared
        if self.frame != before.frame or _redeclared(old_sets, new_sets):
            return self.replacement()
        held = {key for part in stay for key in part.sets}
        removed, added = _element_changes(gone, come, stay)
        old_chains, new_chains = gone.chains, come.chains
        changed = {k: rules for k, rules in new_chains.items() if old_chains.get(k) != rules}
        gone_sets = old_sets.keys() - new_sets.keys() - held
        gone_chains = old_chains.keys() - new_chains.keys()
        lines = [
            f"add set {key} {{ {what} }}"
            for key, what in new_sets.items()
            if key not in old_sets and key not in held
        ]
        lines += [f"add chain {key}" for key in changed if key not in old_chains]
        lines += [f"flush chain {key}" for key in changed if key in old_chains]
        lines += _filled(changed)
        lines += _changes("delete", {k: v for k, v in removed.items() if k not in gone_sets})
        lines += _changes("add", added)
        lines += [f"flush chain {key}" for key in sorted(gone_chains, key=str)]
        lines += [f"delete chain {key}" for key in sorted(gone_chains, key=str)]
        lines += [f"delete set {key}" for key in sorted(gone_sets, key=str)]
        return "".join(f"{line}\n" for line in lines)


def _redeclared(old: Mapping[SetKey, str], new: Mapping[SetKey, str]) -> bool:
    return any(old.get(key, what) != what for key, what in new.items())


def _element_changes(
    gone: Ruleset, come: Ruleset, stay: frozenset[Part]
) -> tuple[dict[SetKey, set[str]], dict[SetKey, set[str]]]:
    """Return what leaves and what comes; what a part that stays has as well does neither."""
    old, new = gone.all_elements(), come.all_elements()
    keys = old.keys() | new.keys()
    held: dict[SetKey, set[str]] = {}
    for part in stay:
        for key in part.elements.keys() & keys:
            held.setdefault(key, set()).update(part.elements[key])
    return _without(_without(old, new), held), _without(_without(new, old), held)


def _merged(each: Iterable[Elements]) -> dict[SetKey, set[str]]:
    merged: dict[SetKey, set[str]] = {}
    for elements in each:
        for key, values in elements.items():
            merged.setdefault(key, set()).update(values)
    return merged


def _without(
    some: dict[SetKey, set[str]], others: dict[SetKey, set[str]]
) -> dict[SetKey, set[str]]:
    return {key: values - others.get(key, set()) for key, values in some.items()}


def _changes(verb: str, elements: Mapping[SetKey, set[str]]) -> list[str]:
    return [
        f"{verb} element {key} {{ {', '.join(sorted(values))} }}"
        for key, values in elements.items()
        if values
    ]


def _filled(chains: Mapping[ChainKey, tuple[str, ...]]) -> list[str]:
    return [f"add rule {key} {line}" for key, rules in chains.items() for line in rules]


def _lines(elements: Elements) -> list[str]:
    return sorted(f"{key}={','.join(sorted(values))}" for key, values in elements.items())


def digest(text: str) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[: _DIGEST_BITS // 8], "big")


# --- checked values
def link(name: str) -> str:
    """Return a link's name as nft writes it."""
    return f'"{check_interface(name)}"'


def mac(text: str) -> str:
    """Return a MAC address."""
    return check_mac(text)


def address(text: str) -> str:
    """Return an IPv4 address."""
    return _written(text, 4)


def address6(text: str) -> str:
    """Return an IPv6 address."""
    return _written(text, 6)


def address6_number(text: str) -> str:
    """Return an IPv6 address as a number of 128 bits."""
    return f"{int(IPv6Address(address6(text))):#034x}"


def subnet(text: str) -> str:
    """Return an IPv4 subnet."""
    return str(_of_version(check_cidr(text), 4))


def subnet6(text: str) -> str:
    """Return an IPv6 subnet."""
    return str(_of_version(check_cidr(text), 6))


def is_v6(text: str) -> bool:
    """Tell the family of an address, checked."""
    return _checked(text)[0] == 6


def _written(text: str, version: int) -> str:
    found, written = _checked(text)
    if found != version:
        raise ValueError(f"{written} is not of IPv{version}")
    return written


@lru_cache(CHECKED_MAX)  # the parts of one NIC ask for its addresses a dozen times
def _checked(text: str) -> tuple[int, str]:
    checked = check_address(text)
    return checked.version, str(checked)


def _of_version(checked: Address | Network, version: int) -> Address | Network:
    if checked.version != version:
        raise ValueError(f"{checked} is not of IPv{version}")
    return checked


def port(number: int) -> str:
    """Return a TCP or UDP port."""
    return count(number, number_max=_PORT_MAX)


def port_range(first: int, last: int) -> str:
    """Return one port, or a range of them."""
    return port(first) if first == last else f"{port(first)}-{port(last)}"


def count(number: int, *, number_max: int = _NUMBER_MAX) -> str:
    """Return a number of something, one at least."""
    if not isinstance(number, int) or not 0 < number <= number_max:
        raise ValueError(f"{number!r} is not a number from 1 to {number_max}")
    return str(int(number))


def uid(text: str) -> str:
    """Return an object's id as a part of a name: nft's words never begin with what is before it."""
    return check_uid(text).replace("-", "")


def comment(text: str) -> str:
    """Return a comment that is safe between quotes."""
    if not _COMMENT.match(text):
        raise ValueError(f"{text!r} is not a comment of ours")
    return f'comment "{text}"'


def tuple_of(*parts: str) -> str:
    """Return an element of a concatenated set."""
    return " . ".join(parts)


def any_of(parts: Iterable[str]) -> str:
    """Return one value, or an anonymous set of several."""
    each = list(parts)
    return each[0] if len(each) == 1 else f"{{ {', '.join(each)} }}"


def collapsed(cidrs: Iterable[str], *, v6: bool) -> list[str]:
    """Return the subnets of one family, none within another: nft refuses what overlaps."""
    found = [check_cidr(text) for text in cidrs]
    same = [network for network in found if (network.version == 6) is v6]
    return [str(network) for network in _collapse(same)]


_collapse: Callable[[Iterable[Network]], Iterable[Network]] = collapse_addresses  # type: ignore[assignment]
