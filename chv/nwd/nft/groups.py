"""Security groups and limits of connections as chains and sets under the gateway's frame. Pure.

A group has one chain a direction; NICs that are in the same groups share a profile, whose chain
asks each group in turn and drops what none allows. A rule that does more than allow has a chain
of its own: over its limit means that it does not match, and the next rule is asked. Rates are per
guest; a rule's `connections_max` is per guest and peer. A full set of counted peers lets pass: a
flood of forged addresses must not shut out everybody. Members of a group are a set that its rules
and others' refer to; a group that is not known allows nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from chv.common.wire.nwd_policy import Direction, IpProtocol
from chv.nwd.nft import log_prefix, text
from chv.nwd.nft.gateway import TABLE, TOO_MANY
from chv.nwd.nft.model import Group, NetworkRules, NicRules, Rule
from chv.nwd.nft.text import ChainKey, SetKey

LIMITS = (SetKey(*TABLE, "limits4"), SetKey(*TABLE, "limits6"))
PROFILES = (SetKey(*TABLE, "profiles4"), SetKey(*TABLE, "profiles6"))
WAYS = {Direction.INGRESS: "in", Direction.EGRESS: "out"}
GROUPS_KEPT_MAX = 1024
_PROFILE_NUMBER_BITS = 31
_COUNTED = f"flags dynamic; size {text.DYNAMIC_MAX};"
_RATED = f"flags dynamic,timeout; timeout 1m; size {text.DYNAMIC_MAX};"
_LOGGED = "limit rate 10/second burst 20 packets"
_ALL = {False: "0.0.0.0/0", True: "::/0"}

Profile = tuple[str, ...]  # ids of groups, sorted


@dataclass(slots=True)
class Dynamic:
    """What a renderer adds under the frame."""

    sets: dict[SetKey, str] = field(default_factory=dict)
    chains: dict[ChainKey, tuple[str, ...]] = field(default_factory=dict)
    elements: dict[SetKey, set[str]] = field(default_factory=dict)

    def element(self, name: str, value: str) -> None:
        """Add an element of a set of the frame."""
        self.elements.setdefault(SetKey(*TABLE, name), set()).add(value)


def profile_of(nic: NicRules) -> Profile:
    """Return the profile of a NIC; empty for one without groups."""
    return tuple(sorted(set(nic.groups)))


def number(profiles: Iterable[Profile]) -> dict[Profile, int]:
    """Return a number for each profile: the same one for as long as no other takes it."""
    numbers: dict[int, Profile] = {}
    for profile in sorted(profiles):
        found = int(text.digest(" ".join(profile)), 16) >> (64 - _PROFILE_NUMBER_BITS)
        while found == 0 or found in numbers:  # 0: no profile
            found += 1
        numbers[found] = profile
    return {profile: found for found, profile in numbers.items()}


def elements(nic: NicRules, profile_number: int) -> dict[SetKey, frozenset[str]]:
    """Return what belongs to one NIC."""
    found: dict[SetKey, frozenset[str]] = {}
    for six, parse in ((False, text.address), (True, text.address6)):
        own = frozenset(parse(each) for each in nic.addresses if text.is_v6(each) is six)
        if not own:
            continue
        if profile_number:
            mark = f"{profile_number:#010x}"
            found[PROFILES[six]] = frozenset(f"{each} : {mark}" for each in own)
        if nic.connections_max:
            text.count(nic.connections_max)
            mark = f"{nic.connections_max:#010x}"
            found[LIMITS[six]] = frozenset(f"{each} : {mark}" for each in own)
            found[TOO_MANY[six]] = own
        found |= {_members(group, six=six): own for group in nic.groups}
    return found


def add(into: Dynamic, network: NetworkRules, numbers: dict[Profile, int]) -> None:
    """Add the chains and sets of every group, profile and limit."""
    known = {group.group_id: group for group in network.groups}
    for group_id in sorted(_named(network, numbers)):
        group = known.get(group_id, Group(group_id))
        own = _group(group)
        into.sets.update(own.sets)
        into.chains.update(own.chains)
        for key, values in own.elements.items():
            into.elements.setdefault(key, set()).update(values)
    for profile, value in numbers.items():
        _add_profile(into, [known.get(each, Group(each)) for each in profile], value)
    for limit in sorted({nic.connections_max for nic in network.nics} - {0}):
        _add_limit(into, limit)


def _named(network: NetworkRules, numbers: dict[Profile, int]) -> set[str]:
    named = {group.group_id for group in network.groups}
    named |= {peer for group in network.groups for rule in group.rules for peer in rule.groups}
    return named.union(*numbers)


def _chain(name: str) -> ChainKey:
    return ChainKey(*TABLE, name)


def _members(group_id: str, *, six: bool) -> SetKey:
    return SetKey(*TABLE, f"m_{text.uid(group_id)}_{6 if six else 4}")


def _add_profile(into: Dynamic, groups: Sequence[Group], value: int) -> None:
    mark = f"{value:#010x}"
    for direction, way in WAYS.items():
        name = f"p_{mark[2:]}_{way}"
        lines = [f"jump g_{text.uid(group.group_id)}_{way}" for group in groups]
        lines += [_told(group.group_id, None, direction) for group in groups if group.log_dropped]
        into.chains[_chain(name)] = (*lines, f"goto not_allowed_{way}")
        into.element(f"profiles_{way}", f"{mark} : goto {name}")


def _add_limit(into: Dynamic, limit: int) -> None:
    """What a guest sends and receives is counted in one set, under its own address."""
    number_text = text.count(limit)
    for family in (4, 6):
        name = f"l_{number_text}_{family}"
        into.sets[SetKey(*TABLE, name)] = f"type ipv{family}_addr; {_COUNTED}"
    for way, end in (("out", "saddr"), ("in", "daddr")):
        into.chains[_chain(f"l_{number_text}_{way}")] = tuple(
            f"add @l_{number_text}_{family} {{ {ip} {end} ct count over {number_text} }} "
            f"goto connections_{way}"
            for family, ip in ((4, "ip"), (6, "ip6"))
        )
        into.element(f"limits_{way}", f"{limit:#010x} : jump l_{number_text}_{way}")


def _told(group_id: str, index: int | None, direction: Direction) -> str:
    prefix = log_prefix.build(group_id, index, direction)
    return f'{_LOGGED} log prefix "{prefix}" group {log_prefix.LOG_GROUP}'


@lru_cache(GROUPS_KEPT_MAX)
def _group(group: Group) -> Dynamic:
    """Return what a group adds; what did not change comes from memory."""
    identity = text.uid(group.group_id)
    found = Dynamic()
    for six, kind in ((False, "ipv4_addr"), (True, "ipv6_addr")):
        found.sets[_members(group.group_id, six=six)] = f"type {kind};"
    lines: dict[str, list[str]] = {"in": [], "out": []}
    for index, rule in enumerate(group.rules):
        way, verdict = WAYS[rule.direction], "accept"
        if rule.rate or rule.connections_max or rule.log:
            verdict = f"jump g_{identity}_{way}_{index}"
            own_sets, actions = _actions(group.group_id, index, rule)
            found.sets.update(own_sets)
            found.chains[_chain(f"g_{identity}_{way}_{index}")] = actions
        ports = _ports(rule)
        if len(ports) > 1:
            key = _port_set(ports)
            found.sets[key] = "type inet_service; flags interval;"
            found.elements[key] = set(ports)
        lines[way] += [f"{match} {verdict}".lstrip() for match in _matches(rule, ports)]
    found.chains |= {_chain(f"g_{identity}_{way}"): tuple(each) for way, each in lines.items()}
    return found


def _actions(group_id: str, index: int, rule: Rule) -> tuple[dict[SetKey, str], tuple[str, ...]]:
    """Return what a rule does with what it matches, and the sets in which it counts.

    A set is named after all that the rule says: elements keep the limit that they began with.
    """
    name = text.digest(f"{group_id} {rule!r}")
    sets: dict[SetKey, str] = {}
    lines: list[str] = []
    ends = ("saddr", "daddr") if rule.direction is Direction.INGRESS else ("daddr", "saddr")
    for family, ip in ((4, "ip"), (6, "ip6")):
        kind, peer, guest = f"ipv{family}_addr", f"{ip} {ends[0]}", f"{ip} {ends[1]}"
        if rule.connections_max:
            sets[SetKey(*TABLE, f"c_{name}_{family}")] = f"type {kind} . {kind}; {_COUNTED}"
            limit = f"ct count over {text.count(rule.connections_max)}"
            lines.append(f"add @c_{name}_{family} {{ {peer} . {guest} {limit} }} return")
        if rule.rate:
            sets[SetKey(*TABLE, f"r_{name}_{family}")] = f"type {kind}; {_RATED}"
            rate = text.count(rule.rate)
            limit = f"limit rate over {rate}/second burst {rate} packets"
            lines.append(f"update @r_{name}_{family} {{ {guest} {limit} }} return")
    if rule.log:
        lines.append(_told(group_id, index, rule.direction))
    return sets, (*lines, "accept")


def _matches(rule: Rule, ports: Sequence[str]) -> Iterator[str]:
    """Return a condition for each way to meet a rule: by family, by subnet or member."""
    end = "saddr" if rule.direction is Direction.INGRESS else "daddr"
    for six, ip in ((False, "ip"), (True, "ip6")):
        what = _protocol(rule, ports, six=six)
        if what is None:
            continue
        cidrs = text.collapsed(rule.cidrs, v6=six)
        if cidrs == [_ALL[six]]:
            yield f"meta nfproto ipv{6 if six else 4} {what}".rstrip()
        elif cidrs:
            yield f"{ip} {end} {text.any_of(cidrs)} {what}".rstrip()
        for group_id in sorted(set(rule.groups)):
            yield f"{ip} {end} @{_members(group_id, six=six).name} {what}".rstrip()


def _protocol(rule: Rule, ports: Sequence[str], *, six: bool) -> str | None:
    """Return the condition of protocol and ports; None where the family has no such thing."""
    match rule.protocol:
        case IpProtocol.ANY:
            return ""
        case IpProtocol.ICMP:
            return None if six else "meta l4proto icmp"
        case IpProtocol.ICMPV6:
            return "meta l4proto ipv6-icmp" if six else None
        case IpProtocol.TCP | IpProtocol.UDP:
            protocol = rule.protocol.value
            if not ports:
                return f"meta l4proto {protocol}"
            asked = ports[0] if len(ports) == 1 else f"@{_port_set(ports).name}"
            return f"{protocol} dport {asked}"
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
    return tuple(port_range(each) for each in merged)


def _port_set(ports: Sequence[str]) -> SetKey:
    """Return the set of these ports, which all rules with them share.

    One within a rule would be a map of every possible port to the kernel, 32 KiB a time.
    """
    return SetKey(*TABLE, f"q_{text.digest(' '.join(ports))}")


def port_range(ports: tuple[int, int]) -> str:
    """Return one port, or a range of them."""
    first, last = text.port(ports[0]), text.port(ports[1])
    return first if first == last else f"{first}-{last}"
