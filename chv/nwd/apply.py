"""Applies a plan to a network. Every step is idempotent and may be cut short anywhere.

What a thread in the namespace can do is in `inner`; here is the rest. The caller holds the
network's lock. Errors are those of the parts; none is kept back.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any, assert_never

import anyio.to_thread

from chv.common.errors import NotFound, OwnershipConflict
from chv.common.failpoint import failpoint
from chv.nwd import runfiles, steps
from chv.nwd.blueprint import Blueprint, alias_prefix
from chv.nwd.inner import Inner, is_inner
from chv.nwd.kernel import netns, sysctl
from chv.nwd.kernel.links import Link
from chv.nwd.kernel.rtnl import Rtnl
from chv.nwd.observe import Sockets
from chv.nwd.parts import Parts
from chv.nwd.plan import BRIDGE, UPLINK
from chv.nwd.records import Worker
from chv.nwd.steps import Place, WantedLink, step_name


class Work:
    """One pass over one network. `blueprint` is None where the network is to go."""

    def __init__(
        self,
        parts: Parts,
        network_id: str,
        blueprint: Blueprint | None,
        sockets: Sockets,
        verb: str,
    ) -> None:
        self._parts = parts
        self._network_id = network_id
        self._name = parts.layout.netns(network_id)
        self._path = parts.netns_path(network_id)
        self._maybe_blueprint = blueprint
        self._sockets = sockets
        self._verb = verb
        self._inner = Inner(parts, network_id, blueprint, sockets.links, verb)

    @property
    def _blueprint(self) -> Blueprint:
        assert self._maybe_blueprint is not None, "a removal makes nothing"
        return self._maybe_blueprint

    async def apply(self, plan: Sequence[steps.Step]) -> None:
        """Apply steps in order; those in a row that need the namespace's thread in one trip."""
        for inside, each in groupby(plan, is_inner):
            if inside:
                run = list(each)
                await netns.inside(self._path, partial(self._inner.apply, run))
                if any(isinstance(step, steps.SetDefaultRoute) for step in run):
                    await self._notice_carrier()
                continue
            for step in each:
                await self._apply_one(step)

    async def _apply_one(self, step: steps.Step) -> None:
        name = step_name(step)
        await failpoint(f"nwd.{self._verb}.before_{name}")
        await self._apply(step)
        await failpoint(f"nwd.{self._verb}.after_{name}")

    async def _apply(self, step: steps.Step) -> None:
        match step:
            case steps.MakeNetns():
                self._forget_rules()
                await anyio.to_thread.run_sync(netns.create, self._name)
            case steps.SetSysctls():
                wanted = self._blueprint.host_sysctls
                await anyio.to_thread.run_sync(lambda: sysctl.write(sysctl.differing(wanted)))
            case steps.MakeUplink(host=host, inner=inner):
                await self._make_uplink(host, inner)
            case (
                steps.DeleteLink()
                | steps.ChangeLink()
                | steps.LinkUp()
                | steps.AddAddress()
                | steps.DeleteAddress()
            ):
                await self._apply_to_link(step)
            case steps.AddRoute() | steps.DeleteRoute():
                await self._apply_to_paths(step)
            case steps.StopDns():
                await self._parts.workers.stop(self._network_id)
            case steps.StartDns():
                await self._start_dns()
                await anyio.to_thread.run_sync(self._inner.note_told)
            case steps.RemoveNetns():
                self._forget_rules()
                await anyio.to_thread.run_sync(netns.remove, self._name)
            case steps.RemoveFiles():
                directory = self._parts.layout.network_run(self._network_id)
                await anyio.to_thread.run_sync(runfiles.remove, directory)
            case _:
                raise TypeError(f"{step_name(step)} is for the namespace's thread")

    # --- links
    async def _apply_to_link(
        self,
        step: steps.DeleteLink
        | steps.ChangeLink
        | steps.LinkUp
        | steps.AddAddress
        | steps.DeleteAddress,
    ) -> None:
        match step:
            case steps.DeleteLink(place=place, name=name):
                await self._delete(place, name)
            case steps.ChangeLink(place=place, link=wanted):
                await self._change(place, wanted)
            case steps.LinkUp(place=place, name=name):
                rtnl, link = await self._find(place, name)
                await rtnl.change(link, up=True)
                if place is Place.HOST:
                    await self._notice_carrier()
            case steps.AddAddress(place=place, name=name, cidr=cidr):
                rtnl, link = await self._find(place, name)
                await rtnl.add_address(link, cidr)
            case steps.DeleteAddress(place=place, name=name, cidr=cidr):
                rtnl, link = await self._find(place, name)
                await rtnl.delete_address(link, cidr)
            case _:
                assert_never(step)

    async def _apply_to_paths(self, step: steps.AddRoute | steps.DeleteRoute) -> None:
        match step:
            case steps.AddRoute(name=name, target=target, gateway=gateway):
                rtnl, link = await self._find(Place.HOST, name)
                await rtnl.add_route(link, target, gateway)
            case steps.DeleteRoute(name=name, target=target, gateway=gateway):
                rtnl, link = await self._find(Place.HOST, name)
                await rtnl.delete_route(link, target, gateway)
            case _:
                assert_never(step)

    async def _rtnl(self, place: Place) -> Rtnl:
        if place is Place.HOST:
            return await self._sockets.host()
        return await self._sockets.inner()

    async def _find(self, place: Place, name: str) -> tuple[Rtnl, Link]:
        """Return a link, as it was when this pass met it first."""
        rtnl = await self._rtnl(place)
        known = self._sockets.links.get(name) if place is Place.INNER else None
        link = known if known is not None else await rtnl.link(name)
        if link is None:
            raise NotFound(f"link {name} has vanished meanwhile", resource=self._network_id)
        if place is Place.INNER:
            self._sockets.links[name] = link
        return rtnl, link

    async def _notice_carrier(self) -> None:
        """Let both ends of the uplink know that the other is up.

        The kernel tells IPv6 of it up to a second later; asking for a link makes it do so now.
        """
        for rtnl, name in (
            (await self._sockets.inner(), UPLINK),
            (await self._sockets.host(), self._parts.layout.uplink(self._network_id)),
        ):
            await rtnl.link(name)

    async def _delete(self, place: Place, name: str) -> None:
        rtnl = await self._rtnl(place)
        link = await rtnl.link(name)
        if place is Place.INNER:
            self._sockets.links.pop(name, None)
        if link is None:
            return
        if place is Place.HOST:
            self._check_ours(link)
        await rtnl.delete(link)

    def _check_ours(self, link: Link) -> None:
        """In the host's namespace others live too; a veth without alias is a cut-short one."""
        prefix = f"{alias_prefix(self._parts.layout)}{self._network_id}:"
        if link.alias and not link.alias.startswith(prefix):
            raise OwnershipConflict(
                f"link {link.name} in the host's namespace belongs to {link.alias!r}",
                resource=self._network_id,
                hint="rename or remove that link",
            )

    async def _change(self, place: Place, wanted: WantedLink) -> None:
        rtnl, link = await self._find(place, wanted.name)
        changes: dict[str, Any] = {
            name: value
            for name, value in (
                ("alias", wanted.alias),
                ("mac", wanted.mac),
                ("mtu", wanted.mtu),
            )
            if value and value != getattr(link, name)
        }
        if wanted.master:
            _, bridge = await self._find(place, wanted.master)
            if link.master != bridge.index:
                changes["master"] = bridge.index
        if changes:
            await rtnl.change(link, **changes)

    async def _make_uplink(self, host: WantedLink, inner: WantedLink) -> None:
        rtnl = await self._sockets.host()
        self._sockets.links.pop(inner.name, None)
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            await rtnl.add_veth(host.name, host.mtu, (host.alias, inner.name, fd))
        finally:
            os.close(fd)

    # --- rules and names
    def _forget_rules(self) -> None:
        """The namespace goes or is new: what we know of its rules is void."""
        self._parts.nft.forget(self._path)
        self._parts.loaded.pop(self._network_id, None)
        directory = self._parts.layout.network_run(self._network_id)
        (directory / runfiles.RULES).unlink(missing_ok=True)

    async def _start_dns(self) -> None:
        _, bridge = await self._find(Place.INNER, BRIDGE)
        worker = Worker(
            network_id=self._network_id,
            worker_id="",
            conf_digest=self._blueprint.desired.configuration,
            bridge_index=bridge.index,
        )
        await self._parts.workers.start(worker, self._blueprint.configuration, self._verb)
