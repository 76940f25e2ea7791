"""Security groups and limits of connections as chains under the gateway's frame. Pure.

A group has one chain a direction; NICs that are in the same groups share a profile, whose chain
asks each group in turn and drops what none allows. A rule that does more than allow has a chain
of its own: over its limit means that it does not match, and the next rule is asked. Rates are per
guest; a rule's `connections_max` is per guest and peer. A full set of counted peers lets pass: a
flood of forged addresses must not shut out everybody. Groups and rules are numbered: a number is
the mark of a packet while it is looked up with it. A group that is not known allows nothing.

Subnets and ports are lines of their own, or many of them sets that all rules share: a set within
a rule is one more for the library to read at every change of anything, and one of ports takes
32 KiB in the kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from chv.common.wire.nwd_policy import Direction, IpProtocol
from chv.nwd.kept import Kept
from chv.nwd.nft import log_prefix, text
from chv.nwd.nft.dynamic import Dynamic
from chv.nwd.nft.gateway import TABLE, TOO_MANY
from chv.nwd.nft.model import Group, NetworkRules, NicRules, Rule
from chv.nwd.nft.text import ChainKey, Part, SetKey

LIMITS = (SetKey(*TABLE, "limits4"), SetKey(*TABLE, "limits6"))
PROFILES = (SetKey(*TABLE, "profiles4"), SetKey(*TABLE, "profiles6"))
WAYS = {Direction.INGRESS: "in", Direction.EGRESS: "out"}
LIMITS_KEPT_MAX = 1024
MEMBERS = (SetKey(*TABLE, "members4"), SetKey(*TABLE, "members6"))
LINES_MAX = 8
_NUMBER_BITS = 31
_LOGGED = "limit rate 10/second burst 20 packets"
_ALL = {False: "0.0.0.0/0", True: "::/0"}

Profile = tuple[str, ...]  # ids of groups, sorted


def profile_of(nic: NicRules) -> Profile:
    """Return the profile of a NIC; empty for one without groups."""
    return tuple(sorted(set(nic.groups)))


def number(profiles: Iterable[Profile]) -> dict[Profile, int]:
    """Return a number for each profile: the same one for as long as no other takes it.

    The number of a group is that of the profile of this group alone.
    """
    numbers: dict[int, Profile] = {}
    for profile in sorted(profiles):
        found = _number(" ".join(profile))
        while found == 0 or found in numbers:  # 0: no profile
            found += 1
        numbers[found] = profile
    return {profile: found for found, profile in numbers.items()}


def _number(content: str) -> int:
    return int(text.digest(content), 16) >> (64 - _NUMBER_BITS)


@dataclass(frozen=True, slots=True)
class Memberships:
    """What the NICs of a network have of groups and limits, all of them together."""

    profiles: Mapping[tuple[str, ...], Profile]  # of each list of groups that a NIC has
    groups: frozenset[str]
    limits: frozenset[int]


def memberships(nics: Sequence[NicRules]) -> Memberships:
    """Return it of one NIC of each kind, or of all."""
    some = {nic.groups: nic for nic in nics if nic.groups}
    return Memberships(
        profiles={each: profile_of(nic) for each, nic in some.items()},
        groups=frozenset().union(*some),
        limits=frozenset({nic.connections_max for nic in nics} - {0}),
    )


def named(network: NetworkRules, seen: Memberships) -> set[str]:
    """Return the ids of all groups that a network knows or names."""
    found = {group.group_id for group in network.groups}
    return found.union(seen.groups, *(_peers(group) for group in network.groups))


def _peers(group: Group) -> tuple[str, ...]:
    return _PEERS.get(group.group_id, (group,), _peers_of)


def _peers_of(group: Group) -> tuple[str, ...]:
    return tuple(sorted({peer for rule in group.rules for peer in rule.groups}))


def elements(
    nic: NicRules, profile_number: int, group_numbers: Sequence[int]
) -> dict[SetKey, frozenset[str]]:
    """Return what belongs to one NIC."""
    found: dict[SetKey, frozenset[str]] = {}
    for six, parse in ((False, text.address), (True, text.address6)):
        own = frozenset(parse(each) for each in nic.addresses if text.is_v6(each) is six)
        if not own:
            continue
        if profile_number:
            found[PROFILES[six]] = frozenset(f"{each} : {_mark(profile_number)}" for each in own)
        if nic.connections_max:
            text.count(nic.connections_max)
            found[LIMITS[six]] = frozenset(f"{a} : {_mark(nic.connections_max)}" for a in own)
            found[TOO_MANY[six]] = own
        if group_numbers:
            found[MEMBERS[six]] = frozenset(
                text.tuple_of(_mark(each), address) for each in group_numbers for address in own
            )
    return found


def _mark(value: int) -> str:
    return f"{value:#010x}"


def parts(
    network: NetworkRules, seen: Memberships, numbers: Mapping[Profile, int]
) -> Iterator[Part]:
    """Yield what each group, profile and limit adds."""
    known = {group.group_id: group for group in network.groups}
    for group_id in named(network, seen):
        group = known.get(group_id, Group(group_id))
        peers = tuple((peer, numbers[peer,]) for peer in _peers(group))
        yield _GROUPS.get(group_id, (group, peers), _group)
    for profile in set(seen.profiles.values()):
        told = tuple(each for each in profile if each in known and known[each].log_dropped)
        mark = _mark(numbers[profile])
        yield _PROFILES.get(" ".join(profile), (profile, told, mark), _profile)
    for limit in seen.limits:
        yield _limit(limit)


def _chain(name: str) -> ChainKey:
    return ChainKey(*TABLE, name)


def _profile(profile: Profile, told: Sequence[str], mark: str) -> Part:
    into = Dynamic()
    for direction, way in WAYS.items():
        name = f"p_{mark[2:]}_{way}"
        lines = [f"jump g_{text.uid(group_id)}_{way}" for group_id in profile]
        lines += [_told(group_id, None, direction) for group_id in told]
        into.chains[_chain(name)] = (*lines, f"goto not_allowed_{way}")
        into.element(f"profiles_{way}", f"{mark} : goto {name}")
    return into.part()


@lru_cache(LIMITS_KEPT_MAX)
def _limit(limit: int) -> Part:
    """What a guest sends and receives is counted together; the limit is the mark of its packet."""
    into, over = Dynamic(), f"ct count over {text.count(limit)}"
    for way, end in (("out", "saddr"), ("in", "daddr")):
        name = f"l_{limit}_{way}"
        into.chains[_chain(name)] = tuple(
            f"add @limited{family} {{ meta mark . {ip} {end} {over} }} goto connections_{way}"
            for family, ip in ((4, "ip"), (6, "ip6"))
        )
        into.element(f"limits_{way}", f"{_mark(limit)} : jump {name}")
    return into.part()


def _told(group_id: str, index: int | None, direction: Direction) -> str:
    prefix = log_prefix.build(group_id, index, direction)
    return f'{_LOGGED} log prefix "{prefix}" group {log_prefix.LOG_GROUP}'


def _group(group: Group, peers: tuple[tuple[str, int], ...]) -> Part:
    identity, numbers, found = text.uid(group.group_id), dict(peers), Dynamic()
    lines: dict[str, list[str]] = {"in": [], "out": []}
    for index, rule in enumerate(group.rules):
        way, verdict = WAYS[rule.direction], "accept"
        if rule.rate or rule.connections_max or rule.log:
            name = f"g_{identity}_{way}_{index}"
            found.chains[_chain(name)] = _actions(group.group_id, index, rule)
            verdict = f"jump {name}"
        lines[way] += [f"{match} {verdict}".lstrip() for match in _matches(rule, numbers, found)]
    found.chains |= {_chain(f"g_{identity}_{way}"): tuple(each) for way, each in lines.items()}
    return found.part()


_GROUPS: Kept[Part] = Kept()
_PROFILES: Kept[Part] = Kept()
_PEERS: Kept[tuple[str, ...]] = Kept()


def _actions(group_id: str, index: int, rule: Rule) -> tuple[str, ...]:
    """Return what a rule does with what it matches.

    It counts under a number of all that it says: an element keeps the limit that it began with.
    """
    lines = [f"meta mark set {_mark(_number(f'{group_id} {rule!r}'))}"]
    ends = ("saddr", "daddr") if rule.direction is Direction.INGRESS else ("daddr", "saddr")
    for family, ip in ((4, "ip"), (6, "ip6")):
        peer, guest = f"{ip} {ends[0]}", f"{ip} {ends[1]}"
        if rule.connections_max:
            over = f"ct count over {text.count(rule.connections_max)}"
            lines.append(f"add @counted{family} {{ meta mark . {peer} . {guest} {over} }} return")
        if rule.rate:
            rate = text.count(rule.rate)
            over = f"limit rate over {rate}/second burst {rate} packets"
            lines.append(f"update @rated{family} {{ meta mark . {guest} {over} }} return")
    if rule.log:
        lines.append(_told(group_id, index, rule.direction))
    return (*lines, "accept")


def _matches(rule: Rule, numbers: Mapping[str, int], into: Dynamic) -> Iterator[str]:
    """Return a condition for each way to meet a rule, with the sets that these need."""
    ports = _ports(rule)
    for six in (False, True):
        protocol = _protocol(rule, six=six)
        if protocol is None:
            continue
        peers = [*_subnets(rule, into, six=six), *_members(rule, numbers, six=six)]
        asked = _asked(ports, into, lines_max=LINES_MAX // (len(peers) or 1))
        for peer in peers:
            for each in asked:
                yield f"{peer} {protocol}{each}".rstrip()


def _subnets(rule: Rule, into: Dynamic, *, six: bool) -> list[str]:
    """Return conditions for the peer's address; many subnets are one set."""
    peer = f"{'ip6' if six else 'ip'} {'saddr' if rule.direction is Direction.INGRESS else 'daddr'}"
    cidrs = text.collapsed(rule.cidrs, v6=six)
    if cidrs == [_ALL[six]]:
        return [f"meta nfproto ipv{6 if six else 4}"]
    if len(cidrs) > LINES_MAX:
        return [f"{peer} @{into.subnets(cidrs, six=six)}"]
    return [f"{peer} {cidr}" for cidr in cidrs]


