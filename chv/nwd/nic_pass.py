"""One NIC of a network that is otherwise right: observed, planned and applied in one trip.

An attach waits for one thread in the namespace and for nothing else. The caller holds the network's
lock and knows that its dnsmasq lives. None comes back where the whole network must be looked at.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from chv.nwd import runfiles
from chv.nwd.blueprint import Blueprint
from chv.nwd.inner import Inner, is_inner
from chv.nwd.kernel import links, neighbours, netlink, netns, nft_generation, tc
from chv.nwd.kernel.errors import translated
from chv.nwd.kernel.links import Link
from chv.nwd.observe import seen, standing_rules
from chv.nwd.parts import Parts
from chv.nwd.plan import BRIDGE, DnsState, NetnsState, ObservedNetwork, plan_nic
from chv.nwd.records import Nic
from chv.nwd.steps import Step


@dataclass(frozen=True, slots=True)
class NicPass:
    """What is needed for it. `blueprint` is the network's."""

    parts: Parts
    nic: Nic
    blueprint: Blueprint
    verb: str

    def run(self) -> list[Step] | None:
        """Return the steps that were taken. Blocks."""
        path = self.parts.netns_path(self.nic.network_id)
        with translated("looking at a NIC"):
            name = self.parts.layout.netns(self.nic.network_id)
            if netns.presence(name) is not netns.Presence.PRESENT:
                return None
            inode = netns.inode(path)
        return netns.visit(path, lambda: self._inside(inode))

    def _inside(self, inode: int) -> list[Step] | None:
        with netlink.open_socket(netlink.ROUTE) as ask:
            found = links.read((BRIDGE, self._tap, self.parts.layout.ifb_of(self._tap)), ask)
            bridge = found.get(BRIDGE)
            if bridge is None or not bridge.up:
                return None
            observed = self._observed(ask, found, inode)
            steps = plan_nic(self.blueprint.desired, observed, self._tap)
            if not all(is_inner(step) for step in steps):
                return None
            work = Inner(self.parts, self.nic.network_id, self.blueprint, found, self.verb)
            work.apply(steps, ask)
        return steps

    @property
    def _tap(self) -> str:
        return self.parts.layout.tap(self.nic.nic_id)

    def _observed(self, ask: socket.socket, found: dict[str, Link], inode: int) -> ObservedNetwork:
        parts, network_id, bridge = self.parts, self.nic.network_id, found[BRIDGE]
        directory = parts.layout.network_run(network_id)
        process = parts.workers.process(network_id)
        guests = [self.nic.address6] if self.nic.address6 else []
        shaped = {self._tap: parts.layout.ifb_of(self._tap)} if self._tap in found else {}
        return ObservedNetwork(
            netns=NetnsState.PRESENT,
            links=seen(found, {}),
            shapes=tc.read(found, shaped, ask) if shaped else {},
            proxies=neighbours.proxied(ask, bridge.index, guests) if guests else frozenset(),
            rules=standing_rules(parts, network_id, (inode, nft_generation.read())),
            files=runfiles.files_digest_again(directory),
            told=runfiles.told(directory, process.worker_id) if process is not None else "",
            dns=DnsState.ALIVE,
            dns_configuration=parts.workers.configuration(network_id),
            dns_bridge=parts.workers.bridge(network_id),
            bridge=bridge.index,
        )
