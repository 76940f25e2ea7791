"""Applies a plan to a network. Every step is idempotent and may be cut short anywhere.

What a thread in the namespace can do is in `inner`, what one outside of it in `outer`; here is the
rest. The caller holds the network's lock. Errors are those of the parts; none is kept back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby

import anyio.to_thread

from chv.common.errors import NotFound
from chv.common.failpoint import failpoint
from chv.nwd import runfiles, steps
from chv.nwd.blueprint import Blueprint
from chv.nwd.inner import Inner, is_inner
from chv.nwd.kernel import links, netns, sysctl
from chv.nwd.kernel.links import Link
from chv.nwd.outer import Outer, OuterStep
from chv.nwd.parts import Parts
from chv.nwd.plan import BRIDGE, UPLINK
from chv.nwd.records import Worker
from chv.nwd.steps import step_name


class Work:
    """One pass over one network. `blueprint` is None where the network is to go.

    `found`: the links of its namespace that the pass has met.
    """

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
        self._name = parts.layout.netns(network_id)
        self._path = parts.netns_path(network_id)
        self._maybe_blueprint = blueprint
        self._found = found
        self._verb = verb
        self._inner = Inner(parts, network_id, blueprint, found, verb)
        self._outer = Outer(parts, network_id)

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
            case (
                steps.MakeUplink()
                | steps.DeleteLink()
                | steps.ChangeLink()
                | steps.LinkUp()
                | steps.AddAddress()
                | steps.DeleteAddress()
                | steps.AddRoute()
                | steps.DeleteRoute()
            ):
                await self._apply_outside(step)
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

    # --- links of the host's side
    async def _apply_outside(self, step: OuterStep) -> None:
        if isinstance(step, steps.MakeUplink):
            self._found.pop(step.inner.name, None)
        await anyio.to_thread.run_sync(self._outer.apply, step)
        if isinstance(step, steps.LinkUp):
            await self._notice_carrier()

    async def _notice_carrier(self) -> None:
        """Let both ends of the uplink know that the other is up.

        The kernel tells IPv6 of it up to a second later; asking for a link makes it do so now.
        """
        await netns.inside(self._path, lambda: links.read([UPLINK]))
        name = self._parts.layout.uplink(self._network_id)
        await anyio.to_thread.run_sync(links.read, [name])

    # --- rules and names
    def _forget_rules(self) -> None:
        """The namespace goes or is new: what we know of its rules is void."""
        self._parts.nft.forget(self._path)
        self._parts.loaded.pop(self._network_id, None)
        directory = self._parts.layout.network_run(self._network_id)
        (directory / runfiles.RULES).unlink(missing_ok=True)

    async def _start_dns(self) -> None:
        found = await netns.inside(self._path, lambda: links.read([BRIDGE]))
        bridge = found.get(BRIDGE)
        if bridge is None:
            raise NotFound("the bridge has vanished meanwhile", resource=self._network_id)
        worker = Worker(
            network_id=self._network_id,
            worker_id="",
            conf_digest=self._blueprint.desired.configuration,
            bridge_index=bridge.index,
        )
        await self._parts.workers.start(worker, self._blueprint.configuration, self._verb)
