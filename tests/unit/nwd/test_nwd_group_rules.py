"""Rules of security groups that make no sense are refused by the place where they stand."""

from __future__ import annotations

from typing import Any

import pytest

from chv.common.errors import InvalidArgument
from chv.common.wire.nwd_policy import Direction, IpProtocol, SecurityRule
from chv.nwd.group_rules import COMPARED_MAX, check_rules, is_wider
from tests.unit.nwd.nwd_rows import IDS, group


def rule(**changes: Any) -> SecurityRule:
    fields: dict[str, Any] = {
        "direction": Direction.INGRESS,
        "protocol": IpProtocol.TCP,
        "ports": ["80"],
        "cidrs": ["0.0.0.0/0"],
    }
    return SecurityRule(**(fields | changes))


GOOD = rule()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"ports": ["90-80"]}, "ports[0]"),
        ({"ports": ["80", "70000"]}, "ports[1]"),
        ({"ports": ["1-65536"]}, "ports[0]"),
        ({"protocol": IpProtocol.ANY}, "ports"),
        ({"protocol": IpProtocol.ICMP}, "ports"),
        ({"cidrs": []}, ""),
        ({"cidrs": ["10.0.0.1/24"]}, "cidrs[0]"),
        ({"cidrs": ["10.0.0.0/24", "2001:DB8::/32".lower(), "fe80::1/64"]}, "cidrs[2]"),
        ({"cidrs": ["10.0.0.0/33"]}, "cidrs[0]"),
        ({"protocol": IpProtocol.ICMP, "ports": [], "cidrs": ["::/0"]}, "cidrs[0]"),
        ({"protocol": IpProtocol.ICMPV6, "ports": [], "cidrs": ["0.0.0.0/0"]}, "cidrs[0]"),
    ],
)
def test_a_rule_without_sense_is_refused_by_its_place(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_rules(group(GOOD, GOOD, rule(**changes)).group)
    assert caught.value.field == f"group.rules[2].{field}".rstrip(".")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ports": ["1-65535"]},
        {"ports": []},
        {"protocol": IpProtocol.ANY, "ports": []},
        {"protocol": IpProtocol.ICMP, "ports": [], "cidrs": ["10.0.0.0/8"]},
        {"protocol": IpProtocol.ICMPV6, "ports": [], "cidrs": ["::/0"]},
        {"cidrs": [], "groups": [IDS.uid()]},
        {"cidrs": ["0.0.0.0/0", "::/0"]},
    ],
)
def test_a_rule_with_sense_is_taken(changes: dict[str, Any]) -> None:
    check_rules(group(rule(**changes)).group)


PEER = IDS.uid()
OTHER = rule(ports=["443"], cidrs=["10.0.0.0/8"])


@pytest.mark.parametrize(
    ("new", "wider"),
    [
        ([GOOD, OTHER], True),
        ([OTHER, GOOD, rule(ports=["8080"])], True),
        ([rule(rate=5, log=True), OTHER], True),  # of new connections alone
        ([rule(ports=["22", "80"]), OTHER], True),
        ([rule(ports=[]), OTHER], True),
        ([rule(protocol=IpProtocol.ANY, ports=[]), OTHER], True),
        ([GOOD, rule(ports=["443"], cidrs=["10.0.0.0/8", "::/0"], groups=[PEER])], True),
        ([GOOD], False),
        ([], False),
        ([GOOD, rule(ports=["443"], cidrs=["10.0.0.0/9"])], False),
        ([GOOD, rule(ports=["443"], cidrs=[], groups=[PEER])], False),
        ([rule(protocol=IpProtocol.UDP), OTHER], False),
        ([rule(direction=Direction.EGRESS), OTHER], False),
        ([rule(ports=["81"]), OTHER], False),
    ],
)
def test_a_change_is_wider_when_it_certainly_allows_all_of_before(
    new: list[SecurityRule], wider: bool
) -> None:
    assert is_wider(group(*new).group, group(GOOD, OTHER).group) is wider


def test_many_changed_rules_count_as_narrower_unlooked_at() -> None:
    old = [rule(ports=[str(number)]) for number in range(1, COMPARED_MAX + 2)]
    assert not is_wider(group(rule(ports=[])).group, group(*old).group)
    assert is_wider(group(rule(ports=[])).group, group(*old[1:]).group)
