"""The only way from typed values to nft text: sets of elements, and tables around them. Pure.

An element is made of addresses, MACs, ports and names of links; each is checked here again, so
that no text of a caller can end a statement, whatever let it through before.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network

from chv.common.names import check_interface, check_mac

_PORT_MAX = 65535
_COMMENT = re.compile(r"^[a-z0-9:-]{1,120}\Z")
DIGEST_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class SetKey:
    """A set: `family table name`, all of them constants of ours."""

    family: str
    table: str
    name: str

    def __str__(self) -> str:
        return f"{self.family} {self.table} {self.name}"


@dataclass(frozen=True)
class Ruleset:
    """Tables of ours in one namespace: a fixed frame, and elements that change one by one."""

    tables: tuple[tuple[str, str], ...]  # (family, name)
    frame: str
    elements: Mapping[SetKey, frozenset[str]] = field(default_factory=dict)

    @property
    def frame_digest(self) -> str:
        """Tells two frames apart."""
        return digest(self.frame)

    @property
    def digest(self) -> str:
        """Tells two rulesets apart, elements included."""
        parts = [f"{key}={','.join(sorted(values))}" for key, values in self.elements.items()]
        return digest("\n".join([self.frame, *sorted(parts)]))

    def replacement(self) -> str:
        """Return one transaction that replaces whatever our tables hold now."""
        lines = []
        for family, name in self.tables:
            # Adding first makes the deletion work when there is no such table.
            lines += [f"add table {family} {name}", f"delete table {family} {name}"]
        lines.append(self.frame)
        lines += [_change("add", key, values) for key, values in self.elements.items() if values]
        return "\n".join(lines) + "\n"

    def removal(self) -> str:
        """Return one transaction after which our tables are not there."""
        return "".join(
            f"add table {family} {name}\ndelete table {family} {name}\n"
            for family, name in self.tables
        )

    def difference(self, before: Mapping[SetKey, frozenset[str]]) -> str:
        """Return one transaction from `before` to here; empty when they are the same."""
        lines = []
        for key, values in self.elements.items():
            old = before.get(key, frozenset())
            if old - values:
                lines.append(_change("delete", key, old - values))
            if values - old:
                lines.append(_change("add", key, values - old))
        return "".join(f"{line}\n" for line in lines)


def _change(verb: str, key: SetKey, values: Iterable[str]) -> str:
    return f"{verb} element {key} {{ {', '.join(sorted(values))} }}"


def digest(text: str) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]


def link(name: str) -> str:
    """Return a link's name as nft writes it."""
    return f'"{check_interface(name)}"'


def mac(text: str) -> str:
    """Return a MAC address."""
    return check_mac(text)


def address(text: str) -> str:
    """Return an IPv4 address."""
    return str(IPv4Address(text))


def subnet(text: str) -> str:
    """Return an IPv4 subnet."""
    return str(IPv4Network(text))


def port(number: int) -> str:
    """Return a TCP or UDP port."""
    if not 0 < number <= _PORT_MAX:
        raise ValueError(f"{number} is not a port")
    return str(int(number))


def comment(text: str) -> str:
    """Return a comment that is safe between quotes."""
    if not _COMMENT.match(text):
        raise ValueError(f"{text!r} is not a comment of ours")
    return f'comment "{text}"'


def tuple_of(*parts: str) -> str:
    """Return an element of a concatenated set."""
    return " . ".join(parts)