def _members(rule: Rule, numbers: Mapping[str, int], *, six: bool) -> list[str]:
    end = "saddr" if rule.direction is Direction.INGRESS else "daddr"
    asked = f"meta mark . {'ip6' if six else 'ip'} {end} @{MEMBERS[six].name}"
    peers = sorted(set(rule.groups))
    return [f"meta mark set {_mark(numbers[peer])} {asked}" for peer in peers]


def _asked(ports: Sequence[str], into: Dynamic, *, lines_max: int) -> list[str]:
    """Return conditions for ports; many of them are one set."""
    if not ports:
        return [""]
    if len(ports) > max(lines_max, 1):
        return [f" dport @{into.ports(ports)}"]
    return [f" dport {each}" for each in ports]


def _protocol(rule: Rule, *, six: bool) -> str | None:
    """Return the condition of a protocol; None where the family has no such thing."""
    match rule.protocol:
        case IpProtocol.ANY:
            return ""
        case IpProtocol.ICMP:
            return None if six else "meta l4proto icmp"
        case IpProtocol.ICMPV6:
            return "meta l4proto ipv6-icmp" if six else None
        case IpProtocol.TCP | IpProtocol.UDP:
            protocol: str = rule.protocol.value
            return protocol if rule.ports else f"meta l4proto {protocol}"
        case _:
            raise ValueError(f"{rule.protocol!r} is not a protocol of rules")


def _ports(rule: Rule) -> tuple[str, ...]:
    """Return ports as nft takes them: in order, none twice."""
    if rule.ports and rule.protocol not in (IpProtocol.TCP, IpProtocol.UDP):
        raise ValueError(f"{rule.protocol} has no ports")
    merged: list[tuple[int, int]] = []
    for first, last in sorted(rule.ports):
        text.port(first), text.port(last)
        if last < first:
            raise ValueError(f"{first}-{last} is not a range of ports")
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(text.port_range(*each) for each in merged)
