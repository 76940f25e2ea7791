"""Firewalls that would keep guests from the outside are found with the command that helps."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from chv.common.ids import Ids
from chv.host.forward_checks import Blocking, blocking, remedy

BASE: dict[str, Any] = {"type": "filter", "hook": "forward", "prio": 0, "policy": "accept"}


def chain(table: str, name: str, family: str = "ip", **more: Any) -> dict[str, Any]:
    return {"chain": {"family": family, "table": table, "name": name, **more}}


def rule(table: str, name: str, *expressions: dict[str, Any], family: str = "ip") -> dict[str, Any]:
    return {"rule": {"family": family, "table": table, "chain": name, "expr": list(expressions)}}


def found(*objects: dict[str, Any]) -> list[Blocking]:
    return blocking([{"metainfo": {}}, *objects])


def test_docker_is_found_with_the_chain_that_it_leaves_to_others() -> None:
    (docker,) = found(
        chain("filter", "FORWARD", **{**BASE, "policy": "drop"}), chain("filter", "DOCKER-USER")
    )
    assert (docker.owner, docker.how) == ("docker", "policy drop")
    assert remedy(docker, ["cabcdef"]) == (
        "iptables -I DOCKER-USER -i cabcdef+ -j ACCEPT; "
        "iptables -I DOCKER-USER -o cabcdef+ -j ACCEPT"
    )


def test_ufw_is_found_in_both_families() -> None:
    chains = [
        chain("filter", name, family, **more)
        for family in ("ip", "ip6")
        for name, more in (
            ("FORWARD", {**BASE, "policy": "drop"}),
            ("ufw-before-forward", dict[str, Any]()),
        )
    ]
    assert [(each.family, each.owner) for each in found(*chains)] == [("ip", "ufw"), ("ip6", "ufw")]
    assert remedy(found(*chains)[0], ["cabcdef"]).startswith("ufw route allow in on cabcdef+; ")


def test_firewalld_rejects_by_its_last_rule_under_a_policy_that_accepts() -> None:
    (firewalld,) = found(
        chain("firewalld", "filter_FORWARD", "inet", **BASE),
        rule("firewalld", "filter_FORWARD", {"jump": {"target": "x"}}, family="inet"),
        rule("firewalld", "filter_FORWARD", {"reject": {"type": "icmpx"}}, family="inet"),
    )
    assert firewalld.how == "a rule that rejects all the rest"
    assert "--zone=trusted --add-interface=cabcdef+" in remedy(firewalld, ["cabcdef"])


def test_any_other_gets_rules_of_nft() -> None:
    (other,) = found(
        chain("mine", "fwd", "inet", **BASE),
        rule("mine", "fwd", {"counter": {}}, {"drop": None}, family="inet"),
    )
    assert remedy(other, ["cabcdef"]) == (
        'nft insert rule inet mine fwd iifname "cabcdef*" accept; '
        'nft insert rule inet mine fwd oifname "cabcdef*" accept'
    )


@pytest.mark.parametrize(
    "objects",
    [
        [],
        [chain("filter", "FORWARD", **BASE)],
        [chain("filter", "INPUT", **{**BASE, "hook": "input", "policy": "drop"})],
        [chain("chv-abcdef", "forward", "inet", **{**BASE, "policy": "drop"})],
        [
            chain("mine", "fwd", **BASE),
            rule("mine", "fwd", {"match": {"left": 1}}, {"drop": None}),
            rule("mine", "other", {"drop": None}),
        ],
    ],
    ids=["nothing", "accept", "input", "ours", "only-some"],
)
def test_what_lets_guests_through_is_no_finding(objects: list[dict[str, Any]]) -> None:
    assert found(*objects) == []


# --- for real, in a namespace of the test's own


@pytest.fixture
def netns() -> Iterator[str]:
    name = f"chvtest-{Ids().nonce()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    yield name
    subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("nft"), reason="needs root and nft")
def test_the_doctor_sees_a_real_chain_and_leaves_it_as_it_is(netns: str) -> None:
    inside = ["ip", "netns", "exec", netns]
    doctor = [*inside, sys.executable, "-m", "chv.cli", "doctor", "--json"]

    def checks() -> dict[str, Any]:
        done = subprocess.run(doctor, capture_output=True, check=False)
        return {each["id"]: each for each in msgspec.json.decode(done.stdout)["checks"]}

    assert checks()["forwarding"]["status"] == "ok"
    rules = b"""
        add table inet mine
        add chain inet mine through { type filter hook forward priority 0; policy accept; }
        add rule inet mine through counter reject
    """
    subprocess.run([*inside, "nft", "-f", "-"], input=rules, check=True)
    before = subprocess.run([*inside, "nft", "list", "ruleset"], capture_output=True, check=True)
    seen = checks()["forwarding-inet-mine-through"]
    assert seen["status"] == "warning"
    assert 'nft insert rule inet mine through iifname "c' in seen["remedy"]
    after = subprocess.run([*inside, "nft", "list", "ruleset"], capture_output=True, check=True)
    assert after.stdout == before.stdout
