"""Whether the rules of a security group make sense by themselves. Pure.

Every refusal names the place, such as `group.rules[3].ports[0]`, and the value.
"""

from __future__ import annotations

from chv.common.errors import InvalidArgument
from chv.common.names import check_cidr, shown
from chv.common.wire.nwd_policy import IpProtocol, SecurityGroup, SecurityRule
from chv.nwd.policy import ports_of

PORT_MAX = 65535
COMPARED_MAX = 16  # rules that are not the same; more of them count as narrower
_WITH_PORTS = (IpProtocol.TCP, IpProtocol.UDP)
_VERSIONS = {IpProtocol.ICMP: 4, IpProtocol.ICMPV6: 6}


def check_rules(group: SecurityGroup) -> None:
    """Raise InvalidArgument for the first rule that makes no sense."""
    for index, rule in enumerate(group.rules):
        check_rule(rule, f"group.rules[{index}]")


def check_rule(rule: SecurityRule, field: str) -> None:
    """Check one rule; `field` is where it stands."""
    if rule.ports and rule.protocol not in _WITH_PORTS:
        raise InvalidArgument(
            f"protocol {rule.protocol.value} has no ports",
            field=f"{field}.ports",
            hint="ports go with tcp and udp",
        )
    for index, text in enumerate(rule.ports):
        check_ports(text, f"{field}.ports[{index}]")
    if not rule.cidrs and not rule.groups:
        raise InvalidArgument(
            "the rule names no peer",
            field=field,
            hint="cidrs or groups; 0.0.0.0/0 and ::/0 are everybody",
        )
    for index, text in enumerate(rule.cidrs):
        _check_peer(text, rule.protocol, f"{field}.cidrs[{index}]")


def check_ports(text: str, field: str) -> tuple[int, int]:
    """Return first and last port of `80` or `80-90`."""
    first, last = ports_of(text)
    if not first <= last <= PORT_MAX:
        raise InvalidArgument(
            f"{shown(text)} is not a port or an ascending range up to {PORT_MAX}", field=field
        )
    return first, last


def _check_peer(text: str, protocol: IpProtocol, field: str) -> None:
    version = check_cidr(text, field=field).version
    if protocol in _VERSIONS and version != _VERSIONS[protocol]:
        raise InvalidArgument(
            f"{text} is IPv{version}, which {protocol.value} does not go with",
            field=field,
            hint=f"{protocol.value} is of IPv{_VERSIONS[protocol]}",
        )


def is_wider(new: SecurityGroup, old: SecurityGroup) -> bool:
    """Tell whether everything that `old` allows is certainly allowed by `new` as well.

    Rates, limits and logs say nothing about connections that stand.
    """
    same = {_allowed(rule) for rule in new.rules}
    missing = [rule for rule in old.rules if _allowed(rule) not in same]
    return len(missing) <= COMPARED_MAX and all(
        any(_includes(rule, each) for rule in new.rules) for each in missing
    )


def _allowed(rule: SecurityRule) -> tuple[object, ...]:
    lists = (tuple(rule.ports), tuple(rule.cidrs), tuple(rule.groups))
    return (rule.direction, rule.protocol, *lists)


def _includes(new: SecurityRule, old: SecurityRule) -> bool:
    return (
        new.direction is old.direction
        and new.protocol in (IpProtocol.ANY, old.protocol)
        and (not new.ports or (bool(old.ports) and set(old.ports) <= set(new.ports)))
        and set(old.cidrs) <= set(new.cidrs)
        and set(old.groups) <= set(new.groups)
    )
