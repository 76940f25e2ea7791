"""The NICs of one network, and who has which address, MAC, name and tap: asked in no time.

A cache of the records like the dictionaries there, and kept by them alone; a network has a thousand
NICs, and every attach asks all of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, TypeVar

from chv.common.ids import short_uid

if TYPE_CHECKING:
    from chv.nwd.records import Nic, Wanted

T = TypeVar("T")


class Members:
    """What is taken in one network. Read only but for the records."""

    def __init__(self) -> None:
        self.nics: dict[str, Nic] = {}
        self._owners: dict[str, str] = {}
        self._macs: dict[str, str] = {}
        self._taps: dict[str, str] = {}
        self._names: dict[str, dict[str, Nic]] = {}
        self._groups: Counter[str] = Counter()
        self._unswept: dict[str, None] = {}
        self._kinds: Counter[tuple[Wanted, str]] = Counter()
        self._all: tuple[Nic, ...] | None = ()

    @property
    def all(self) -> tuple[Nic, ...]:
        """Return every NIC: the very same tuple until one of them changes."""
        if self._all is None:
            self._all = tuple(self.nics.values())
        return self._all

    @property
    def kinds(self) -> Set[tuple[Wanted, str]]:
        """Return what is wanted of NICs, and for which boot, as far as any NIC is such a one."""
        return self._kinds.keys()

    @property
    def groups(self) -> Mapping[str, int]:
        """Return how many NICs are in each security group that any is in."""
        return self._groups

    @property
    def unswept(self) -> Set[str]:
        """Return the NICs of which connections may be tracked that their groups do not allow."""
        return self._unswept.keys()

    @property
    def owners(self) -> Mapping[str, str]:
        """Return the NIC of each address of either family."""
        return self._owners

    @property
    def macs(self) -> Mapping[str, str]:
        """Return the NIC of each MAC."""
        return self._macs

    def with_tap_of(self, nic_id: str) -> str | None:
        """Return the NIC whose tap has the name that this one's would have."""
        return self._taps.get(short_uid(nic_id))

    def named(self, hostname: str) -> list[Nic]:
        """Return the NICs of a name: those of one VM may share it."""
        return list(self._names.get(hostname, {}).values())

    def put(self, nic: Nic) -> None:
        """Add or replace."""
        self.drop(nic.nic_id)
        self.nics[nic.nic_id] = nic
        self._owners.update(dict.fromkeys(nic.addresses, nic.nic_id))
        self._macs[nic.mac] = nic.nic_id
        self._taps[short_uid(nic.nic_id)] = nic.nic_id
        self._names.setdefault(nic.hostname, {})[nic.nic_id] = nic
        self._groups.update(set(nic.groups))
        self._kinds[nic.wanted, nic.boot_id] += 1
        if nic.unswept:
            self._unswept[nic.nic_id] = None

    def drop(self, nic_id: str) -> None:
        """Forget one, if it is known."""
        self._all = None
        nic = self.nics.pop(nic_id, None)
        if nic is None:
            return
        self._unswept.pop(nic_id, None)
        for group_id in set(nic.groups):
            _count_down(self._groups, group_id)
        _count_down(self._kinds, (nic.wanted, nic.boot_id))
        for address in nic.addresses:
            del self._owners[address]
        del self._macs[nic.mac], self._taps[short_uid(nic_id)]
        same = self._names[nic.hostname]
        del same[nic_id]
        if not same:
            del self._names[nic.hostname]


def _count_down(counter: Counter[T], key: T) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
