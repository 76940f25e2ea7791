"""Which tracked connections may stand: against a model that writes out all that is allowed."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from chv.common.wire.nwd_policy import Direction, IpProtocol
from chv.nwd.allowing import Judge, is_drained, is_stray, is_stray_on_host
from chv.nwd.kernel.conntrack import ICMP, TCP, UDP, Connection
from chv.nwd.nft.gateway import METADATA6
from chv.nwd.nft.model import Backend, Exposed, Group, NetworkRules, NicRules, Rule
from chv.nwd.records import Footprint

GUESTS = ("10.0.0.2", "10.0.0.3", "10.0.0.4")
OUTSIDE = ("198.51.100.1", "203.0.113.1")
EVERYBODY = GUESTS + OUTSIDE
PORTS = (22, 80, 443)
CIDRS = {
    "0.0.0.0/0": set(EVERYBODY),
    "10.0.0.0/24": set(GUESTS),
    "10.0.0.3/32": {"10.0.0.3"},
    "198.51.100.0/24": {"198.51.100.1"},
    "::/0": set(),
}
NUMBERS = {IpProtocol.TCP: TCP, IpProtocol.UDP: UDP, IpProtocol.ICMP: ICMP}
RANGES = ((22, 22), (80, 443), (1, 65535))

rules = st.builds(
    Rule,
    direction=st.sampled_from(Direction),
    protocol=st.sampled_from([*NUMBERS, IpProtocol.ANY]),
    ports=st.lists(st.sampled_from(RANGES), max_size=2).map(tuple),
    cidrs=st.lists(st.sampled_from(sorted(CIDRS)), max_size=2).map(tuple),
    groups=st.lists(st.sampled_from("abc"), max_size=2).map(tuple),
)
networks = st.builds(
    lambda memberships, groups: NetworkRules(
        identity="chv:1:x:y",
        bridge="br0",
        uplink="up0",
        subnet="10.0.0.0/24",
        gateway="10.0.0.1",
        nics=[
            NicRules(address, f"t{index}", f"02:00:00:00:00:0{index}", (address,), groups=names)
            for index, (address, names) in enumerate(zip(GUESTS, memberships, strict=True))
        ],
        groups=[Group(name, tuple(each)) for name, each in zip("abc", groups, strict=True)],
    ),
    st.tuples(*[st.lists(st.sampled_from("abc"), unique=True, max_size=2).map(tuple)] * 3),
    st.tuples(*[st.lists(rules, max_size=3)] * 3),
)


def connection(
    protocol: int, source: str, target: str, port: int, *, server: str = ""
) -> Connection:
    server = server or target
    return Connection(
        protocol=protocol,
        source=source,
        source_port=40000,
        target=target,
        target_port=port,
        server=server,
        server_port=port,
        is_translated=server != target,
        ends=frozenset({source, target, server}),
    )


def written_out(network: NetworkRules) -> set[tuple[int, str, str, int]]:
    """Every (protocol, source, server, port) that is allowed, by what each NIC says of it."""
    members = {
        name: {nic.addresses[0] for nic in network.nics if name in nic.groups} for name in "abc"
    }
    every = set(product(NUMBERS.values(), EVERYBODY, EVERYBODY, PORTS))
    allowed = set(every)
    for nic in network.nics:
        (address,) = nic.addresses
        out, into = set[tuple[int, str, str, int]](), set[tuple[int, str, str, int]]()
        for group in network.groups:
            if group.group_id not in nic.groups:
                continue
            for rule in group.rules:
                peers = {a for cidr in rule.cidrs for a in CIDRS[cidr]}
                peers |= {a for name in rule.groups for a in members[name]}
                is_any = rule.protocol is IpProtocol.ANY
                numbers = set(NUMBERS.values()) if is_any else {NUMBERS[rule.protocol]}
                ranges = RANGES[2:] if is_any or not rule.ports else rule.ports
                ports = {port for port in PORTS for a, b in ranges if a <= port <= b}
                if rule.direction is Direction.EGRESS:
                    out |= set(product(numbers, {address}, peers, ports))
                else:
                    into |= set(product(numbers, peers, {address}, ports))
        if not nic.groups:
            out = {each for each in every if each[1] == address}
        allowed -= {each for each in every if each[1] == address} - out
        allowed -= {each for each in every if each[2] == address} - into
    return allowed


@given(networks)
def test_a_connection_may_stand_exactly_where_the_rules_would_let_it_come_about(
    network: NetworkRules,
) -> None:
    allowed, judge = written_out(network), Judge(network)
    for each in product(NUMBERS.values(), EVERYBODY, EVERYBODY, PORTS):
        if each[1] != each[2]:
            assert judge.permits(connection(*each)) is (each in allowed), each


@given(networks, st.sampled_from(GUESTS), st.sampled_from(PORTS))
def test_connections_of_the_gateway_and_of_exposures_are_left_alone(
    network: NetworkRules, guest: str, port: int
) -> None:
    judge = Judge(network)
    assert judge.permits(connection(TCP, "10.0.0.1", guest, port))
    assert judge.permits(connection(UDP, guest, "10.0.0.1", port))
    assert judge.permits(connection(TCP, guest, "169.254.169.254", 80))
    assert judge.permits(connection(TCP, guest, METADATA6, 80))
    assert judge.permits(connection(TCP, OUTSIDE[0], "192.0.2.1", port, server=guest))


# --- exposures
NOW = Exposed(
    exposure_id="e",
    protocol=IpProtocol.TCP,
    addresses=("192.0.2.1",),
    ports=(80, 80),
    sources=("198.51.100.0/24",),
    backends=(Backend("10.0.0.2", 0),),
)
connections = st.builds(
    lambda protocol, source, target, port, server: connection(
        protocol, source, target, port, server=server
    ),
    st.sampled_from((TCP, UDP)),
    st.sampled_from(EVERYBODY),
    st.sampled_from(("192.0.2.1", "192.0.2.2", "10.0.0.9")),
    st.sampled_from(PORTS),
    st.sampled_from((*GUESTS, "")),
)


def footprint(protocol: IpProtocol, *, drop: bool) -> Footprint:
    addresses = ["192.0.2.1", "192.0.2.2"]
    return Footprint(
        protocol=protocol, addresses=addresses, host_addresses=addresses, first=80, last=80,
        drop=drop,
    )  # fmt: skip


@given(connections, st.booleans(), st.booleans())
def test_only_what_an_exposure_took_in_is_ever_ended(
    each: Connection,
    drop: bool,
    withdrawn: bool,
) -> None:
    before, now = footprint(IpProtocol.TCP, drop=drop), None if withdrawn else NOW
    ended = is_stray(each, before, now, frozenset({"10.0.0.2"}))
    if ended:
        assert drop
        assert (each.protocol, each.target_port) == (TCP, 80)
        assert each.target in before.addresses
        assert each.is_translated
    if ended and not withdrawn:
        right = each.target == "192.0.2.1" and each.source == OUTSIDE[0]
        assert not (right and each.server == "10.0.0.2")
    on_host = is_stray_on_host(each, before, ["192.0.2.1"], now)
    assert not on_host or (drop and each.target in before.host_addresses)


@given(connections)
def test_keep_leaves_every_translated_stream(each: Connection) -> None:
    before = footprint(IpProtocol.TCP, drop=False)
    assert not is_stray(each, before, None, frozenset())


@given(connections)
def test_udp_that_was_never_translated_ends_in_any_case(each: Connection) -> None:
    before = footprint(IpProtocol.UDP, drop=False)
    taken_in = each.protocol == UDP and each.target in before.addresses and each.target_port == 80
    expected = taken_in and not each.is_translated
    assert is_stray(each, before, None, frozenset()) is expected
    assert is_stray_on_host(each, before, ["192.0.2.1"], None) is expected


@given(connections)
def test_a_drain_ends_the_connections_of_that_target_through_that_exposure_alone(
    each: Connection,
) -> None:
    ended = is_drained(each, NOW, frozenset({"10.0.0.3"}))
    assert ended is (
        (each.protocol, each.target, each.target_port, each.server)
        == (TCP, "192.0.2.1", 80, "10.0.0.3")
    )
