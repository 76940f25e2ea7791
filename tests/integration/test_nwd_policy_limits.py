"""Exposures in their corners, sources of what leaves, limits, and what is counted: by packets."""

from __future__ import annotations

import select
import socket
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from chv.common.wire.nwd import L2Mode
from chv.common.wire.nwd_policy import Direction, IpProtocol
from chv.nwd.kernel import nflog
from chv.nwd.nft import counters, log_prefix
from chv.nwd.nft.model import MASQUERADE, Backend, Exposed, Group, Rule
from tests.integration.nwd_policy_rig import (
    CLIENTS,
    CLIENTS6,
    DENIED_S,
    GATEWAY,
    GATEWAY6,
    IDS,
    PUBLIC,
    PUBLIC2,
    PUBLIC6,
    UP,
    UP6,
    Guest,
    Rig,
    held,
    inside,
    needs_namespaces,
    open_rig,
)

pytestmark = [pytest.mark.root, needs_namespaces]
ALL = ("0.0.0.0/0", "::/0")
IN, OUT_OF, TCP, UDP = Direction.INGRESS, Direction.EGRESS, IpProtocol.TCP, IpProtocol.UDP
GROUP, OTHER = IDS.uid(), IDS.uid()
ANYWHERE = Rule(OUT_OF, IpProtocol.ANY, cidrs=ALL)


def exposure(*guests: Guest, port: int = 80, target: int = 80) -> Exposed:
    backends = tuple(Backend(a, target) for guest in guests for a in guest.nic.addresses)
    return Exposed(IDS.uid(), TCP, (PUBLIC, PUBLIC6), (port, port), ALL, backends)


async def join(rig: Rig, *rules: Rule, members: int = 1) -> None:
    """Put the first guests into a group of these rules."""
    nics = tuple(
        replace(nic, groups=(GROUP,)) if number < members else nic
        for number, nic in enumerate(rig.network.nics)
    )
    await rig.apply(nics=nics, groups=(Group(GROUP, (ANYWHERE, *rules)),))


async def drops(rig: Rig, guest: Guest) -> dict[str, int]:
    listing = await rig.nft.list_counters(f"/run/netns/{rig.tenant}", counters.COMMANDS)
    return counters.drops_of(counters.drops(listing), guest.nic.tap, guest.nic.addresses)


# --- exposures
async def test_an_exposure_without_backends_refuses_at_once() -> None:
    async with open_rig(1) as rig:
        datagrams = replace(exposure(port=53), protocol=UDP)
        await rig.apply(exposures=(exposure(), datagrams))
        for public in (PUBLIC, PUBLIC6):
            for source in (None, rig.guests[0]):
                assert rig.ask(source, public, 80) == "refused"
                assert rig.ask(source, public, 53, udp=True) == "refused"


async def test_only_its_sources_may_use_an_exposure() -> None:
    async with open_rig(1) as rig:
        rig.servers.tcp(rig.guests[0].namespace, "guest", 80)
        sources = (f"{CLIENTS[0]}/32", f"{CLIENTS6[0]}/128")
        closed = replace(exposure(port=81), sources=("192.0.2.0/24",))
        await rig.apply(exposures=(replace(exposure(*rig.guests), sources=sources), closed))
        for public, clients in ((PUBLIC, CLIENTS), (PUBLIC6, CLIENTS6)):
            assert rig.ask(None, public, 80, bound=clients[0]) == f"guest {clients[0]}"
            assert rig.ask(None, public, 80, bound=clients[1], timeout_s=DENIED_S) == ""
            assert rig.ask(None, public, 81, timeout_s=DENIED_S) == "", "not even a refusal"


async def test_a_range_keeps_its_ports_and_ends_where_it_ends() -> None:
    async with open_rig(1) as rig:
        guest = rig.guests[0]
        for port in (8000, 8005, 8006):
            rig.servers.tcp(guest.namespace, str(port), port)
        ranged = replace(exposure(guest, target=0), ports=(8000, 8005))
        await rig.apply(exposures=(ranged,))
        for public in (PUBLIC, PUBLIC6):
            assert rig.ask(None, public, 8000).startswith("8000 ")
            assert rig.ask(None, public, 8005).startswith("8005 ")
            assert rig.ask(None, public, 8006, timeout_s=DENIED_S) == ""
        await rig.apply(exposures=(replace(ranged, ports=(8000, 8006)),))
        assert rig.ask(None, PUBLIC, 8006).startswith("8006 ")


