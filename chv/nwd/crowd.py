"""The NICs of one network in a blueprint: taps, lines for dnsmasq, what the rules need. Pure.

A change of one NIC among a thousand renders that one: the rest is as it was, and only put together
anew. What comes out is the same as if all had been rendered at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from chv.common.layout import Layout
from chv.common.wire.nwd import L2Mode
from chv.nwd.dnsmasq import DnsNetwork, DnsNic, Texts
from chv.nwd.kept import Followed
from chv.nwd.nft.model import NicRules
from chv.nwd.plan import BRIDGE, TAP
from chv.nwd.policy import nic_rules
from chv.nwd.records import Network, Nic
from chv.nwd.shaping import shaping
from chv.nwd.steps import WantedLink


class Crowd:
    """Follows the NICs of a network that stays the same."""

    def __init__(
        self, layout: Layout, network: Network, dns: DnsNetwork, connections_max: int = 0
    ) -> None:
        self._layout = layout
        self._connections_max = connections_max  # of who says nothing
        self._network = network
        self._followed: Followed[Nic] = Followed()
        self._taps: dict[int, WantedLink] = {}
        self._rules: dict[int, NicRules] = {}
        self._texts = Texts(dns)

    def follow(self, nics: Sequence[Nic]) -> None:
        """Take in who is there now."""
        before = self._followed.sources
        went, came = self._followed.follow(nics)
        for key in went:
            if self._taps.pop(key, None) is not None:  # else it was refused when it came
                del self._rules[key]
                self._texts.drop(before[key].address)
        for key in self._followed.sources if len(self._taps) + len(came) < len(nics) else came:
            if key not in self._taps:
                self._add(key, self._followed.sources[key])
        if went:  # what is equal may have come in another place
            self._taps = {key: self._taps[key] for key in self._followed.sources}

    def _add(self, key: int, nic: Nic) -> None:
        self._texts.put(DnsNic(nic.mac, nic.address, nic.hostname, nic.address6))
        self._rules[key] = nic_rules(self._layout, nic, self._connections_max)
        self._taps[key] = _tap(self._layout, self._network, nic)

    def taps(self) -> tuple[WantedLink, ...]:
        """Return their taps."""
        return tuple(self._taps.values())

    def rules(self) -> list[NicRules]:
        """Return what the rules need to know of them."""
        return list(self._rules.values())

    def files(self) -> dict[str, str]:
        """Return what dnsmasq reads."""
        return self._texts.files()


def alias(layout: Layout, network_id: str, part: str) -> str:
    """Return what a link of ours carries as its identity."""
    return f"chv:1:{layout.instance}:{network_id}:{part}"


def _tap(layout: Layout, network: Network, nic: Nic) -> WantedLink:
    is_isolated = network.topology.l2 is L2Mode.ISOLATED
    return WantedLink(
        name=layout.tap(nic.nic_id),
        kind=TAP,
        alias=alias(layout, network.network_id, f"nic:{nic.nic_id}"),
        mtu=network.topology.mtu,
        master=BRIDGE,
        isolated=is_isolated,
        owner_uid=nic.owner_uid,
        proxied=nic.address6 if is_isolated and network.topology.subnet6 else "",
        queues=nic.queues,
        shaping=shaping(
            nic.shape,
            layout.ifb(nic.nic_id),
            alias(layout, network.network_id, f"ifb:{nic.nic_id}"),
        ),
    )
