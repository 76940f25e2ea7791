"""A whole ruleset is loaded into tables of ours as they stand, where they are still ours."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chv.common.wire.nwd_policy import Direction, IpProtocol
from chv.nwd.nft import rules
from chv.nwd.nft.model import Group, NetworkRules, NicRules, Rule
from chv.nwd.nft.standing import Standing, StandingSet, TableKey, in_place
from chv.nwd.nft.text import Ruleset

GROUP = "0b7f7a4e-0000-4000-8000-00000000000a"
BRIDGE, INET = ("bridge", "chv"), ("inet", "chv")
OPEN = Group(GROUP, (Rule(Direction.INGRESS, IpProtocol.TCP, ((80, 80),), ("0.0.0.0/0",)),))
NETWORK = NetworkRules(
    identity="chv:1:abc123:0b7f7a4e-0000-4000-8000-000000000001",
    bridge="br0",
    uplink="up0",
    subnet="10.0.0.0/24",
    gateway="10.0.0.1",
    nics=(NicRules("n1", "t0000000001", "02:00:00:00:00:01", ("10.0.0.2",), groups=(GROUP,)),),
    groups=(OPEN,),
)


def wanted() -> Ruleset:
    return rules.render(NETWORK)


def as_loaded() -> dict[TableKey, Standing]:
    """What the kernel would tell of a few things in it; what is not told of is made anew."""
    comment = next(line for line in wanted().frame.splitlines() if "comment" in line).split('"')[1]
    chain = next(key.name for key in wanted().chains if key.name.startswith("g_"))
    return {
        BRIDGE: Standing(
            comment,
            chains={"prerouting": True, "arp_check": False},
            sets={
                "port_mac": StandingSet(is_map=False, is_filled=False),
                "spoofed_mac": StandingSet(is_map=False, is_filled=True),
            },
        ),
        INET: Standing(
            comment,
            chains={"forward_in": True, chain: False},
            sets={"profiles4": StandingSet(is_map=True, is_filled=False)},
        ),
    }


def test_tables_of_the_same_frame_are_emptied_and_filled_but_never_removed() -> None:
    text = in_place(wanted(), as_loaded())
    assert text.endswith(wanted().content())
    lines = text.splitlines()
    assert lines[:2] == ["flush table bridge chv", "flush set bridge chv port_mac"]
    assert "flush table inet chv" in lines
    assert "flush map inet chv profiles4" in lines
    assert not [line for line in lines if line.startswith("delete")]


def test_what_packets_have_filled_in_stays() -> None:
    assert "flush set bridge chv spoofed_mac" not in in_place(wanted(), as_loaded())


def test_what_is_nobodys_goes_sets_before_the_chains_that_they_lead_to() -> None:
    now = as_loaded()
    now[INET].chains |= {"intruder": True}
    now[INET].sets |= {"lead": StandingSet(is_map=True, is_filled=True)}
    lines = in_place(wanted(), now).splitlines()
    gone = [line for line in lines if line.startswith("delete")]
    assert gone == ["delete map inet chv lead", "delete chain inet chv intruder"]
    assert lines.index(gone[0]) > lines.index("flush table inet chv")


@pytest.mark.parametrize(
    "damage",
    [
        lambda now: now.pop(BRIDGE),
        lambda now: now.update({INET: replace(now[INET], comment="chv:1:another")}),
        lambda now: now.update({INET: replace(now[INET], is_plain=False)}),
        lambda now: now[INET].chains.update({"forward_in": False}),
        lambda now: now[INET].chains.update(dict.fromkeys(now[INET].chains, True)),
        lambda now: now[INET].sets.update({"profiles4": StandingSet(False, False)}),
    ],
)
def test_tables_that_are_not_what_we_made_are_replaced(damage: object) -> None:
    now = as_loaded()
    assert callable(damage)
    damage(now)
    assert in_place(wanted(), now) == ""
