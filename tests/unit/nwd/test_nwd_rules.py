"""The rules: what they say, that the frame is the same for any NIC, and what cannot get in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chv.common.errors import InvalidArgument
from chv.nwd.nft import rules, text
from chv.nwd.nft.gateway import GUEST_PORTS
from chv.nwd.nft.model import NetworkRules, NicRules
from chv.nwd.nft.spoof import PORT_ADDRESS, PORT_MAC

ONE = NicRules("n1", "t0000000001", "02:00:00:00:00:01", ("10.0.0.2",), (22, 80))
TWO = NicRules("n2", "t0000000002", "02:00:00:00:00:02", ("10.0.0.3",))
NETWORK = NetworkRules(
    identity="chv:1:abc123:0b7f7a4e-0000-4000-8000-000000000001",
    bridge="br0",
    uplink="up0",
    subnet="10.0.0.0/24",
    gateway="10.0.0.1",
    forwarders=("9.9.9.9",),
)


def test_nics_are_elements_and_never_rules() -> None:
    empty, full = rules.render(NETWORK), rules.render(replace(NETWORK, nics=(ONE, TWO)))
    assert empty.frame == full.frame
    assert empty.digest != full.digest
    assert full.all_elements()[PORT_MAC] == {
        '"t0000000001" . 02:00:00:00:00:01',
        '"t0000000002" . 02:00:00:00:00:02',
    }
    assert full.all_elements()[PORT_ADDRESS] == {
        '"t0000000001" . 02:00:00:00:00:01 . 10.0.0.2',
        '"t0000000002" . 02:00:00:00:00:02 . 10.0.0.3',
    }
    assert full.all_elements()[GUEST_PORTS[0]] == {"10.0.0.2 . 22", "10.0.0.2 . 80"}


def test_one_nic_more_is_a_few_elements() -> None:
    before = rules.render(replace(NETWORK, nics=(ONE,)))
    after = rules.render(replace(NETWORK, nics=(ONE, TWO)))
    change = after.difference(before).splitlines()
    assert change
    assert all(line.startswith("add element") and "t0000000001" not in line for line in change)
    back = before.difference(after).splitlines()
    assert back
    assert all(line.startswith("delete element") for line in back)
    assert after.difference(after) == ""


def test_a_replacement_deletes_and_makes_in_one_transaction() -> None:
    lines = rules.render(NETWORK).replacement().splitlines()
    assert lines[:4] == [
        "add table bridge chv",
        "delete table bridge chv",
        "add table inet chv",
        "delete table inet chv",
    ]


def test_a_network_without_uplink_has_no_way_out() -> None:
    frame = rules.render(replace(NETWORK, uplink="")).frame
    assert "up0" not in frame
    assert "masquerade" not in frame
    assert "9.9.9.9" not in frame


def test_the_comment_carries_identity_and_a_digest_of_the_frame() -> None:
    frame = rules.render(NETWORK).frame
    other = rules.render(replace(NETWORK, gateway="10.0.0.254")).frame
    comments = [line.strip() for line in frame.splitlines() if "comment" in line]
    assert comments[0].startswith(f'comment "{NETWORK.identity}:')
    assert len(set(comments)) == 1
    assert comments[0] not in other


@pytest.mark.parametrize(
    "nic",
    [
        replace(ONE, tap='t" drop; }'),
        replace(ONE, tap="a\nb"),
        replace(ONE, mac="02:00:00:00:00:01 }"),
        replace(ONE, addresses=("10.0.0.2; flush ruleset",)),
        replace(ONE, addresses=("10.0.0.2\n",)),
        replace(ONE, guest_ports=(0,)),
        replace(ONE, guest_ports=(70000,)),
    ],
)
def test_nothing_but_checked_values_becomes_text(nic: NicRules) -> None:
    with pytest.raises((InvalidArgument, ValueError)):
        rules.render(replace(NETWORK, nics=(nic,)))


@pytest.mark.parametrize(
    "network",
    [
        replace(NETWORK, identity='x" }'),
        replace(NETWORK, bridge="br0 }"),
        replace(NETWORK, subnet="10.0.0.0/24 }"),
        replace(NETWORK, gateway="$x"),
        replace(NETWORK, forwarders=("9.9.9.9 }",)),
    ],
)
def test_a_network_cannot_carry_text_of_its_own(network: NetworkRules) -> None:
    with pytest.raises((InvalidArgument, ValueError)):
        rules.render(network)


def test_a_digest_does_not_depend_on_the_order_of_elements() -> None:
    left = rules.render(replace(NETWORK, nics=(ONE, TWO)))
    right = rules.render(replace(NETWORK, nics=(TWO, ONE)))
    assert left.digest == right.digest
    assert len(text.digest("x")) == 16
