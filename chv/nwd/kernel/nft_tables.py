"""What stands in some nft tables: their chains and sets by name, without rules and elements.

A few messages, however much the tables hold; libnftables would read all of it. Reads only.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Collection, Iterator

from chv.nwd.kernel import netlink
from chv.nwd.kernel.errors import translated
from chv.nwd.nft.standing import Standing, StandingSet, TableKey

_TABLES, _CHAINS, _SETS, _OBJECTS, _FLOWTABLES = (10 << 8 | kind for kind in (1, 4, 10, 19, 23))
_ANY = struct.pack("=BBH", 0, 0, 0)
_FAMILIES = {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}
_TABLE_NAME, _TABLE_FLAGS, _TABLE_HANDLE, _TABLE_COMMENT = 1, 2, 4, 6
_OF_TABLE = 1  # of chains, sets, objects and flowtables alike
_CHAIN_NAME, _CHAIN_HOOK = 3, 4
_SET_NAME, _SET_FLAGS = 2, 3
_ANONYMOUS, _MAP, _FILLED = 0x1, 0x8, 0x20


def read(asker: socket.socket, tables: Collection[TableKey]) -> dict[TableKey, Standing]:
    """Return those of the tables that stand in the namespace of a socket for netfilter."""
    with translated("reading what nft tables hold"):
        found = _read_tables(asker, tables)
        for table, each in _of(asker, _CHAINS, found):
            table.chains[_text(each[_CHAIN_NAME])] = _CHAIN_HOOK in each
        for table, each in _of(asker, _SETS, found):
            flags = int.from_bytes(each.get(_SET_FLAGS, b""), "big")
            if not flags & _ANONYMOUS:
                one = StandingSet(is_map=bool(flags & _MAP), is_filled=bool(flags & _FILLED))
                table.sets[_text(each[_SET_NAME])] = one
        for kind in (_OBJECTS, _FLOWTABLES):
            for table, _ in _of(asker, kind, found):
                table.is_plain = False
    return found


def names(asker: socket.socket) -> list[tuple[TableKey, int]]:
    """Return family, name and handle of every table in the namespace of a socket."""
    with translated("listing nft tables"):
        return [
            (
                (family, _text(each[_TABLE_NAME])),
                int.from_bytes(each.get(_TABLE_HANDLE, b""), "big"),
            )
            for family, each in _dump(asker, _TABLES)
        ]


def _read_tables(asker: socket.socket, tables: Collection[TableKey]) -> dict[TableKey, Standing]:
    found = {}
    for family, each in _dump(asker, _TABLES):
        key = (family, _text(each[_TABLE_NAME]))
        if key in tables:
            found[key] = Standing(
                comment=_text(each.get(_TABLE_COMMENT, b"")[2:]),  # behind its kind and length
                is_plain=not any(each.get(_TABLE_FLAGS, b"")),
            )
    return found


def _of(
    asker: socket.socket, kind: int, found: dict[TableKey, Standing]
) -> Iterator[tuple[Standing, dict[int, bytes]]]:
    for family, each in _dump(asker, kind):
        table = found.get((family, _text(each[_OF_TABLE])))
        if table is not None:
            yield table, each


def _dump(asker: socket.socket, kind: int) -> Iterator[tuple[str, dict[int, bytes]]]:
    for body in netlink.ask(asker, netlink.message(kind, netlink.DUMP, _ANY)):
        found = netlink.table(body, len(_ANY))
        yield _FAMILIES.get(body[0], str(body[0])), found


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("utf-8", "replace")
