"""Applies steps to the host's side of a network: the end of its uplink, and routes by it.

Others live there too: nothing is touched that does not carry our name. Blocking: call in a thread,
each of which is in the host's namespace. The caller holds the network's lock. Every step is
idempotent; errors are those of the parts, and none is kept back.
"""

from __future__ import annotations

import os
import socket
from typing import TypeAlias

from chv.common.errors import NotFound, OwnershipConflict
from chv.nwd import steps
from chv.nwd.blueprint import alias_prefix
from chv.nwd.kernel import link_changes, links, netlink
from chv.nwd.kernel.link_changes import Change
from chv.nwd.kernel.links import Link
from chv.nwd.parts import Parts
from chv.nwd.steps import WantedLink

OuterStep: TypeAlias = (
    steps.MakeUplink
    | steps.DeleteLink
    | steps.ChangeLink
    | steps.LinkUp
    | steps.AddAddress
    | steps.DeleteAddress
    | steps.AddRoute
    | steps.DeleteRoute
)


class Outer:
    """Steps of one pass over one network."""

    def __init__(self, parts: Parts, network_id: str) -> None:
        self._parts = parts
        self._network_id = network_id

    def apply(self, step: OuterStep) -> None:
        """Apply one step, in the namespace of this thread."""
        with netlink.route() as ask:
            match step:
                case steps.MakeUplink(host=host, inner=inner):
                    self._make_uplink(ask, host, inner)
                case steps.DeleteLink(name=name):
                    self._delete(ask, name)
                case steps.ChangeLink(link=wanted):
                    link = self._find(ask, wanted.name)
                    change = Change(wanted.alias, wanted.mac, wanted.mtu)
                    link_changes.change(ask, link, link_changes.difference(link, change))
                case steps.LinkUp(name=name):
                    link_changes.set_up(ask, self._find(ask, name))
                case steps.AddAddress(name=name, cidr=cidr):
                    link_changes.add_address(ask, self._find(ask, name), cidr)
                case steps.DeleteAddress(name=name, cidr=cidr):
                    link_changes.delete_address(ask, self._find(ask, name), cidr)
                case steps.AddRoute(name=name, target=target, gateway=gateway):
                    link_changes.add_route(ask, self._find(ask, name), target, gateway)
                case steps.DeleteRoute(name=name, target=target, gateway=gateway):
                    link_changes.delete_route(ask, self._find(ask, name), target, gateway)

    def _find(self, ask: socket.socket, name: str) -> Link:
        link = links.read_one(ask, name)
        if link is None:
            raise NotFound(f"link {name} has vanished meanwhile", resource=self._network_id)
        return link

    def _make_uplink(self, ask: socket.socket, host: WantedLink, inner: WantedLink) -> None:
        path = self._parts.netns_path(self._network_id)
        namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            link_changes.add_veth(ask, host.name, host.mtu, (inner.name, namespace))
        finally:
            os.close(namespace)

    def _delete(self, ask: socket.socket, name: str) -> None:
        link = links.read_one(ask, name)
        if link is not None:
            self._check_ours(link)
            link_changes.delete(ask, link)

    def _check_ours(self, link: Link) -> None:
        """A veth without alias is a cut-short one."""
        prefix = f"{alias_prefix(self._parts.layout)}{self._network_id}:"
        if link.alias and not link.alias.startswith(prefix):
            raise OwnershipConflict(
                f"link {link.name} in the host's namespace belongs to {link.alias!r}",
                resource=self._network_id,
                hint="rename or remove that link",
            )
