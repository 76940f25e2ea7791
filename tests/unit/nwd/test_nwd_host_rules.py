"""The table in the host's ruleset: checked values alone, what is of a network in elements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chv.common.errors import InvalidArgument
from chv.nwd.nft import host_rules
from chv.nwd.nft.host_rules import HostExposure, HostUplink
from chv.nwd.nft.text import Ruleset, SetKey

TABLE = "chv_abc123"
UPLINK = HostUplink(
    "cabc1230",
    ("169.254.64.1", "fd63:6876::1"),
    ("198.51.100.7/32", "10.7.0.0/24", "fd00:7::/64"),
)
WEB = HostExposure("tcp", "198.18.7.2", (8080, 8080), "169.254.64.1")
RANGE = HostExposure("udp", "fd99::2", (5000, 5010), "fd63:6876::1")


def render(uplink: HostUplink = UPLINK, *exposures: HostExposure) -> Ruleset:
    return host_rules.render(TABLE, "chv:1:abc123:host", [uplink], exposures)


def elements(ruleset: Ruleset, name: str) -> set[str]:
    return set(ruleset.elements[SetKey("inet", TABLE, name)])


def test_each_uplink_has_its_sources_in_each_family() -> None:
    ruleset = render()
    assert ruleset.tables == (("inet", TABLE),)
    assert elements(ruleset, "uplinks") == {'"cabc1230"'}
    assert elements(ruleset, "sources") == {'"cabc1230" . 169.254.64.1'}
    assert elements(ruleset, "sources6") == {'"cabc1230" . fd63:6876::1'}
    assert elements(ruleset, "routed") == {
        '"cabc1230" . 198.51.100.7',
        '"cabc1230" . 10.7.0.0/24',
    }
    assert elements(ruleset, "routed6") == {'"cabc1230" . fd00:7::/64'}
    assert ruleset.removal() == f"add table inet {TABLE}\ndelete table inet {TABLE}\n"


def test_an_exposure_is_one_element_whatever_its_range() -> None:
    ruleset = render(UPLINK, WEB, RANGE)
    assert elements(ruleset, "exposed") == {"tcp . 198.18.7.2 . 8080 : 169.254.64.1"}
    assert elements(ruleset, "exposed6") == {"udp . fd99::2 . 5000-5010 : fd63:6876::1"}
    assert ruleset.frame == render().frame, "an exposure does not reload the table"


@pytest.mark.parametrize(
    ("uplink", "exposure"),
    [
        (replace(UPLINK, name="c }"), WEB),
        (replace(UPLINK, addresses=("1.2.3.4 }",)), WEB),
        (replace(UPLINK, addresses=("fd00::1%\n}",)), WEB),
        (replace(UPLINK, routed=("10.0.0.0/24 }",)), WEB),
        (UPLINK, replace(WEB, protocol="icmp")),
        (UPLINK, replace(WEB, address="x")),
        (UPLINK, replace(WEB, uplink="fd63:6876::1")),
        (UPLINK, replace(WEB, ports=(0, 5))),
        (UPLINK, replace(WEB, ports=(5, 65536))),
    ],
)
def test_nothing_carries_text_of_its_own(uplink: HostUplink, exposure: HostExposure) -> None:
    with pytest.raises((InvalidArgument, ValueError)):
        render(uplink, exposure)
