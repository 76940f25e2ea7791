"""Log prefixes, counters, choices of backends: what is built is read back, and not bad input."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from chv.common.errors import Internal
from chv.common.wire.nwd_policy import RULES_MAX, Algorithm, Direction, IpProtocol
from chv.nwd.nft import counters, exposures, groups, log_prefix, rules
from chv.nwd.nft.gateway import TABLE
from chv.nwd.nft.log_prefix import LogPrefix
from chv.nwd.nft.model import Backend, Exposed, Group, NetworkRules, NicRules, Rule
from chv.nwd.nft.text import ChainKey

UID = "0b7f7a4e-0000-4000-8000-000000000001"
NETWORK = NetworkRules("chv:1:abc123:x", "br0", "up0", "10.0.0.0/24", "10.0.0.1")
EXPOSED = Exposed(
    UID, IpProtocol.TCP, ("10.0.0.9",), (80, 80), ("0.0.0.0/0",), (Backend("10.0.0.2", 8080),)
)


def chain(network: NetworkRules, name: str) -> tuple[str, ...]:
    return rules.render(network).chains[ChainKey(*TABLE, name)]


def lines_of(exposed: Exposed) -> tuple[str, ...]:
    network = replace(NETWORK, exposures=(exposed,))
    return chain(network, f"e_{UID.replace('-', '')}_4")


def lines_of_rule(rule: Rule) -> tuple[str, ...]:
    way = groups.WAYS[rule.direction]
    return chain(replace(NETWORK, groups=(Group(UID, (rule,)),)), f"g_{UID.replace('-', '')}_{way}")


# --- log prefixes
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("rule", [None, 0, 7, RULES_MAX - 1])
def test_a_prefix_says_what_it_was_built_from(rule: int | None, direction: Direction) -> None:
    built = log_prefix.build(UID, rule, direction)
    assert built.endswith(" ")
    assert len(built) < 64, "the kernel takes no more"
    assert log_prefix.parse(built) == LogPrefix(UID[:8], rule, direction)
    assert log_prefix.parse(built.rstrip() + "\0") == LogPrefix(UID[:8], rule, direction)


@pytest.mark.parametrize(
    "prefix",
    ["", "DROP ", "chv:", "chv:0b7f7a4e:1:in\n", "chv:0b7f7a4e:01:in ", "chv:0b7f7a4e:1:up ",
     "chv:0B7F7A4E:1:in ", "chv:0b7f7a4e:1000:in "],
)  # fmt: skip
def test_a_prefix_of_others_is_none_of_ours(prefix: str) -> None:
    assert log_prefix.parse(prefix) is None


@pytest.mark.parametrize("rule", [-1, RULES_MAX])
def test_a_prefix_needs_the_index_of_a_rule(rule: int) -> None:
    with pytest.raises(ValueError, match="index"):
        log_prefix.build(UID, rule, Direction.INGRESS)


# --- counters
def listed(family: str, name: str, *elements: str) -> str:
    found = {"family": family, "name": name, "table": "chv", "type": "x"}
    head = json.dumps({"set": found})[:-2]
    return f'{{"nftables": [{{"metainfo": {{}}}}, {head}, "elem": [{", ".join(elements)}]}}}}]}}'


def counted(value: str, packets: int) -> str:
    return f'{{"elem": {{"val": "{value}", "counter": {{"packets": {packets}, "bytes": 1}}}}}}'


def test_drops_come_from_port_and_address() -> None:
    listing = "\n".join(
        (
            listed("bridge", "spoofed_mac", counted("t1", 3), counted("t2", 1)),
            listed("inet", "not_allowed4", counted("10.0.0.2", 2), counted("10.0.0.3", 0)),
            listed("inet", "not_allowed6", counted("fd00::2", 5)),
            listed("inet", "connections4", '"10.0.0.2"'),
            listed("inet", "somebody_elses", counted("t1", 9)),
            "",
        )
    )
    found = counters.drops(listing)
    assert counters.drops_of(found, "t1", ["10.0.0.2", "fd00::2"]) == {
        "spoofed_mac": 3,
        "not_allowed": 7,
    }
    assert counters.drops_of(found, "t2", ["10.0.0.3"]) == {"spoofed_mac": 1}


def test_no_listing_is_no_drops_and_another_form_is_an_error() -> None:
    assert counters.drops("") == {}
    assert counters.drops('{"nftables": [{"metainfo": {}}]}') == {}
    with pytest.raises(Internal):
        counters.drops("table inet chv {")


# --- backends
def test_who_may_not_connect_is_refused_before_anything_else() -> None:
    some = replace(EXPOSED, sources=("10.0.0.0/8", "10.1.0.0/16", "192.0.2.1/32"))
    network = replace(NETWORK, exposures=(some,))
    ruleset = rules.render(network)
    (key,) = ruleset.sets
    assert ruleset.elements[key] == {"10.0.0.0/8", "192.0.2.1/32"}
    assert lines_of(some)[0] == f"ip saddr != @{key.name} drop"
    assert (
        lines_of(replace(EXPOSED, sources=("192.0.2.1/32",)))[0] == "ip saddr != 192.0.2.1/32 drop"
    )
    assert lines_of(replace(EXPOSED, sources=("2001:db8::/32",))) == ("drop",)


def test_an_exposure_without_backends_of_a_family_refuses() -> None:
    nobody = replace(EXPOSED, backends=(Backend("fd00::2", 80),))
    assert lines_of(nobody) == ("meta l4proto tcp reject with tcp reset",)
    datagrams = replace(nobody, protocol=IpProtocol.UDP)
    assert lines_of(datagrams) == ("reject with icmpx port-unreachable",)


@pytest.mark.parametrize(
    ("ports", "backends", "target"),
    [((80, 80), (0,), "to 10.0.0.2"), ((80, 80), (8080,), "to 10.0.0.2:8080"),
     ((80, 90), (0,), "to 10.0.0.2"),
     ((80, 80), (0, 81), "numgen inc mod 2 map { 0 : 10.0.0.2 . 80, 1 : 10.0.0.3 . 81 }")],
)  # fmt: skip
def test_a_backend_has_its_port_or_keeps_the_one_that_was_asked_for(
    ports: tuple[int, int], backends: tuple[int, ...], target: str
) -> None:
    named = tuple(Backend(f"10.0.0.{2 + number}", port) for number, port in enumerate(backends))
    assert lines_of(replace(EXPOSED, ports=ports, backends=named))[-1].endswith(target)


def test_a_range_keeps_its_ports_for_all_backends_or_for_none() -> None:
    mixed = (Backend("10.0.0.2", 0), Backend("10.0.0.3", 80))
    with pytest.raises(ValueError, match="all or none"):
        lines_of(replace(EXPOSED, ports=(80, 90), backends=mixed))


def test_buckets_are_shared_out_about_evenly() -> None:
    targets = [f"10.0.0.{number} . 80" for number in range(2, 6)]
    owned = Counter(exposures.bucket_owner(bucket, targets) for bucket in range(256))
    assert set(owned) == set(targets)
    assert min(owned.values()) > 256 / 4 / 2
    many = replace(
        EXPOSED,
        algorithm=Algorithm.SOURCE,
        backends=tuple(Backend(each.split()[0], 80) for each in targets),
    )
    assert "jhash ip saddr mod 256 seed 0x" in lines_of(many)[-1]


@pytest.mark.parametrize("protocol", [IpProtocol.ICMP, IpProtocol.ANY])
def test_exposures_are_of_tcp_or_udp(protocol: IpProtocol) -> None:
    with pytest.raises(ValueError, match="not a protocol of exposures"):
        lines_of(replace(EXPOSED, protocol=protocol))


# --- groups
def test_ports_that_touch_are_one_range_and_subnets_within_others_are_left_out() -> None:
    ports, cidrs = ((85, 91), (80, 90), (92, 92)), ("10.1.0.0/16", "10.0.0.0/8")
    rule = Rule(Direction.INGRESS, IpProtocol.TCP, ports, cidrs)
    assert lines_of_rule(rule) == ("ip saddr 10.0.0.0/8 tcp dport 80-92 accept",)


def test_a_few_ports_and_subnets_are_lines_and_many_are_sets_that_rules_share() -> None:
    few = Rule(Direction.INGRESS, IpProtocol.TCP, ((443, 443), (80, 81)), ("0.0.0.0/0",))
    assert lines_of_rule(few) == (
        "meta nfproto ipv4 tcp dport 80-81 accept",
        "meta nfproto ipv4 tcp dport 443 accept",
    )
    cidrs = tuple(f"192.0.2.{2 * number}/32" for number in range(9))
    ports = tuple((2 * number, 2 * number) for number in range(1, 10))
    many = Rule(Direction.INGRESS, IpProtocol.TCP, ports, cidrs)
    network = replace(NETWORK, groups=(Group(UID, (many, many)), Group(UID[:-1] + "2", (many,))))
    ruleset = rules.render(network)
    subnets, asked = sorted(ruleset.sets, key=lambda key: key.name)
    assert ruleset.elements[subnets] == set(cidrs)
    assert ruleset.elements[asked] == {str(first) for first, _ in ports}
    assert lines_of_rule(many) == (f"ip saddr @{subnets.name} tcp dport @{asked.name} accept",)


def test_members_are_asked_for_under_the_number_of_their_group() -> None:
    peer = UID[:-1] + "2"
    rule = Rule(Direction.EGRESS, IpProtocol.ANY, groups=(peer,))
    nic = NicRules(UID, "t1", "02:00:00:00:00:01", ("10.0.0.2", "fd00::2"), groups=(peer,))
    network = replace(NETWORK, groups=(Group(UID, (rule,)),), nics=(nic,))
    ruleset = rules.render(network)
    (member,) = ruleset.all_elements()[groups.MEMBERS[False]]
    mark = member.removesuffix(" . 10.0.0.2")
    assert chain(network, f"g_{UID.replace('-', '')}_out") == (
        f"meta mark set {mark} meta mark . ip daddr @members4 accept",
        f"meta mark set {mark} meta mark . ip6 daddr @members6 accept",
    )


def test_a_rule_without_peers_allows_nothing() -> None:
    assert lines_of_rule(Rule(Direction.INGRESS, IpProtocol.TCP, ((80, 80),))) == ()


@pytest.mark.parametrize(
    ("protocol", "lines"),
    [
        (IpProtocol.ICMP, ("meta nfproto ipv4 meta l4proto icmp accept",)),
        (IpProtocol.ICMPV6, ("meta nfproto ipv6 meta l4proto ipv6-icmp accept",)),
        (IpProtocol.ANY, ("meta nfproto ipv4 accept", "meta nfproto ipv6 accept")),
        (IpProtocol.UDP, tuple(f"meta nfproto ipv{n} meta l4proto udp accept" for n in (4, 6))),
    ],
)
def test_all_of_a_protocol_is_of_its_own_family(
    protocol: IpProtocol, lines: tuple[str, ...]
) -> None:
    rule = Rule(Direction.EGRESS, protocol, cidrs=("0.0.0.0/0", "::/0"))
    assert lines_of_rule(rule) == lines


@pytest.mark.parametrize(
    "rule",
    [
        Rule(Direction.INGRESS, IpProtocol.ANY, ((80, 80),), ("0.0.0.0/0",)),
        Rule(Direction.INGRESS, IpProtocol.TCP, ((81, 80),), ("0.0.0.0/0",)),
        Rule(Direction.INGRESS, IpProtocol.TCP, ((0, 80),), ("0.0.0.0/0",)),
    ],
)
def test_a_rule_without_a_meaning_is_refused(rule: Rule) -> None:
    with pytest.raises(ValueError, match=r"port|number"):
        lines_of_rule(rule)


def test_profiles_that_would_share_a_number_do_not() -> None:
    profiles = [(f"group-{number}",) for number in range(500)]
    numbers = groups.number(profiles)
    assert len(set(numbers.values())) == 500
    assert groups.number(reversed(profiles)) == numbers
    assert groups.number(profiles[:7]) == {each: numbers[each] for each in profiles[:7]}


def test_members_of_the_same_groups_share_a_profile_in_any_order() -> None:
    other = UID.replace("1", "2")
    nics = tuple(
        NicRules(UID, f"t{n}", f"02:00:00:00:00:0{n}", (f"10.0.0.{n}",), groups=each)
        for n, each in enumerate([(UID, other), (other, UID), (UID,)], start=2)
    )
    chains = rules.render(replace(NETWORK, nics=nics)).chains
    assert len([key for key in chains if key.name.startswith("p_")]) == 2 * 2
