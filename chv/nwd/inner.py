"""Applies steps that need nothing but a thread in the network's namespace: what every NIC takes.

A trip into a namespace and back costs more than most of these steps, so a run of them takes one.
Blocking: call in the namespace (`netns.inside`). The caller holds the network's lock. Every step is
idempotent; errors are those of the parts, and none is kept back.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TypeAlias, assert_never, cast

from chv.common.errors import NotFound
from chv.common.failpoint import failpoint_sync
from chv.nwd import runfiles, steps
from chv.nwd.blueprint import Blueprint
from chv.nwd.kernel import link_changes, links, neighbours, netlink, sysctl, tap, tc
from chv.nwd.kernel.link_changes import Change
from chv.nwd.kernel.links import Link
from chv.nwd.loading import load_rules
from chv.nwd.parts import Parts
from chv.nwd.plan import BRIDGE, UPLINK
from chv.nwd.shaping import Shaping
from chv.nwd.steps import Place, WantedLink, step_name

_PlacedStep: TypeAlias = (
    steps.DeleteLink
    | steps.ChangeLink
    | steps.LinkUp
    | steps.AddAddress
    | steps.DeleteAddress
    | steps.SetSysctls
)
_LinkStep: TypeAlias = (
    steps.DeleteLink
    | steps.ChangeLink
    | steps.IsolatePort
    | steps.LinkUp
    | steps.AddAddress
    | steps.DeleteAddress
    | steps.SetDefaultRoute
)
_PlacelessStep: TypeAlias = (
    steps.MakeTap
    | steps.DropIdleTap
    | steps.SetShape
    | steps.ClearShape
    | steps.LoadRules
    | steps.IsolatePort
    | steps.AddProxy
    | steps.DeleteProxy
    | steps.WriteFiles
    | steps.TellDns
    | steps.MakeBridge
    | steps.SetDefaultRoute
)
InnerStep: TypeAlias = _PlacelessStep | _PlacedStep


def is_inner(step: steps.Step) -> bool:
    """Tell whether a step is one of these."""
    if isinstance(step, _PlacedStep):
        return step.place is Place.INNER
    return isinstance(step, _PlacelessStep)


class Inner:
    """Steps of one pass over one network. `found`: the links that the pass has met."""

    def __init__(
        self,
        parts: Parts,
        network_id: str,
        blueprint: Blueprint | None,
        found: dict[str, Link],
        verb: str,
    ) -> None:
        self._parts = parts
        self._network_id = network_id
        self._maybe_blueprint = blueprint
        self._found = found
        self._verb = verb

    @property
    def _blueprint(self) -> Blueprint:
        assert self._maybe_blueprint is not None, "a removal makes nothing"
        return self._maybe_blueprint

    def apply(self, each: Sequence[steps.Step], asker: socket.socket | None = None) -> None:
        """Apply steps in order, in the namespace of this thread and of `asker`."""
        with netlink.route(asker) as ask:
            for step in each:
                name = step_name(step)
                failpoint_sync(f"nwd.{self._verb}.before_{name}")
                self._apply(ask, cast(InnerStep, step))
                failpoint_sync(f"nwd.{self._verb}.after_{name}")

    def _apply(self, ask: socket.socket, step: InnerStep) -> None:
        match step:
            case steps.SetSysctls():
                sysctl.write(sysctl.differing(self._blueprint.sysctls))
            case steps.MakeBridge(link=link):
                link_changes.add_bridge(ask, link.name, link.mac, link.mtu)
            case steps.MakeTap(link=link):
                tap.make(link.name, link.owner_uid, is_multi_queue=link.queues > 1)
                self._found.pop(link.name, None)
            case steps.DropIdleTap(name=name):
                tap.drop_idle(name)
                self._found.pop(name, None)
            case steps.SetShape(name=name, shaping=wanted):
                tc.apply(name, wanted, self._shaped)
            case steps.ClearShape(name=name, ifb=ifb):
                tc.apply(name, Shaping(ifb=ifb), self._shaped)
            case steps.AddProxy(address=address):
                neighbours.add_proxy(ask, self._find(ask, BRIDGE).index, address)
            case steps.DeleteProxy(address=address):
                neighbours.delete_proxy(ask, self._find(ask, BRIDGE).index, address)
            case steps.WriteFiles() | steps.TellDns() | steps.LoadRules():
                self._apply_to_texts(step)
            case _:
                self._apply_to_link(ask, step)

    def _apply_to_texts(self, step: steps.WriteFiles | steps.TellDns | steps.LoadRules) -> None:
        match step:
            case steps.LoadRules():
                load_rules(self._parts, self._network_id, self._blueprint.rules, self._verb)
            case steps.WriteFiles():
                blueprint, layout = self._blueprint, self._parts.layout
                digest = blueprint.desired.files
                runfiles.write_files(layout, self._network_id, blueprint.files, digest)
            case steps.TellDns():
                self._tell()
            case _:
                assert_never(step)

    def _apply_to_link(self, ask: socket.socket, step: _LinkStep) -> None:
        match step:
            case steps.DeleteLink(name=name):
                self._found.pop(name, None)
                link = links.read_one(ask, name)
                if link is not None:
                    link_changes.delete(ask, link)
            case steps.ChangeLink(link=wanted):
                self._change(ask, wanted)
            case steps.IsolatePort(name=name, isolated=isolated):
                link_changes.isolate(ask, self._find(ask, name), isolated=isolated)
            case steps.LinkUp(name=name):
                link_changes.set_up(ask, self._find(ask, name))
            case steps.AddAddress(name=name, cidr=cidr):
                link_changes.add_address(ask, self._find(ask, name), cidr)
            case steps.DeleteAddress(name=name, cidr=cidr):
                link_changes.delete_address(ask, self._find(ask, name), cidr)
            case steps.SetDefaultRoute(gateway=gateway):
                link_changes.replace_default_route(ask, self._find(ask, UPLINK), gateway)
            case _:
                assert_never(step)

    def _find(self, ask: socket.socket, name: str) -> Link:
        """Return a link, as it was when this pass met it first."""
        link = self._found.get(name) or links.read_one(ask, name)
        if link is None:
            raise NotFound(f"link {name} has vanished meanwhile", resource=self._network_id)
        self._found[name] = link
        return link

    def _change(self, ask: socket.socket, wanted: WantedLink) -> None:
        link = self._find(ask, wanted.name)
        master = self._find(ask, wanted.master).index if wanted.master else 0
        change = Change(wanted.alias, wanted.mac, wanted.mtu, master)
        link_changes.change(ask, link, link_changes.difference(link, change))

    def _shaped(self, change: str) -> None:
        failpoint_sync(f"nwd.{self._verb}.shape_{change}")

    def _tell(self) -> None:
        self._parts.workers.tell(self._network_id)
        failpoint_sync(f"nwd.{self._verb}.dns_told")
        self.note_told()

    def note_told(self) -> None:
        """Remember what the running dnsmasq has been told."""
        process = self._parts.workers.process(self._network_id)
        assert process is not None
        runfiles.note_told(
            self._parts.layout,
            self._network_id,
            process.worker_id,
            self._blueprint.desired.files,
        )
