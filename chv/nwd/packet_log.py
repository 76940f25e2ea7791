"""What rules with `log` and groups with `log_dropped` have told, per network, newest kept.

One socket per network that has such a group, read on the event loop as packets come; what the
kernel could not deliver is counted, never guessed. Entries live in memory alone: they end with
this process, and a reader that comes with a number of an earlier one starts anew. What a guest
sends is only ever taken apart, so an entry holds addresses, numbers and words of ours.
"""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime

import anyio
import anyio.abc
import anyio.lowlevel

from chv.common import logs
from chv.common.clock import timestamp
from chv.common.errors import ChvError, NotFound
from chv.common.wire.nwd_policy import Direction, GetNetworkLog, LogEntry, NetworkLogReply
from chv.nwd.kernel import netns, nflog, packets
from chv.nwd.nft import log_prefix
from chv.nwd.parts import Parts
from chv.nwd.records import Records

log = logs.get(__name__)
ENTRIES_MAX = 4096  # per network
REFRESH_S = 1.0
ALLOWED, DROPPED = "allowed", "dropped"
_NUMBERS = 2**32


@dataclass
class Ring:
    """The newest entries of a network. `lost`: told of and never read.

    Numbers begin at `base`, which grows from one process to the next: a reader of an earlier one
    is known by its number.
    """

    base: int = 1
    entries: deque[LogEntry] = field(default_factory=lambda: deque(maxlen=ENTRIES_MAX))
    added: int = 0
    lost: int = 0
    expected: int = 0  # the kernel's number of the next packet

    @property
    def next(self) -> int:
        """The number of the next entry."""
        return self.base + self.added

    def add(self, entry: LogEntry) -> None:
        """Take an entry; the oldest goes where there is no more room."""
        self.entries.append(entry)
        self.added += 1

    def count(self, number: int) -> None:
        """Take the kernel's number of a packet: what lies between is lost."""
        self.lost += (number - self.expected) % _NUMBERS
        self.expected = (number + 1) % _NUMBERS

    def page(self, request: GetNetworkLog) -> NetworkLogReply:
        """Return the newest entries, or the first ones after where the reader was."""
        first = self.next - len(self.entries)
        is_known = self.base <= request.after <= self.next
        start = max(request.after, first) if is_known else first
        overrun = max(0, first - request.after) if is_known else 0
        found = [
            (number, entry)
            for number, entry in enumerate(self.entries, first)
            if number >= start and request.nic_id in ("", entry.nic_id)
        ]
        page = found[: request.lines_max] if is_known else found[-request.lines_max :]
        is_cut = is_known and len(page) < len(found)
        return NetworkLogReply(
            entries=[entry for _, entry in page],
            next=page[-1][0] + 1 if is_cut else self.next,
            lost=self.lost + overrun,
        )


class PacketLogs:
    """The logs of every network. `keep` runs for the life of the daemon."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._rings: dict[str, Ring] = {}
        self._readers: dict[str, tuple[int, anyio.CancelScope]] = {}

    async def get(self, request: GetNetworkLog) -> NetworkLogReply:
        """See the wire."""
        if request.network_id not in self._parts.records.networks:
            raise NotFound("there is no such network", resource=request.network_id)
        ring = self._rings.get(request.network_id)
        return ring.page(request) if ring is not None else NetworkLogReply()

    async def keep(self) -> None:
        """Listen where something is told, from the moment a record says so."""
        async with anyio.create_task_group() as readers:
            while True:
                await self._refresh(readers)
                await anyio.sleep(REFRESH_S)

    async def _refresh(self, readers: anyio.abc.TaskGroup) -> None:
        records = self._parts.records
        for network_id in set(self._rings) - set(records.networks):
            del self._rings[network_id]
        wanted = {uid for uid in telling(records) if self._parts.is_due(records.networks[uid])}
        for network_id in set(self._readers) - wanted:
            self._readers.pop(network_id)[1].cancel()
        for network_id in wanted:
            await self._listen(network_id, readers)

    async def _listen(self, network_id: str, readers: anyio.abc.TaskGroup) -> None:
        """Open the socket; another namespace under the same name needs another one."""
        path = self._parts.netns_path(network_id)
        try:
            inode = netns.inode(path)
            known = self._readers.get(network_id)
            if known is not None and known[0] == inode:
                return
            if known is not None:
                self._readers.pop(network_id)[1].cancel()
            listener = await netns.inside(path, nflog.open_socket)
        except (ChvError, OSError) as error:
            log.debug("packet_log_not_open", network_id=network_id, error=str(error))
            return  # the namespace is being made, or another listens: tried again
        scope = anyio.CancelScope()
        self._readers[network_id] = (inode, scope)
        readers.start_soon(self._read, network_id, listener, scope)

    async def _read(
        self, network_id: str, listener: socket.socket, scope: anyio.CancelScope
    ) -> None:
        try:
            with listener, scope:
                await self._gather(network_id, listener)
        except Exception as error:  # noqa: BLE001  the firewall of one network's log
            log.warning("packet_log_failed", network_id=network_id, error=error)
            known = self._readers.get(network_id)
            if known is not None and known[1] is scope:
                del self._readers[network_id]  # opened again by the next look

    async def _gather(self, network_id: str, listener: socket.socket) -> None:
        ring = self._rings.setdefault(network_id, Ring(base=1 + int(anyio.current_time() * 1000)))
        ring.expected = 0
        while True:
            await anyio.wait_readable(listener)
            for logged in nflog.receive(listener):
                ring.count(logged.number)
                entry = entry_of(logged, network_id, self._parts.records)
                if entry is not None:
                    ring.add(entry)
            await anyio.lowlevel.checkpoint()  # a flood of one does not hold up others


def telling(records: Records) -> set[str]:
    """Return the networks with a NIC in a group that logs anything."""
    groups = {
        uid
        for uid, row in records.groups.items()
        if row.group.log_dropped or any(rule.log for rule in row.group.rules)
    }
    if not groups:
        return set()
    nics = records.nics.values()
    return {nic.network_id for nic in nics if not groups.isdisjoint(nic.groups)}


def entry_of(logged: nflog.Logged, network_id: str, records: Records) -> LogEntry | None:
    """Return what a logged packet says; None where its prefix is not ours."""
    prefix = log_prefix.parse(logged.prefix)
    if prefix is None:
        return None
    try:
        packet = packets.parse(logged.packet)
    except ValueError:
        packet = packets.Packet("", "", "")
    own = packet.source if prefix.direction is Direction.EGRESS else packet.destination
    return LogEntry(
        time=timestamp(_moment(logged.time_s)),
        network_id=network_id,
        group_id=_full(prefix.group, records),
        rule=-1 if prefix.rule is None else prefix.rule,
        verdict=DROPPED if prefix.rule is None else ALLOWED,
        direction=prefix.direction.value,
        nic_id=_owner(own, network_id, records),
        protocol=packet.protocol,
        source=packet.source,
        source_port=packet.source_port,
        destination=packet.destination,
        destination_port=packet.destination_port,
    )


def _moment(time_s: float) -> datetime:
    return datetime.fromtimestamp(time_s, UTC) if time_s else datetime.now(UTC)


def _full(short: str, records: Records) -> str:
    return next((uid for uid in records.groups if uid.startswith(short)), short)


def _owner(address: str, network_id: str, records: Records) -> str:
    nics = records.nics_of(network_id)
    return next((nic.nic_id for nic in nics if address in nic.addresses), "")
