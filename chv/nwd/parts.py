"""What nwd works with: made once at start and handed to everything that touches the world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio

from chv.common.layout import Layout
from chv.common.process import Provider
from chv.common.wire.types import Feature
from chv.nwd.blueprint import Blueprint, Settings, draw, network_rules, uplink_addresses
from chv.nwd.kept import Kept
from chv.nwd.kernel import netns
from chv.nwd.nft.model import NetworkRules
from chv.nwd.nft.ruleset import Loaded, Nft
from chv.nwd.policy import Policy, policy_of
from chv.nwd.records import Network, Nic, Records, Wanted
from chv.nwd.workers import Workers

_UPLINKS: Kept[tuple[str, ...]] = Kept()
_DUE: Kept[tuple[Nic, ...]] = Kept()
_BLUEPRINTS: Kept[Blueprint] = Kept()


@dataclass
class Parts:
    """The world and the records. `loaded` remembers rules, only to change them in small steps.

    `registry`: held, for no longer than a record takes, where a check spans several objects.
    """

    layout: Layout
    settings: Settings
    records: Records
    provider: Provider
    workers: Workers
    nft: Nft
    boot_id: str
    loaded: dict[str, Loaded] = field(default_factory=dict)
    registry: anyio.Lock = field(default_factory=anyio.Lock)
    features: list[Feature] = field(default_factory=list)  # what the kernel can, once probed

    def netns_path(self, network_id: str) -> str:
        """Return the path of a network's namespace."""
        return netns.path_of(self.layout.netns(network_id))

    def is_due(self, row: Network | Nic) -> bool:
        """Tell whether an object should exist now: wanted, and asked for since the last boot."""
        return row.wanted is Wanted.PRESENT and row.boot_id == self.boot_id

    def nics_due(self, network_id: str) -> tuple[Nic, ...]:
        """Return the NICs that a network should have now: the same tuple until one changes."""
        members = self.records.members(network_id)
        if members.kinds == {(Wanted.PRESENT, self.boot_id)}:  # nearly always
            return members.all
        return _DUE.get(network_id, (members.all, self.boot_id), _due)

    def nic_due(self, nic_id: str) -> Nic | None:
        """Return a NIC that should exist now."""
        nic = self.records.nics.get(nic_id)
        return nic if nic is not None and self.is_due(nic) else None

    def blueprint(self, network: Network) -> Blueprint:
        """Return what a network should be now: the same until a record of it changes."""
        network_id, records = network.network_id, self.records
        nics = self.nics_due(network_id)
        rows = (*records.groups.values(), *records.exposures_of(network_id))
        sources = (self.layout, self.settings, network, nics, rows)

        def drawn(*_: object) -> Blueprint:
            return draw(self.layout, self.settings, network, nics, self.policy(network, nics))

        return _BLUEPRINTS.get(network_id, sources, drawn)

    def network_rules(self, network: Network) -> NetworkRules:
        """Return what the rules of a network are made from now."""
        nics = self.nics_due(network.network_id)
        policy = self.policy(network, nics)
        return network_rules(self.layout, self.settings, network, nics, policy)

    def policy(self, network: Network, nics: Sequence[Nic]) -> Policy:
        """Return groups and exposures as they are in a network with these NICs."""
        return policy_of(self.records, network.network_id, nics, self.uplinks(network))

    def uplinks(self, network: Network) -> tuple[str, ...]:
        """Return the addresses of the network's end of the uplink."""
        return _UPLINKS.get(network.network_id, (self.settings, network), uplink_addresses)


def _due(nics: Sequence[Nic], boot_id: str) -> tuple[Nic, ...]:
    present = Wanted.PRESENT  # looked up once, and a list: there are a thousand
    return tuple([nic for nic in nics if nic.wanted is present and nic.boot_id == boot_id])