async def test_an_address_of_the_subnet_is_an_exposure_for_the_guests() -> None:
    async with open_rig(3) as rig:
        rig.servers.tcp(rig.guests[1].namespace, "guest", 80)
        inner = replace(exposure(rig.guests[1]), addresses=("10.7.0.200",))
        await rig.apply(exposures=(inner,))
        first = rig.guests[0]
        assert rig.ask(first, "10.7.0.200", 80) == f"guest {first.address}"


@pytest.mark.parametrize("l2", list(L2Mode))
async def test_guests_meet_one_another_and_themselves_by_public_addresses(l2: L2Mode) -> None:
    async with open_rig(2, l2) as rig:
        me, other = rig.guests
        rig.servers.tcp(other.namespace, "other", 80)
        await rig.apply(exposures=(exposure(other),))
        for public, family, gateway in ((PUBLIC, 4, GATEWAY), (PUBLIC6, 6, GATEWAY6)):
            # Bridged, the answer would go past the gateway; isolated, it cannot.
            seen = gateway if l2 is L2Mode.OPEN else me.at(family)
            assert rig.ask(me, public, 80) == f"other {seen}"
            assert rig.ask(other, public, 80) == f"other {gateway}"


async def test_a_withdrawn_backend_gets_no_new_connections() -> None:
    async with open_rig(2) as rig:
        for guest in rig.guests:
            rig.servers.tcp(guest.namespace, guest.nic.tap, 80)
        both = exposure(*rig.guests)
        await rig.apply(exposures=(both,))
        assert len({rig.ask(None, PUBLIC, 80) for _ in range(4)}) == 2
        await rig.apply(exposures=(replace(both, backends=both.backends[:2]),))
        answers = {rig.ask(None, PUBLIC, 80).split()[0] for _ in range(6)}
        assert answers == {rig.guests[0].nic.tap}


async def test_the_gateway_reaches_declared_and_checked_ports_alone() -> None:
    async with open_rig(2) as rig:
        first, second = rig.guests
        for guest in rig.guests:
            for port in (22, 80):
                rig.servers.tcp(guest.namespace, "guest", port)
        gateway = Guest(rig.tenant, first.nic)
        asked = replace(exposure(), checks=tuple(Backend(a, 80) for a in second.nic.addresses))
        await rig.apply(exposures=(asked,))
        await rig.change_nic(0, guest_ports=(22,))
        for family in (4, 6):
            options = {"timeout_s": DENIED_S}
            assert rig.ask(gateway, first.at(family), 22).startswith("guest ")
            assert rig.ask(gateway, second.at(family), 80).startswith("guest ")
            assert not rig.ask(gateway, first.at(family), 80, **options).startswith("guest")
            assert not rig.ask(gateway, second.at(family), 22, **options).startswith("guest")


# --- sources
async def test_what_leaves_carries_the_source_that_was_chosen() -> None:
    async with open_rig(2) as rig:
        rig.servers.tcp(rig.outside, "outside", 80)
        me, other = rig.guests

        def seen(guest: Guest) -> tuple[str, str]:
            answers = [rig.ask(guest, to, 80) for to in (CLIENTS[0], CLIENTS6[0])]
            return answers[0].removeprefix("outside "), answers[1].removeprefix("outside ")

        assert seen(me) == (UP, UP6)
        await rig.apply(source=PUBLIC, source6=PUBLIC6)
        assert seen(me) == (PUBLIC, PUBLIC6)
        await rig.change_nic(0, public=PUBLIC2)
        assert seen(me) == (PUBLIC2, PUBLIC6)
        assert seen(other) == (PUBLIC, PUBLIC6)
        await rig.apply(source="", source6="")
        assert seen(me) == (PUBLIC2, me.address6)
        assert seen(other) == other.nic.addresses
        await rig.apply(source=MASQUERADE, source6=MASQUERADE)
        assert seen(other) == (UP, UP6)


