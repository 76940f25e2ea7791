"""The kernel's own view of rules: small transactions end where a replacement would, atomically."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chv.common.ids import Ids
from chv.common.wire.nwd_policy import Direction, IpProtocol
from chv.nwd.nft import rules
from chv.nwd.nft.model import Exposed, Group, NetworkRules, NicRules, Rule
from chv.nwd.nft.ruleset import Nft
from tests.integration.nwd_policy_rig import needs_namespaces, nft_in
from tests.property.nwd_rules_strategies import networks, uid

pytestmark = [pytest.mark.root, needs_namespaces]
ALL = ("0.0.0.0/0", "::/0")


@contextmanager
def namespace(label: str) -> Iterator[str]:
    name = f"nwdn-{Ids().instance()}-{label}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[str, str]]:
    with namespace("a") as changed, namespace("b") as fresh:
        yield changed, fresh


def _plain(value: Any) -> Any:
    """What nft lists, without numbers of its own and with sets in order."""
    if isinstance(value, dict):
        return {
            key: _plain(each) for key, each in value.items() if key not in ("handle", "expires")
        }
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value


def seen(name: str) -> dict[str, Any]:
    """Return the tables: each rule in its place within its chain, all else in any order."""
    listing = subprocess.run(
        ["nsenter", f"--net=/run/netns/{name}", "nft", "-j", "-s", "list", "ruleset"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    found: dict[str, Any] = {"other": []}
    for item in json.loads(listing)["nftables"]:
        if "rule" in item:
            rule = _plain(item["rule"])
            found.setdefault(f"{rule['family']} {rule['chain']}", []).append(rule["expr"])
        elif "metainfo" not in item:
            for kind in ("set", "map"):
                if "elem" in item.get(kind, {}):
                    item[kind]["elem"].sort(key=json.dumps)
            found["other"].append(json.dumps(_plain(item), sort_keys=True))
    found["other"].sort()
    return found


def same_families(network: NetworkRules, other: NetworkRules) -> NetworkRules:
    """Without a change of the frame, which would be a replacement."""
    return replace(network, subnet6=other.subnet6, gateway6=other.gateway6)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(networks(), min_size=2, max_size=4))
def test_small_changes_end_where_a_replacement_does(
    pair: tuple[str, str], chain: list[NetworkRules]
) -> None:
    changed, fresh = pair
    before = rules.render(chain[0])
    nft_in(changed, before.replacement())
    for network in chain[1:]:
        wanted = rules.render(
            replace(network, subnet6=chain[0].subnet6, gateway6=chain[0].gateway6)
        )
        nft_in(changed, wanted.difference(before))
        before = wanted
    nft_in(fresh, before.replacement())
    assert seen(changed) == seen(fresh)


def test_a_transaction_with_a_fault_changes_nothing(pair: tuple[str, str]) -> None:
    name, _ = pair
    nic = NicRules(uid(1), "t1", "02:00:00:00:00:01", ("10.0.0.2",), groups=(uid(2),))
    network = NetworkRules("chv:1:abc123:x", "br0", "up0", "10.0.0.0/24", "10.0.0.1", nics=(nic,))
    before = rules.render(network)
    nft_in(name, before.replacement())
    stood = seen(name)
    wanted = rules.render(replace(network, groups=(group(2),), nics=()))
    with pytest.raises(AssertionError, match="No such file or directory"):
        nft_in(name, wanted.difference(before) + "delete chain inet chv nothing\n")
    assert seen(name) == stood


def group(number: int, *ports: int) -> Group:
    named = tuple((port, port) for port in ports)
    out = Rule(Direction.EGRESS, IpProtocol.ANY, cidrs=ALL)
    return Group(uid(number), (Rule(Direction.INGRESS, IpProtocol.TCP, named, ALL), out))


def crowded(count: int) -> NetworkRules:
    nics = tuple(
        NicRules(
            uid(number),
            f"t{number:010x}",
            f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}",
            (f"10.1.{number >> 8}.{number & 255}", f"fd00::{number:x}"),
            (22,),
            (uid(5000 + number % 20),),
        )
        for number in range(1, count + 1)
    )
    return NetworkRules(
        "chv:1:abc123:x", "br0", "up0", "10.1.0.0/16", "10.0.0.1", "fd00::/64", "fd00::1",
        nics=nics, groups=tuple(group(5000 + number, 80, 443) for number in range(20)),
    )  # fmt: skip


def changes_of(network: NetworkRules) -> list[NetworkRules]:
    """One NIC fewer, one rule of a group more, one exposure more."""
    exposed = Exposed(uid(1), IpProtocol.TCP, ("10.1.0.250",), (80, 80), ALL, (), checks=())
    return [
        replace(network, nics=network.nics[:-1]),
        replace(network, groups=(group(5000, 80, 443, 8080), *network.groups[1:])),
        replace(network, exposures=(exposed,)),
    ]


async def test_one_change_is_as_small_among_a_thousand_guests_as_among_a_hundred(
    pair: tuple[str, str],
) -> None:
    path = f"/run/netns/{pair[0]}"
    nft = Nft()
    few, many = crowded(100), crowded(1000)
    loaded = await nft.load(path, rules.render(many), None)
    try:
        for small, large in zip(changes_of(few), changes_of(many), strict=True):
            lines = [
                rules.render(changed).difference(rules.render(network)).splitlines()
                for changed, network in ((small, few), (large, many))
            ]
            assert len(lines[0]) == len(lines[1]) < 40
            assert not any(line.startswith("delete table") for line in lines[1])
            loaded = await nft.load(path, rules.render(large), loaded)
            loaded = await nft.load(path, rules.render(many), loaded)
            assert loaded is not None
    finally:
        nft.forget(path)
