"""Who reaches whom: the matrix by packets, for IPv4 and IPv6, each denial with its control."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import anyio.to_thread
import pytest

from chv.common.wire.nwd_policy import Algorithm, Direction, IpProtocol
from chv.nwd.nft.model import Backend, Exposed, Group, Rule
from tests.integration.nwd_policy_rig import (
    CLIENTS,
    CLIENTS6,
    DENIED_S,
    GATEWAY,
    GATEWAY6,
    IDS,
    OUT,
    PUBLIC,
    PUBLIC6,
    Guest,
    Rig,
    needs_namespaces,
    open_rig,
    open_wide,
)

pytestmark = [pytest.mark.root, needs_namespaces]
IN, OUT_OF = Direction.INGRESS, Direction.EGRESS
TCP, UDP, ANY = IpProtocol.TCP, IpProtocol.UDP, IpProtocol.ANY
ALL = ("0.0.0.0/0", "::/0")
WEB, PLAIN, ADMIN, CLOSED = (IDS.uid() for _ in range(4))
ANYWHERE = Rule(OUT_OF, ANY, cidrs=ALL)
PINGS = (Rule(IN, IpProtocol.ICMP, cidrs=ALL), Rule(IN, IpProtocol.ICMPV6, cidrs=ALL))
FIRST_CLIENT = (f"{CLIENTS[0]}/32", f"{CLIENTS6[0]}/128")
GROUPS = (
    Group(
        WEB,
        (
            ANYWHERE,
            Rule(IN, TCP, ((8080, 8081),), ALL),
            Rule(IN, TCP, ((22, 22),), groups=(ADMIN,)),
            Rule(IN, UDP, ((5300, 5300),), FIRST_CLIENT),
        ),
    ),
    Group(PLAIN, (ANYWHERE,)),
    Group(ADMIN, (ANYWHERE, *PINGS)),
    Group(CLOSED, (Rule(OUT_OF, TCP, ((8080, 8080),), groups=(WEB,)),)),
)


@dataclass(frozen=True)
class Case:
    """One attempt. `source` None: from outside; `port` 0: a ping."""

    name: str
    source: Guest | None
    address: str
    port: int
    allowed: bool
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, rig: Rig) -> bool:
        timeout_s = 2.0 if self.allowed else DENIED_S
        if self.port == 0:
            return rig.ping(self.source, self.address, timeout_s)
        answer = rig.ask(self.source, self.address, self.port, timeout_s=timeout_s, **self.options)
        assert not answer.startswith("error"), (self.name, answer)
        return answer != ""  # a refusal has been there too, so it counts as having come through


def datagram(client: str) -> dict[str, Any]:
    return {"udp": True, "bound": client}


def exposed(ports: int, backends: list[tuple[Guest, int]], **changes: Any) -> Exposed:
    targets = tuple(Backend(a, port) for guest, port in backends for a in guest.nic.addresses)
    plain = Exposed(IDS.uid(), TCP, (PUBLIC, PUBLIC6), (ports, ports), ALL, targets)
    return replace(plain, **changes)


def cases(rig: Rig, family: int) -> list[Case]:
    web, plain, admin, closed, loose = rig.guests
    public, gateway = (PUBLIC6, GATEWAY6) if family == 6 else (PUBLIC, GATEWAY)
    clients = CLIENTS6 if family == 6 else CLIENTS
    metadata = "fd00:ec2::254" if family == 6 else "169.254.169.254"
    to = {guest: guest.at(family) for guest in rig.guests}
    found = [
        Case("a guest to the outside", web, clients[0], 80, True),
        Case("an exposure of ssh", None, public, 2222, True),
        Case("an exposure of a web server", None, public, 8013, True),
        Case("a port that is not exposed", None, public, 9999, False),
        Case("a port that no rule names", None, to[web], 9999, False),
        Case("a port that a rule names", None, to[web], 8080, True),
        Case("the end of a range of ports", None, to[web], 8081, True),
        Case("behind the end of a range", None, to[web], 8082, False),
        Case("the same port of another group", None, to[admin], 8080, False),
        Case("a ping that a rule allows", None, to[admin], 0, True),
        Case("a ping that no rule allows", None, to[plain], 0, False),
        Case("a client of a subnet", None, to[web], 5300, True, {"udp": True, "bound": clients[0]}),
        Case("another client", None, to[web], 5300, False, {"udp": True, "bound": clients[1]}),
        Case("back in by a public address", web, public, 80, True),
        Case("back in again", web, public, 80, True),
        Case("to oneself by a public address", admin, public, 8013, True),
        Case("through an exposure without a rule", closed, public, 8013, True),
        Case("between guests by a rule", plain, to[web], 8080, True),
        Case("between guests without a rule", plain, to[web], 9999, False),
        Case("a member of the group that a rule names", admin, to[web], 22, True),
        Case("no member of that group", plain, to[web], 22, False),
        Case("to a guest that lets nobody in", web, to[admin], 8080, False),
        Case("a ping between guests", web, to[admin], 0, True),
        Case("a ping to a guest without a rule for it", web, to[plain], 0, False),
        Case("out to a member that an egress rule names", closed, to[web], 8080, True),
        Case("out to another port of it", closed, to[web], 8081, False),
        Case("out to somebody else", closed, clients[0], 80, False),
        Case("out to a guest that would let it in", closed, to[admin], 0, False),
        Case("metadata", web, metadata, 80, True),
        Case("another port beside metadata", web, metadata, 8080, False),
        Case("another port of the gateway", web, gateway, 8080, False),
        Case("the gateway's name server", closed, gateway, 53, True),
        Case("a ping to the gateway", closed, gateway, 0, True),
        Case("out without groups", loose, clients[0], 80, True),
        Case("in without groups, from outside", None, to[loose], 8080, False),
        Case("in without groups, from a guest", web, to[loose], 8080, False),
    ]
    if family == 4:
        found.append(Case("the node's end of the uplink", web, OUT, 80, False))
    return found


async def prepare(rig: Rig) -> None:
    web, plain, admin, _, _ = rig.guests
    for guest in rig.guests:
        for port in (22, 80, 8080, 8081, 8082, 9999):
            rig.servers.tcp(guest.namespace, guest.nic.tap, port)
    rig.servers.udp(web.namespace, "web", 5300)
    rig.servers.tcp(rig.outside, "outside", 80)
    for port in (53, 80, 8080, 9999):
        rig.servers.tcp(rig.tenant, "gateway", port)
    groups = ((WEB,), (PLAIN,), (ADMIN,), (CLOSED,), ())
    nics = tuple(
        replace(nic, groups=own) for nic, own in zip(rig.network.nics, groups, strict=True)
    )
    exposures = (
        exposed(2222, [(admin, 22)]),
        exposed(8013, [(admin, 8080)]),
        exposed(80, [(web, 8080), (plain, 8080)]),
        exposed(81, [(web, 8080), (plain, 8080)], algorithm=Algorithm.SOURCE),
    )
    await rig.apply(nics=nics, groups=GROUPS, exposures=exposures, metadata=True)


def run(rig: Rig, tried: list[Case]) -> set[str]:
    return {case.name for case in tried if case.run(rig)}


@pytest.mark.parametrize("family", [4, 6])
async def test_the_matrix_of_who_reaches_whom(family: int) -> None:
    async with open_rig(5) as rig:
        await prepare(rig)
        matrix = cases(rig, family)
        assert len({case.name for case in matrix}) == len(matrix) >= 36
        came = await anyio.to_thread.run_sync(run, rig, matrix)
        assert came == {case.name for case in matrix if case.allowed}
        open_wide(rig)
        denied = [case for case in matrix if not case.allowed]
        came = await anyio.to_thread.run_sync(run, rig, denied)
        assert came == {case.name for case in denied}


async def test_connections_are_spread_evenly_and_a_source_keeps_its_backend() -> None:
    async with open_rig(5) as rig:
        await prepare(rig)
        for public, clients in ((PUBLIC, CLIENTS), (PUBLIC6, CLIENTS6)):
            spread = Counter(rig.ask(None, public, 80).split()[0] for _ in range(20))
            assert sorted(spread.values()) == [10, 10]
            for client in clients:
                answers = {rig.ask(None, public, 81, bound=client) for _ in range(5)}
                assert len(answers) == 1
                assert answers.pop().endswith(f" {client}"), "the client's address is kept"


async def test_a_rule_that_goes_and_comes_back_decides_at_once() -> None:
    async with open_rig(5) as rig:
        await prepare(rig)
        web = rig.guests[0]
        assert rig.ask(None, web.address, 8080)
        closed = (Group(WEB, (ANYWHERE,)), *GROUPS[1:])
        await rig.apply(groups=closed)
        assert rig.ask(None, web.address, 8080, timeout_s=DENIED_S) == ""
        await rig.apply(groups=GROUPS)
        assert rig.ask(None, web.address, 8080)


async def test_two_tenants_with_the_same_addresses_do_not_meet() -> None:
    async with open_rig(2) as one, open_rig(2) as two:
        group = Group(WEB, (ANYWHERE, Rule(IN, ANY, cidrs=ALL)))
        for rig, label in ((one, "one"), (two, "two")):
            rig.servers.tcp(rig.guests[1].namespace, label, 80)
            nics = tuple(replace(nic, groups=(WEB,)) for nic in rig.network.nics)
            await rig.apply(nics=nics, groups=(group,))
        for family in (4, 6):
            for rig, label in ((one, "one"), (two, "two")):
                first, second = rig.guests
                assert rig.ask(first, second.at(family), 80).startswith(f"{label} ")
        await one.apply(nics=one.network.nics[:1])
        assert one.ask(one.guests[0], one.guests[1].address, 80, timeout_s=DENIED_S) == ""
        assert two.ask(two.guests[0], two.guests[1].address, 80)