# --- limits and counters
@pytest.mark.parametrize("family", [4, 6])
async def test_a_guest_has_so_many_connections_both_ways_and_no_more(family: int) -> None:
    async with open_rig(2) as rig:
        me = rig.guests[0]
        rig.servers.tcp(rig.outside, "outside", 80, keep=True)
        rig.servers.tcp(me.namespace, "guest", 80, keep=True)
        await join(rig, Rule(IN, TCP, ((80, 80),), ALL))
        await rig.change_nic(0, connections_max=5)
        client = (CLIENTS6 if family == 6 else CLIENTS)[0]
        with ExitStack() as stack:
            came = [stack.enter_context(held(rig, me, client, 80)) for _ in range(3)]
            came += [stack.enter_context(held(rig, None, me.at(family), 80)) for _ in range(3)]
            came += [stack.enter_context(held(rig, me, client, 80))]
            assert came == [True] * 5 + [False] * 2
            other = stack.enter_context(held(rig, rig.guests[1], client, 80))
            assert other, "nobody else's"
        assert (await drops(rig, me))["connections"] >= 2
        assert await drops(rig, rig.guests[1]) == {}


async def test_connections_that_an_exposure_brings_count_as_well() -> None:
    async with open_rig(1) as rig:
        rig.servers.tcp(rig.guests[0].namespace, "guest", 80, keep=True)
        await rig.apply(exposures=(exposure(rig.guests[0]),))
        await rig.change_nic(0, connections_max=2)
        with ExitStack() as stack:
            came = [stack.enter_context(held(rig, None, PUBLIC, 80)) for _ in range(4)]
        assert came == [True, True, False, False]


@pytest.mark.parametrize("family", [4, 6])
async def test_a_rule_bounds_the_connections_of_each_peer(family: int) -> None:
    async with open_rig(2) as rig:
        me, neighbour = rig.guests
        rig.servers.tcp(me.namespace, "guest", 80, keep=True)
        await join(rig, Rule(IN, TCP, ((80, 80),), ALL, connections_max=2))
        with ExitStack() as stack:
            came = [stack.enter_context(held(rig, None, me.at(family), 80)) for _ in range(3)]
            came.append(stack.enter_context(held(rig, neighbour, me.at(family), 80)))
        assert came == [True, True, False, True]
        await join(rig, Rule(IN, TCP, ((80, 80),), ALL, connections_max=4))
        with ExitStack() as stack:
            came = [stack.enter_context(held(rig, None, me.at(family), 80)) for _ in range(4)]
        assert came == [True] * 4


@pytest.mark.parametrize("family", [4, 6])
async def test_a_rule_bounds_new_connections_a_second_for_each_guest(family: int) -> None:
    async with open_rig(2) as rig:
        me, other = rig.guests
        for guest in rig.guests:
            rig.servers.udp(guest.namespace, "guest", 80)
        await join(rig, Rule(IN, UDP, ((80, 80),), ALL, rate=2), members=2)

        def came(guest: Guest) -> list[bool]:
            ask = [rig.ask(None, guest.at(family), 80, udp=True, timeout_s=0.03) for _ in range(8)]
            return [answer != "" for answer in ask]

        first = came(me)
        assert first[:2] == [True, True]
        assert 2 <= sum(first) <= 4
        assert came(other)[:2] == [True, True], "nobody else's"


async def test_what_is_not_allowed_is_counted_for_the_guest_and_each_way() -> None:
    async with open_rig(3) as rig:
        me, other, _ = rig.guests
        await join(rig)
        await rig.apply(groups=(Group(GROUP, (Rule(OUT_OF, TCP, ((80, 80),), ALL),)),))
        for family in (4, 6):
            rig.ask(other, me.at(family), 80, timeout_s=0.05)  # in: counted for who receives
            rig.ask(me, (CLIENTS6 if family == 6 else CLIENTS)[0], 81, timeout_s=0.05)  # out
        assert await drops(rig, me) == {"not_allowed": 4}
        assert await drops(rig, other) == {}


async def test_a_change_of_another_guest_keeps_counts() -> None:
    async with open_rig(3) as rig:
        me, other, _ = rig.guests
        rig.ask(other, me.address, 80, timeout_s=0.05)
        await rig.change_nic(2, connections_max=9, guest_ports=(22,))
        assert await drops(rig, me) == {"not_allowed": 1}


# --- logs
def told(listener: socket.socket, count: int, wait_s: float = 2) -> list[log_prefix.LogPrefix]:
    """Return what so many logged packets say; fewer when no more come in time."""
    found: list[log_prefix.LogPrefix] = []
    while len(found) < count and select.select([listener], [], [], wait_s)[0]:
        parsed = [log_prefix.parse(each.prefix) for each in nflog.receive(listener)]
        found += [each for each in parsed if each is not None]
    return found


