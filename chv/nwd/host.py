"""The host's side: one nft table of ours, forwarding, and what of the host gets in our way.

"Host" is the namespace that nwd itself runs in, be it the machine's own or a sandbox. Nothing in
it is touched but our table, our links with the routes by them, and forwarding, which is switched
on while a network has an uplink and put back afterwards, unless others may rely on it by then.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from chv.common.errors import Conflict
from chv.common.failpoint import failpoint
from chv.nwd import forwarding, runfiles
from chv.nwd.blueprint import alias_prefix, has_uplink
from chv.nwd.kernel import link_addresses, netns, nft_generation, routes
from chv.nwd.kernel.routes import DEFAULT_ROUTE, DEFAULT_ROUTE6
from chv.nwd.nft import host_rules
from chv.nwd.nft.host_rules import HostExposure, HostUplink
from chv.nwd.nft.ruleset import Applied
from chv.nwd.nft.text import Ruleset, digest
from chv.nwd.parts import Parts
from chv.nwd.policy import HostExposed, host_exposed
from chv.nwd.records import Network
from chv.nwd.topology import Surroundings, routed

NOTES = "host-rules.json"
ATTEMPTS_MAX = 3
FAMILIES = (4, 6)
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
        self.addresses: frozenset[str] | None = None  # the node's own, when looked at last
        self._standing: dict[str, list[HostExposed]] | None = None  # when it was looked at last

    def uplinks(self) -> list[HostUplink]:
        """Return the uplinks of every network that is due."""
        parts = self._parts
        return [
            HostUplink(
                name=parts.layout.uplink(row.network_id),
                addresses=parts.uplinks(row),
                routed=tuple(str(target) for target in routed(row.topology)),
            )
            for row in self._due()
        ]

    def exposed(self) -> list[HostExposure]:
        """Return the ports of the node's own addresses that lead to a network."""
        return [
            HostExposure(each.protocol, each.address, (each.first, each.last), each.uplink)
            for row in self._due()
            for each in self._exposed_by(row)
        ]

    def _exposed_by(self, row: Network) -> list[HostExposed]:
        rows = self._parts.records.exposures_of(row.network_id)
        return host_exposed(rows, self._parts.uplinks(row))

    def has_exposed(self, row: Network) -> bool:
        """Tell whether the table leads to a network as its exposures say, unless others touch it.

        What a group allows, or which target is next, is no concern of the host.
        """
        standing = self._standing
        return standing is not None and standing.get(row.network_id, []) == self._exposed_by(row)

    def _due(self) -> list[Network]:
        """Return the networks that have an uplink now."""
        return [
            row
            for _, row in sorted(self._parts.records.networks.items())
            if row.uplink_slot is not None and self._parts.is_due(row) and has_uplink(row)
        ]

    async def converge(self) -> bool:
        """Make the table what the records say, gone without uplinks; True when it was changed."""
        async with self._lock:
            self._standing = None
            uplinks = self.uplinks()
            await self._forward(uplinks)
            exposed = {row.network_id: self._exposed_by(row) for row in self._due()}
            changed = await self._load_wanted(self._ruleset(uplinks), uplinks)
            self._standing = exposed
            return changed

    async def generation(self) -> int:
        """Return the generation of the host's rules at which ours were right, 0 without any."""
        async with self._lock:
            notes = self._notes()
            return notes.applied.generation if notes is not None else 0

    async def _load_wanted(self, wanted: Ruleset, uplinks: list[HostUplink]) -> bool:
        for _ in range(ATTEMPTS_MAX):
            if await self._is_right(wanted, present=bool(uplinks)):
                return False
            if await self._load(wanted, present=bool(uplinks)):
                return True
        raise Conflict("others keep changing the host's nft rules; tried again later")

    def _ruleset(self, uplinks: list[HostUplink]) -> Ruleset:
        layout = self._parts.layout
        identity = f"chv:1:{layout.instance}:host"
        return host_rules.render(layout.host_table, identity, uplinks, self.exposed())

    async def _forward(self, uplinks: list[HostUplink]) -> None:
        """Forward what the uplinks need; put back what nobody needs any more."""
        directory = runfiles.base(self._parts.layout)
        if uplinks:
            await anyio.to_thread.run_sync(runfiles.prepare_base, self._parts.layout)
        for version in FAMILIES:
            if _is_needed(uplinks, version):
                await anyio.to_thread.run_sync(forwarding.switch_on, directory, version)
            elif forwarding.is_noted(directory, version):
                await self._stop_forwarding(directory, version)

    async def _stop_forwarding(self, directory: Path, version: int) -> None:
        chains = await self._foreign_chains()
        own = alias_prefix(self._parts.layout)
        is_shared = await anyio.to_thread.run_sync(forwarding.is_shared, own)
        if is_shared or any(chain["hook"] == "forward" for chain in chains):
            forwarding.forget(directory, version)
        else:
            await anyio.to_thread.run_sync(forwarding.restore, directory, version)

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
        """Return the host's addresses and routes; those to networks of ours left out."""
        addresses = await anyio.to_thread.run_sync(link_addresses.read)
        texts = sorted(text for each in addresses.values() for text in each)
        found = await anyio.to_thread.run_sync(routes.read)
        ours = {
            str(target)
            for row in self._parts.records.networks.values()
            for target in routed(row.topology)
        }
        targets = {route.target for route in found} - ours - {DEFAULT_ROUTE, DEFAULT_ROUTE6}
        return HostView(
            tuple(text for text in texts if not _is_local(text)),
            tuple(sorted(text for text in targets if not _is_local(text))),
        )

    async def own_addresses(self) -> frozenset[str]:
        """Return the addresses of the host itself, without prefix lengths and our uplinks'."""
        pools = [ip_network(p) for p in _pools(self._parts)]
        texts = {text.partition("/")[0] for text in (await self.view()).addresses}
        return frozenset(
            text
            for text in texts
            if not ip_address(text).is_loopback
            and not any(ip_address(text) in pool for pool in pools)
        )

    async def look_at_addresses(self) -> bool:
        """Look which addresses the node has now; True where they are others than before."""
        before, self.addresses = self.addresses, await self.own_addresses()
        return before is not None and before != self.addresses

    async def surroundings(self) -> Surroundings:
        """Return what a tenant's subnet may not overlap."""
        view, settings_ = await self.view(), self._parts.settings
        return Surroundings(
            uplink_pool=settings_.uplink_pool,
            uplink_pool6=settings_.uplink_pool6,
            reserved=settings_.reserved,
            host_addresses=view.addresses,
            host_routes=view.routes,
        )

    async def check(self) -> list[str]:
        """Return what keeps the host from forwarding for us."""
        found: list[str] = []
        uplinks = self.uplinks()
        for version in FAMILIES:
            if _is_needed(uplinks, version):
                found += await anyio.to_thread.run_sync(_forwarding_problems, version)
        if uplinks:
            found += await self._blocking_chains()
        self.warnings = found
        return found

    async def _blocking_chains(self) -> list[str]:
        """Return foreign forward chains that drop by default: an accept of ours cannot help."""
        return [
            f"HostForwardBlocked: chain {chain['family']} {chain['table']} {chain['name']} drops"
            " forwarded traffic by default; allow our uplinks there"
            f" (links {self._parts.layout.uplink('')}*)"
            for chain in await self._foreign_chains()
            if chain["hook"] == "forward" and chain.get("policy") == "drop"
        ]

    async def _foreign_chains(self) -> list[dict[str, str]]:
        """Return the base chains of others."""
        text = await self._parts.nft.list_json(netns.OWN, "list chains")
        objects = msgspec.json.decode(text).get("nftables", []) if text else []
        chains = [item["chain"] for item in objects if "chain" in item]
        own = self._parts.layout.host_table
        return [chain for chain in chains if "hook" in chain and chain["table"] != own]


