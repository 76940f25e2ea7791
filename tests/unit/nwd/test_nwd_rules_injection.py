"""No value of a model gets into nft text but as what it is: every field, with every trick."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from chv.common.errors import InvalidArgument
from chv.common.wire.nwd_policy import Algorithm, Direction, IpProtocol
from chv.nwd.nft import log_prefix, rules, text
from chv.nwd.nft.model import Backend, Exposed, Group, NetworkRules, NicRules, Rule

UID = "0b7f7a4e-0000-4000-8000-00000000000"
FULL = NetworkRules(
    identity=f"chv:1:abc123:{UID}1",
    bridge="br0",
    uplink="up0",
    subnet="10.0.0.0/24",
    gateway="10.0.0.1",
    subnet6="fd00::/64",
    gateway6="fd00::1",
    source="198.51.100.1",
    source6="2001:db8::1",
    metadata=True,
    forwarders=("9.9.9.9", "2620:fe::fe"),
    nics=(
        NicRules(
            f"{UID}2", "t1", "02:00:00:00:00:01", ("10.0.0.2", "fd00::2"), (22,), (f"{UID}3",), 9,
            "198.51.100.2",
        ),
    ),
    groups=(
        Group(
            f"{UID}3",
            (
                Rule(
                    Direction.INGRESS, IpProtocol.TCP, ((80, 81),), ("10.0.0.0/8", "fd00::/8"),
                    (f"{UID}4",), 5, 6, log=True,
                ),
            ),
            log_dropped=True,
        ),
    ),
    exposures=(
        Exposed(
            f"{UID}5", IpProtocol.TCP, ("198.51.100.3", "2001:db8::3"), (80, 80),
            ("192.0.2.0/24", "2001:db8::/32"),
            tuple(Backend(each, 80) for each in ("10.0.0.2", "10.0.0.3", "fd00::2", "fd00::3")),
            Algorithm.SOURCE, (Backend("10.0.0.2", 8080),),
        ),
    ),
)  # fmt: skip
TRICKS = [
    "\n", "\r", "\0", '"', "'", "{", "}", ",", ";", "#", "$x", "\\", " ", "%eth0", "--\n", "\u0661",
    "\uff11", "\u202e", "; flush ruleset", " } add table inet x", '" drop comment "',
]  # fmt: skip
REFUSED = (InvalidArgument, ValueError, TypeError, KeyError, AttributeError)
NEVER_TEXT = ("nic_id", "l2", "metadata", "log", "log_dropped")


def changed(value: Any, trick: str, path: str = "") -> Iterator[tuple[str, Any]]:
    """Return the model with each of its values in turn made into text with the trick in it."""
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            for name, each in changed(getattr(value, field.name), trick, f"{path}.{field.name}"):
                yield name, replace(value, **{field.name: each})
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            for name, each in changed(item, trick, f"{path}[{index}]"):
                yield name, (*value[:index], each, *value[index + 1 :])
    else:
        yield path, f"{value}{trick}"
        yield path, trick


@pytest.mark.parametrize("trick", TRICKS)
def test_every_field_refuses_what_is_not_a_value_of_its_own(trick: str) -> None:
    assert rules.render(FULL).replacement()
    tried = 0
    for path, network in changed(FULL, trick):
        if path.rpartition(".")[2] in NEVER_TEXT:
            continue
        tried += 1
        with pytest.raises(REFUSED):
            rules.render(network)
            pytest.fail(path)
    assert tried > 80


@pytest.mark.parametrize("trick", TRICKS)
def test_what_is_never_text_changes_none(trick: str) -> None:
    plain = rules.render(FULL).replacement()
    harmless = replace(FULL, nics=(replace(FULL.nics[0], nic_id=trick),))
    assert rules.render(harmless).replacement() == plain


@pytest.mark.parametrize("number", [0, -1, 2**31, True + 2**40])
def test_numbers_have_bounds(number: int) -> None:
    with pytest.raises(ValueError, match="number"):
        text.count(number)
    with pytest.raises(ValueError, match="number"):
        text.port(number)


@pytest.mark.parametrize("group", ["x", UID, f"{UID}3\n", f"{UID}3 drop:in", '"'])
def test_a_log_prefix_is_of_an_id_alone(group: str) -> None:
    with pytest.raises(InvalidArgument):
        log_prefix.build(group, 1, Direction.INGRESS)
