"""The host's side: one nft table of ours, forwarding, and what of the host gets in our way.

"Host" is the namespace that nwd itself runs in, be it the machine's own or a sandbox. Nothing in
it is touched but our table, our links and the ip_forward setting, which is switched on while a
network has an uplink and left on afterwards, since others may have come to rely on it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from chv.common.errors import ChvError, Conflict
from chv.common.failpoint import failpoint
from chv.nwd import runfiles, settings
from chv.nwd.addresses import Surroundings, uplink_addresses
from chv.nwd.blueprint import has_uplink
from chv.nwd.kernel import netns, nft_generation, sysctl
from chv.nwd.kernel.rtnl import DEFAULT_ROUTE, open_rtnl
from chv.nwd.nft import host_rules
from chv.nwd.nft.ruleset import Applied
from chv.nwd.nft.text import Ruleset, digest
from chv.nwd.parts import Parts

NOTES = "host-rules.json"
ATTEMPTS_MAX = 3
FORWARD_ON = "1"
_ELEMENTS = re.compile(r"elements = \{[^}]*\}")


class _Notes(msgspec.Struct, frozen=True):
    """What stood when we last looked: our table's own listing, by its digest."""

    applied: Applied
    listing: str


@dataclass(frozen=True, slots=True)
class HostView:
    """Addresses and routes of the host's namespace."""

    addresses: tuple[str, ...]
    routes: tuple[str, ...]


class Host:
    """The host's side of every network."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._lock = anyio.Lock()
        self.warnings: list[str] = []

    def uplinks(self) -> list[tuple[str, str]]:
        """Return (host's end, address of the network's end) of every network that is due."""
        parts = self._parts
        return sorted(
            (
                parts.layout.uplink(row.network_id),
                uplink_addresses(parts.settings.uplink_pool, row.uplink_slot)[1],
            )
            for row in parts.records.networks.values()
            if row.uplink_slot is not None and parts.is_due(row) and has_uplink(row)
        )

    async def converge(self) -> bool:
        """Make the table what the records say, gone without uplinks; True when it was changed."""
        async with self._lock:
            uplinks = self.uplinks()
            if uplinks:
                await self._forward()
            wanted = self._ruleset(uplinks)
            for _ in range(ATTEMPTS_MAX):
                if await self._is_right(wanted, present=bool(uplinks)):
                    return False
                if await self._load(wanted, present=bool(uplinks)):
                    return True
            raise Conflict("others keep changing the host's nft rules; tried again later")

    def _ruleset(self, uplinks: list[tuple[str, str]]) -> Ruleset:
        layout = self._parts.layout
        return host_rules.render(layout.host_table, f"chv:1:{layout.instance}:host", uplinks)

    async def _forward(self) -> None:
        await anyio.to_thread.run_sync(_switch_forwarding_on)

    async def _is_right(self, wanted: Ruleset, *, present: bool) -> bool:
        notes = self._notes()
        current = await anyio.to_thread.run_sync(_look)
        if notes is not None and notes.applied == Applied(*current, wanted.digest):
            return True
        if not present:
            return not await self._listing()
        if notes is None or notes.applied.digest != wanted.digest:
            return False
        if await self._listing_digest() != notes.listing:
            return False
        # Others changed rules of theirs; ours stand.
        self._note(_Notes(Applied(*current, wanted.digest), notes.listing))
        return True

    async def _load(self, wanted: Ruleset, *, present: bool) -> bool:
        if not present:
            await self._parts.nft.remove(netns.OWN, wanted)
            self._path().unlink(missing_ok=True)
            return True
        loaded = await self._parts.nft.load(netns.OWN, wanted, None)
        await failpoint("nwd.ensure.host_rules_loaded")
        if loaded is None:
            return False
        self._note(_Notes(loaded.applied, await self._listing_digest()))
        return True

    async def _listing(self) -> str:
        table = self._parts.layout.host_table
        return await self._parts.nft.list(netns.OWN, f"list table {host_rules.FAMILY} {table}")

    async def _listing_digest(self) -> str:
        """Tell two listings apart; the kernel gives the elements of a set in any order."""
        return digest(_ELEMENTS.sub(_sorted_elements, await self._listing()))

    def _path(self) -> Path:
        return runfiles.base(self._parts.layout) / NOTES

    def _notes(self) -> _Notes | None:
        text = runfiles.read(runfiles.base(self._parts.layout) / NOTES)
        try:
            return msgspec.json.decode(text, type=_Notes) if text else None
        except msgspec.MsgspecError:
            return None

    def _note(self, notes: _Notes) -> None:
        path = runfiles.base(self._parts.layout) / NOTES
        runfiles.replace(path, msgspec.json.encode(notes).decode(), 0)

    # --- looking
    async def view(self) -> HostView:
        """Return the host's addresses and routes, our own uplinks left out."""
        async with open_rtnl() as rtnl:
            addresses = await rtnl.addresses()
            routes = await rtnl.routes()
        texts = sorted(text for each in addresses.values() for text in each)
        return HostView(tuple(texts), tuple(sorted(set(routes) - {DEFAULT_ROUTE})))

    async def surroundings(self) -> Surroundings:
        """Return what a tenant's subnet may not overlap."""
        view, settings_ = await self.view(), self._parts.settings
        return Surroundings(
            uplink_pool=settings_.uplink_pool,
            reserved=settings_.reserved,
            host_addresses=view.addresses,
            host_routes=view.routes,
        )

    async def check(self) -> list[str]:
        """Return what keeps the host from forwarding for us."""
        found = []
        if self.uplinks():
            if await anyio.to_thread.run_sync(sysctl.read, settings.IP_FORWARD) != FORWARD_ON:
                found.append(
                    "HostForwardingOff: net.ipv4.ip_forward is 0 in the host's namespace and"
                    " could not be set; guests do not reach the outside"
                )
            found += await self._blocking_chains()
        self.warnings = found
        return found

    async def _blocking_chains(self) -> list[str]:
        """Return foreign forward chains that drop by default: an accept of ours cannot help."""
        text = await self._parts.nft.list_json(netns.OWN, "list chains")
        objects = msgspec.json.decode(text).get("nftables", []) if text else []
        chains = [item["chain"] for item in objects if "chain" in item]
        return [
            f"HostForwardBlocked: chain {chain['family']} {chain['table']} {chain['name']} drops"
            " forwarded traffic by default; allow our uplinks there"
            f" (links {self._parts.layout.uplink('')}*)"
            for chain in chains
            if chain.get("hook") == "forward"
            and chain.get("policy") == "drop"
            and chain["table"] != self._parts.layout.host_table
        ]


def _sorted_elements(match: re.Match[str]) -> str:
    return " ".join(sorted(match.group().replace(",", " ").split()))


def _look() -> tuple[int, int]:
    """Return which namespace is ours and the generation of its rules."""
    return netns.inode(netns.OWN), nft_generation.read()


def _switch_forwarding_on() -> None:
    if sysctl.read(settings.IP_FORWARD) == FORWARD_ON:
        return
    try:
        sysctl.write({settings.IP_FORWARD: FORWARD_ON})
    except ChvError:
        return  # told by `check`, which reads it back
