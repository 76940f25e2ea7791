"""Rules of security groups that make no sense are refused by the place where they stand."""

from __future__ import annotations

from typing import Any

import pytest

from chv.common.errors import InvalidArgument
from chv.common.wire.nwd_policy import Direction, IpProtocol, SecurityRule
from chv.nwd.group_rules import check_rules
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