def _pools(parts: Parts) -> tuple[str, str]:
    return parts.settings.uplink_pool, parts.settings.uplink_pool6


def _is_needed(uplinks: list[HostUplink], version: int) -> bool:
    return any((":" in text) == (version == 6) for each in uplinks for text in each.addresses)


def _is_local(text: str) -> bool:
    """Tell whether an address or subnet is of one link alone, and so in nobody's way."""
    return text.startswith(("fe80:", "::1/", "ff00:"))


def _forwarding_problems(version: int) -> list[str]:
    """In a thread."""
    if forwarding.is_on(version):
        return []
    if version == 4:
        return [
            "HostForwardingOff: net.ipv4.ip_forward is 0 in the host's namespace and"
            " could not be set; guests do not reach the outside"
        ]
    links = forwarding.advertised()
    remedy = (
        f"; {', '.join(links)} would lose the routes that it has from router advertisements: set"
        " accept_ra of it to 2 first"
        if links
        else ""
    )
    return [
        "HostForwardingOff: net.ipv6.conf.all.forwarding is 0 in the host's namespace; guests do"
        f" not reach the outside by IPv6{remedy}"
    ]


def _sorted_elements(match: re.Match[str]) -> str:
    return " ".join(sorted(match.group().replace(",", " ").split()))


def _look() -> tuple[int, int]:
    """Return which namespace is ours and the generation of its rules."""
    return netns.inode(netns.OWN), nft_generation.read()
