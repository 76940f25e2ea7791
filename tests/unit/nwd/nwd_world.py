"""A model of the world that the planner acts on: every step does what its name says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from chv.nwd import plan, steps
from chv.nwd.plan import (
    BRIDGE,
    IFB,
    LOOPBACK,
    UPLINK,
    DesiredNetwork,
    DnsState,
    NetnsState,
    ObservedNetwork,
    SeenLink,
)
from chv.nwd.shaping import SeenShape, Shaping
from chv.nwd.steps import Place, WantedLink

HOST_NAME = "cabc12312345678"
LONE_LOOPBACK = {LOOPBACK: SeenLink(kind="", up=False)}


def desired_network(taps: int, *, is_isolated: bool = True) -> DesiredNetwork:
    return DesiredNetwork(
        bridge=WantedLink(
            BRIDGE, "bridge", alias="b", mac="02:00:00:00:00:01", mtu=1450,
            addresses=frozenset({"10.0.0.1/24", "fd00:7::1/64", "fe80::1/64"}),
        ),
        uplink=WantedLink(
            UPLINK, "veth", alias="u", mtu=1450,
            addresses=frozenset({"169.254.64.1/31", "fd63::1/127"}),
        ),
        host_uplink=WantedLink(
            HOST_NAME, "veth", alias="h", mtu=1450,
            addresses=frozenset({"169.254.64.0/31", "fd63::/127"}),
        ),
        host_name=HOST_NAME,
        default_gateways=frozenset({"169.254.64.0", "fd63::"}),
        host_routes=frozenset({("198.51.100.9/32", "169.254.64.1"), ("fd00:7::/64", "fd63::1")}),
        taps=tuple(
            WantedLink(
                f"t{number:010x}", "tun", alias=f"n{number}", mtu=1450, master=BRIDGE,
                isolated=is_isolated, owner_uid=1000 + number,
                proxied=f"fd00:7::{number + 2:x}" if is_isolated else "",
            )
            for number in range(taps)
        ),
        rules="r1",
        files="f1",
        configuration="c1",
    )  # fmt: skip


class World:
    """What is there; `apply` changes it."""

    def __init__(self, observed: ObservedNetwork | None = None) -> None:
        self.observed = observed or ObservedNetwork()
        self._bridges = 0

    @classmethod
    def settled(cls, desired: DesiredNetwork) -> World:
        """A world in which everything is as desired."""
        world = cls()
        world.apply(plan.plan_network(desired, world.observed), desired)
        return world

    def apply(self, planned: Iterable[steps.Step], desired: DesiredNetwork) -> None:
        for step in planned:
            self._apply(step, desired)

    def _apply(self, step: steps.Step, desired: DesiredNetwork) -> None:
        match step:
            case steps.MakeNetns():
                self._set(netns=NetnsState.PRESENT, links=LONE_LOOPBACK, sysctls_right=False)
                self._set(rules="", default_gateways=frozenset(), bridge=0, proxies=frozenset())
            case steps.RemoveNetns():
                self._set(netns=NetnsState.ABSENT, links={}, host_uplink=None, bridge=0)
            case steps.SetSysctls(place=Place.HOST):
                assert self.observed.host_uplink is not None, "they are those of the link"
                self._set(host_sysctls_right=True)
            case steps.SetSysctls():
                self._set(sysctls_right=True)
            case steps.MakeBridge(link=link):
                self._bridges += 1
                seen = SeenLink(link.kind, mac=link.mac, mtu=link.mtu)
                self._put(Place.INNER, BRIDGE, seen)
                self._set(bridge=self._bridges, sysctls_right=False)
            case steps.MakeUplink(host=host, inner=inner):
                self._put(Place.HOST, host.name, SeenLink("veth", mtu=host.mtu, alias=host.alias))
                self._put(Place.INNER, inner.name, SeenLink("veth", mtu=inner.mtu))
                self._set(sysctls_right=False, host_sysctls_right=False)
            case steps.MakeTap(link=link):
                seen = self.observed.links.get(link.name) or SeenLink("tun", mtu=1500)
                seen = replace(seen, owner_uid=link.owner_uid, multi_queue=link.queues > 1)
                self._put(Place.INNER, link.name, seen)
            case steps.DropIdleTap(name=name):
                self._delete(Place.INNER, name)
            case steps.SetShape(name=name, shaping=wanted):
                self._shape(name, wanted)
            case steps.ClearShape(name=name, ifb=ifb):
                self._shape(name, Shaping(ifb=ifb))
            case steps.LoadRules():
                self._set(rules=desired.rules)
            case steps.WriteFiles():
                self._set(files=desired.files)
            case steps.StopDns():
                self._set(dns=DnsState.NONE)
            case steps.StartDns():
                assert self.observed.dns not in (
                    DnsState.ALIVE,
                    DnsState.MISPLACED,
                    DnsState.UNKNOWN,
                )
                self._set(dns=DnsState.ALIVE, dns_configuration=desired.configuration)
                self._set(dns_bridge=self.observed.bridge, told=desired.files)
            case steps.TellDns():
                assert self.observed.dns is DnsState.ALIVE
                self._set(told=self.observed.files)
            case steps.RemoveFiles():
                self._set(files="", told="")
            case _:
                self._apply_to_link(step)

    def _apply_to_link(self, step: steps.Step) -> None:
        match step:
            case steps.DeleteLink(place=place, name=name):
                self._delete(place, name)
            case steps.ChangeLink(place=place, link=wanted):
                seen = self._link(place, wanted.name)
                if wanted.master:
                    assert BRIDGE in self.observed.links, "a port needs its bridge"
                master = wanted.master or seen.master
                isolated = seen.isolated and master == seen.master
                changes = {"alias": wanted.alias, "mac": wanted.mac, "mtu": wanted.mtu}
                kept = {name: value for name, value in changes.items() if value}
                seen = replace(seen, master=master, isolated=isolated, **kept)  # type: ignore[arg-type]
                self._put(place, wanted.name, seen)
            case steps.IsolatePort(name=name, isolated=isolated):
                seen = self._link(Place.INNER, name)
                assert seen.master == BRIDGE, "only a port can be isolated"
                self._put(Place.INNER, name, replace(seen, isolated=isolated))
            case steps.LinkUp(place=place, name=name):
                if name not in (LOOPBACK,):
                    assert self.observed.rules, "nothing comes up before the rules"
                self._put(place, name, replace(self._link(place, name), up=True))
            case steps.AddAddress(place=Place.INNER, name=name, cidr=cidr) if ":" in cidr:
                assert self.observed.sysctls_right, "IPv6 is off until it is switched on"
                self._add(Place.INNER, name, cidr)
            case steps.AddAddress(place=place, name=name, cidr=cidr):
                self._add(place, name, cidr)
            case steps.DeleteAddress(place=place, name=name, cidr=cidr):
                seen = self._link(place, name)
                self._put(place, name, replace(seen, addresses=seen.addresses - {cidr}))
            case _:
                self._apply_to_paths(step)

    def _apply_to_paths(self, step: steps.Step) -> None:
        observed = self.observed
        match step:
            case steps.SetDefaultRoute(gateway=gateway):
                assert self._link(Place.INNER, UPLINK).up, "a route needs a link that is up"
                kept = {
                    old for old in observed.default_gateways if (":" in old) != (":" in gateway)
                }
                self._set(default_gateways=frozenset(kept | {gateway}))
            case steps.AddRoute(target=target, gateway=gateway):
                assert self._link(Place.HOST, HOST_NAME).up, "a route needs a link that is up"
                targets = {old for old, _ in observed.host_routes}
                assert target not in targets, "the kernel refuses a second one"
                self._set(host_routes=observed.host_routes | {(target, gateway)})
            case steps.DeleteRoute(target=target, gateway=gateway):
                self._set(host_routes=observed.host_routes - {(target, gateway)})
            case steps.AddProxy(address=address):
                assert self._link(Place.INNER, BRIDGE).up, "they go when it comes up"
                self._set(proxies=observed.proxies | {address})
            case steps.DeleteProxy(address=address):
                self._set(proxies=observed.proxies - {address})
            case _:
                raise AssertionError(f"{step} is not modelled")

    def _add(self, place: Place, name: str, cidr: str) -> None:
        seen = self._link(place, name)
        self._put(place, name, replace(seen, addresses=seen.addresses | {cidr}))

    def _shape(self, tap: str, wanted: Shaping) -> None:
        self._link(Place.INNER, tap)
        links = {name: link for name, link in self.observed.links.items() if name != wanted.ifb}
        shape = SeenShape(ingress=wanted.ingress)
        if wanted.egress is not None:
            links[wanted.ifb] = SeenLink(IFB, alias=wanted.alias, up=True)
            shape = SeenShape(wanted.ingress, wanted.egress, wanted.ifb, wanted.alias, ifb_up=True)
        self._set(links=links, shapes=dict(self.observed.shapes) | {tap: shape})

    def _delete(self, place: Place, name: str) -> None:
        """Both ends of a pair go together; ports of a bridge stay without it."""
        links = {other: link for other, link in self.observed.links.items() if other != name}
        self._set(shapes={tap: s for tap, s in self.observed.shapes.items() if tap != name})
        if name == BRIDGE:
            links = {
                other: replace(link, master="", isolated=False) for other, link in links.items()
            }
            self._set(bridge=0, proxies=frozenset())
        if place is Place.HOST or name == UPLINK:
            links.pop(UPLINK, None)
            self._set(host_uplink=None, default_gateways=frozenset(), host_routes=frozenset())
        self._set(links=links)

    def _link(self, place: Place, name: str) -> SeenLink:
        found = self.observed.host_uplink if place is Place.HOST else self.observed.links.get(name)
        assert found is not None, f"no link {name}"
        return found

    def _put(self, place: Place, name: str, seen: SeenLink) -> None:
        if place is Place.HOST:
            self._set(host_uplink=seen)
        else:
            assert self.observed.netns is NetnsState.PRESENT
            self._set(links=dict(self.observed.links) | {name: seen})

    def _set(self, **changes: object) -> None:
        self.observed = replace(self.observed, **changes)  # type: ignore[arg-type]
