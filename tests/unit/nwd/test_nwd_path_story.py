"""From what was seen of a packet to the answer, in words of the objects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from chv.common.wire.nwd_policy import Direction, IpProtocol, SecurityGroup, SecurityRule
from chv.nwd import path_story
from chv.nwd.deciding import Groups
from chv.nwd.kernel.nft_trace import Event, Kind
from chv.nwd.kernel.packet_socket import Sighting
from chv.nwd.kernel.packets import Packet
from chv.nwd.path_story import Scene, Trail
from chv.nwd.records import GroupRow, Nic

WEB = "01234567-0000-4000-8000-000000000001"
PACKET = Packet("tcp", "10.7.0.2", "1.1.1.1", 50000, 443, 9)
EAST = replace(PACKET, destination="10.7.0.3")
HOOKS = {
    ("chv", "prerouting"): "prerouting",
    ("chv", "forward_out"): "forward",
    ("chv", "forward_in"): "forward",
    ("chv", "input"): "input",
    ("foreign", "guard"): "forward",
    ("chv_host", "input"): "input",
}


def nic(name: str, address: str, *groups: str) -> Nic:
    return Nic(
        nic_id=f"6f1b2c3d-0000-4000-8000-{int(address.rpartition('.')[2]):012d}",
        network_id="n",
        vm_id="v",
        generation=1,
        hostname=name,
        mac="02:00:00:00:00:02",
        address=address,
        owner_uid=1,
        guest_ports=[],
        boot_id="b",
        groups=list(groups),
    )


def row(*rules: SecurityRule) -> GroupRow:
    group = SecurityGroup(group_id=WEB, name="web", tenant="t", rules=list(rules))
    return GroupRow(group=group, generation=1)


def allow(direction: Direction, **fields: Any) -> SecurityRule:
    fields = {"protocol": IpProtocol.TCP, "cidrs": ["0.0.0.0/0"]} | fields
    return SecurityRule(direction=direction, **fields)


ONE, TWO = nic("one", "10.7.0.2"), nic("two", "10.7.0.3")


def scene(packet: Packet = PACKET, *, own: Nic = ONE, **fields: Any) -> Scene:
    rows = fields.pop("rows", {})
    peers = fields.pop("peers", [TWO])
    taps = {"tap1": own, **{f"tap{number}": each for number, each in enumerate(peers, 2)}}
    return Scene(
        nic=own,
        tap="tap1",
        uplink="up0",
        host_uplink="u-1",
        host_table="chv_host",
        packet=packet,
        groups=Groups.of(rows, taps.values()),
        taps=taps,
        **fields,
    )


def event(chain: str, verdict: str = "continue", **changes: Any) -> Event:
    fields: dict[str, Any] = {"family": "ip", "table": "chv", "kind": Kind.RULE, "handle": 1}
    return Event(trace_id=1, chain=chain, verdict=verdict, **(fields | changes))


SPOOF_OK = event("prerouting", "accept", family="bridge")
OUT_OK, IN_OK = event("forward_out", "accept"), event("forward_in", "accept")


def trail(*events: Event, seen: tuple[Sighting, ...] = (), **fields: Any) -> Trail:
    return Trail(hooks=HOOKS, events=list(events), sightings=list(seen), **fields)


def leaves(link: str, packet: Packet = PACKET) -> Sighting:
    return Sighting(link, True, packet)


def test_spoofing_is_named_by_its_reason() -> None:
    found = path_story.tell(
        scene(), trail(event("drop_spoofed_mac", "drop", family="bridge")), None, ""
    )
    assert (found.verdict, found.decided_by) == (
        "dropped",
        "the rules against spoofing (spoofed_mac)",
    )


def test_a_denied_egress_names_the_groups() -> None:
    own = nic("one", "10.7.0.2", WEB)
    seen = trail(SPOOF_OK, event("forward_out", "goto"), event("not_allowed_out", "drop"))
    found = path_story.tell(scene(own=own, rows={WEB: row()}), seen, None, "via x dev up0")
    assert found.decided_by == (
        "no rule of its security groups (web) allows egress tcp 443 to 1.1.1.1"
    )
    assert [step.place for step in found.steps] == ["tap", "bridge", "route", "rules"]


def test_a_denied_ingress_is_the_receivers() -> None:
    seen = trail(SPOOF_OK, OUT_OK, event("not_allowed_in", "drop"))
    found = path_story.tell(scene(EAST), seen, None, "dev br0")
    assert found.verdict == "dropped"
    assert found.decided_by == (
        "two: it has no security groups, and nothing may then connect to it (tcp 443 from 10.7.0.2)"
    )


def test_an_address_of_nobody_is_told_as_such() -> None:
    packet = replace(PACKET, destination="10.7.0.99")
    seen = trail(SPOOF_OK, OUT_OK, event("not_allowed_in", "drop"))
    found = path_story.tell(scene(packet), seen, None, "dev br0")
    assert found.decided_by == "no guest of the network has the address 10.7.0.99"


def test_delivery_names_what_allows_at_both_ends() -> None:
    peer = nic("two", "10.7.0.3", WEB)
    rows = {WEB: row(allow(Direction.EGRESS), allow(Direction.INGRESS, ports=["400-500"]))}
    seen = trail(SPOOF_OK, OUT_OK, IN_OK, seen=(leaves("tap2", EAST),))
    found = path_story.tell(scene(EAST, rows=rows, peers=[peer]), seen, None, "dev br0")
    assert found.verdict == "delivered"
    assert found.decided_by == (
        "one, egress: it has no security groups, and may then open any connection;"
        " two, ingress: rule ingress[0] of security group web"
    )


def test_between_guests_of_an_open_network_no_group_is_named() -> None:
    seen = trail(SPOOF_OK, seen=(leaves("tap2", EAST),))
    found = path_story.tell(scene(EAST), seen, None, "dev br0")
    assert (found.verdict, found.decided_by) == ("delivered", path_story.BRIDGED)


def test_members_of_a_group_are_its_rules_peers() -> None:
    own, peer = nic("one", "10.7.0.2", WEB), nic("two", "10.7.0.3", WEB)
    rows = {WEB: row(allow(Direction.INGRESS, cidrs=[], groups=[WEB]))}
    groups = Groups.of(rows, [own, peer])
    assert groups.allowing(peer, Direction.INGRESS, EAST).startswith("rule ingress[0]")
    stranger = replace(EAST, source="10.7.0.9")
    assert groups.allowing(peer, Direction.INGRESS, stranger) == ""


def test_an_exposure_is_told_by_its_translation_and_its_refusals() -> None:
    asked = replace(PACKET, destination="10.7.0.200", destination_port=80)
    inner = replace(asked, destination="10.7.0.3", destination_port=8080)
    seen = trail(
        SPOOF_OK,
        event("prerouting", packet=asked),
        replace(OUT_OK, packet=inner),
        IN_OK,
        seen=(leaves("tap2", inner),),
    )
    found = path_story.tell(scene(asked, exposure="shop"), seen, None, "dev br0")
    assert found.decided_by == "exposure shop: its own sources decide, no group"
    nat = next(step for step in found.steps if step.place == "nat")
    assert nat.what == "destination 10.7.0.200:80 becomes 10.7.0.3:8080"
    for text, why in (
        ("meta l4proto tcp reject with tcp reset", "no healthy target, and refuses"),
        ("ip saddr != 10.8.0.0/24 drop", "no source 10.7.0.2"),
    ):
        drop = event("e_01234567_4", "drop")
        refused = trail(SPOOF_OK, drop, rules={("chv", "e_01234567_4", 1): text})
        told = path_story.tell(scene(asked, exposure="shop"), refused, None, "dev br0")
        assert told.decided_by == f"exposure shop has {why}"


def test_leaving_by_the_uplink_ends_with_the_hosts_word() -> None:
    translated = replace(PACKET, source="169.254.64.1")
    seen = trail(SPOOF_OK, OUT_OK, IN_OK, seen=(leaves("up0", translated),))
    outside = replace(translated, source="198.18.7.2")
    away = path_story.tell(scene(), seen, trail(seen=(leaves("wan0", outside),)), "via x dev up0")
    assert away.verdict == "forwarded"
    assert away.steps[-2].what == "source 169.254.64.1:50000 becomes 198.18.7.2:50000"
    assert away.steps[-1].what == "leaves the host"
    near, into = scene(uplinks={"u-1", "u-2"}), trail(seen=(leaves("u-2", translated),))
    other = path_story.tell(near, seen, into, "via x dev up0")
    assert other.steps[-1].what == "enters another network of the node"
    policy = event("guard", "drop", table="foreign", kind=Kind.POLICY, handle=0)
    dropped = path_story.tell(scene(), seen, trail(policy), "via x dev up0")
    assert dropped.decided_by == (
        "the host's own rules: `policy drop` in table foreign, chain guard"
    )
    own = event("from_tenant", "drop", table="chv_host")
    first = event("input", "jump", table="chv_host")
    refused = path_story.tell(scene(), seen, trail(first, own), "via x dev up0")
    assert refused.decided_by == "the node itself takes nothing but ping from guests"
    silent = path_story.tell(scene(), seen, trail(), "via x dev up0")
    assert silent.verdict == "unknown"


def test_what_the_gateway_takes_and_does_not() -> None:
    taken = path_story.tell(scene(), trail(SPOOF_OK, event("input", "accept")), None, "local")
    assert taken.verdict == "delivered"
    not_taken = path_story.tell(scene(), trail(SPOOF_OK, event("input", "drop")), None, "local")
    assert not_taken.decided_by == "the gateway takes DHCP, DNS, ping and metadata alone"
    public = scene(public=["1.1.1.1"])
    untaken = path_story.tell(public, trail(SPOOF_OK, event("input", "drop")), None, "local")
    assert untaken.decided_by == "no exposure takes tcp 443 at 1.1.1.1"


def test_no_route_and_no_answer_are_told_apart() -> None:
    lost = path_story.tell(scene(), trail(SPOOF_OK, event("destination_nat")), None, "")
    assert (lost.verdict, lost.decided_by) == ("dropped", "the network has no route to 1.1.1.1")
    silent = path_story.tell(scene(), trail(SPOOF_OK, OUT_OK, IN_OK), None, "dev br0")
    assert silent.verdict == "unknown"
    assert "nothing answers for 1.1.1.1" in silent.decided_by
    unseen = path_story.tell(scene(), trail(), None, "dev br0")
    assert unseen.decided_by == "it was not seen beyond the bridge"


@pytest.mark.parametrize(
    ("inner", "host", "settled"),
    [
        (trail(SPOOF_OK), None, False),
        (trail(SPOOF_OK, event("not_allowed_out", "drop")), None, True),
        (trail(seen=(leaves("tap2"),)), None, True),
        (trail(seen=(leaves("up0"),)), trail(), False),
        (trail(seen=(leaves("up0"),)), trail(seen=(leaves("u-1"),)), False),
        (trail(seen=(leaves("up0"),)), trail(seen=(leaves("wan0"),)), True),
        (trail(seen=(leaves("up0"),)), trail(event("guard", "drop", table="foreign")), True),
        (trail(seen=(Sighting("tap1", False, PACKET),)), None, False),
        (trail(event("c", "drop", table="chvx9")), None, False),
    ],
)
def test_waiting_ends_with_the_last_thing_that_matters(
    inner: Trail, host: Trail | None, settled: bool
) -> None:
    assert path_story.is_settled(scene(), inner, host) is settled


def test_an_answer_is_never_too_long_for_the_wire() -> None:
    drop = event("odd", "drop")
    seen = trail(SPOOF_OK, drop, rules={("chv", "odd", 1): "x" * 5000})
    assert len(path_story.tell(scene(), seen, None, "").decided_by) <= 256