async def test_rules_that_log_tell_what_they_let_through_and_groups_what_they_drop() -> None:
    async with open_rig(2) as rig:
        me, other = rig.guests
        rig.servers.tcp(me.namespace, "guest", 80)
        quiet, loud = Rule(IN, TCP, ((81, 81),), ALL), Rule(IN, TCP, ((80, 80),), ALL, log=True)
        await rig.change_nic(0, groups=(GROUP,))
        await rig.apply(groups=(Group(GROUP, (quiet, loud), log_dropped=True),))
        with inside(rig.tenant, nflog.open_socket) as listener:
            for family in (4, 6):
                assert rig.ask(other, me.at(family), 80)
                rig.ask(other, me.at(family), 81, timeout_s=0.05)
                rig.ask(other, me.at(family), 82, timeout_s=0.05)
                rig.ask(me, other.at(family), 80, timeout_s=0.05)
            each = [
                log_prefix.LogPrefix(GROUP[:8], 1, IN),
                log_prefix.LogPrefix(GROUP[:8], None, IN),
                log_prefix.LogPrefix(GROUP[:8], None, OUT_OF),
            ]
            assert told(listener, 6) == each * 2


async def test_a_flood_is_logged_in_part() -> None:
    async with open_rig(2) as rig:
        me, other = rig.guests
        await rig.change_nic(0, groups=(GROUP,))
        await rig.apply(groups=(Group(GROUP, log_dropped=True),))
        with inside(rig.tenant, nflog.open_socket) as listener:
            for port in range(1, 101):
                rig.ask(other, me.address, port, udp=True, timeout_s=0.001)
            assert 20 <= len(told(listener, 50, 0.3)) < 50
        assert await drops(rig, me) == {"not_allowed": 100}


# --- together
@pytest.mark.parametrize("family", [4, 6])
async def test_exposures_and_groups_do_not_get_in_each_others_way(family: int) -> None:
    """Directly a group decides, by an exposure its sources do; whatever else the guest is in."""
    async with open_rig(2) as rig:
        me, other = rig.guests
        rig.servers.tcp(me.namespace, "guest", 80)
        public = PUBLIC6 if family == 6 else PUBLIC
        closed = Group(OTHER, ())
        opened = Group(GROUP, (Rule(IN, TCP, ((80, 80),), ALL),))
        for groups, direct in (((), False), ((OTHER,), False), ((GROUP,), True)):
            for exposures in ((), (exposure(me),), (exposure(me, port=81),)):
                await rig.change_nic(0, groups=groups)
                await rig.change_nic(1, groups=(OTHER,) if exposures else ())
                await rig.apply(groups=(closed, opened), exposures=exposures)
                ports = {each.ports[0] for each in exposures}
                assert (rig.ask(None, me.at(family), 80, timeout_s=0.1) != "") is direct
                for source in (None, other):
                    for port in (80, 81):
                        came = rig.ask(source, public, port, timeout_s=0.1)
                        assert came.startswith("guest ") is (port in ports), (groups, port)


async def test_an_established_connection_lives_through_every_change() -> None:
    async with open_rig(2) as rig:
        me, other = rig.guests
        rig.servers.tcp(me.namespace, "guest", 80, keep=True)
        exposed = exposure(me)
        await join(rig, Rule(IN, TCP, ((80, 80),), ALL))
        await rig.apply(exposures=(exposed,))
        direct = inside(other.namespace, lambda: socket.create_connection((me.address, 80), 2))
        outside = inside(rig.outside, lambda: socket.create_connection((PUBLIC, 80), 2))
        with direct, outside:
            changes: tuple[dict[str, Any], ...] = (
                {"exposures": ()},
                {"groups": ()},
                {"nics": tuple(replace(nic, groups=()) for nic in rig.network.nics)},
                {"metadata": True},  # another frame: all of it is replaced
            )
            for number, change in enumerate(changes):
                await rig.apply(**change)
                for client in (direct, outside):
                    assert client.recv(100) if number == 0 else client.send(b"x")
                    rig.servers.say(b"y")
                    assert b"y" in client.recv(100)
