"""The log of a network: pages, numbers, loss, and what a prefix is read as."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from chv.common.wire.nwd_policy import (
    Direction,
    GetNetworkLog,
    IpProtocol,
    LogEntry,
    SecurityGroup,
    SecurityRule,
)
from chv.nwd.kernel import nflog, packets
from chv.nwd.kernel.packets import Packet
from chv.nwd.packet_log import ENTRIES_MAX, Ring, entry_of, telling
from chv.nwd.records import Records

NETWORK = "6f1b2c3d-0000-4000-8000-000000000001"
GROUP = "01234567-0000-4000-8000-000000000002"
NIC = "6f1b2c3d-0000-4000-8000-000000000003"


def entry(number: int, nic_id: str = "") -> LogEntry:
    return LogEntry(time="", network_id=NETWORK, verdict="allowed", rule=number, nic_id=nic_id)


def ask(**fields: Any) -> GetNetworkLog:
    return GetNetworkLog(network_id=NETWORK, **fields)


def filled(count: int, base: int = 1000) -> Ring:
    ring = Ring(base=base)
    for number in range(count):
        ring.add(entry(number))
    return ring


def rules_of(reply: Any) -> list[int]:
    return [each.rule for each in reply.entries]


def test_a_first_reader_gets_the_newest() -> None:
    reply = filled(10).page(ask(lines_max=3))
    assert rules_of(reply) == [7, 8, 9]
    assert reply.next == 1010


def test_a_reader_goes_on_where_it_was() -> None:
    ring = filled(10)
    seen: list[int] = []
    after = 1002
    while len(found := ring.page(ask(after=after, lines_max=3)).entries):
        seen += [each.rule for each in found]
        after = ring.page(ask(after=after, lines_max=3)).next
    assert seen == [2, 3, 4, 5, 6, 7, 8, 9]


def test_a_reader_of_an_earlier_process_begins_anew() -> None:
    ring = filled(3)
    assert rules_of(ring.page(ask(after=999))) == [0, 1, 2]
    assert rules_of(ring.page(ask(after=5000))) == [0, 1, 2]


def test_what_a_slow_reader_missed_counts_as_lost() -> None:
    ring = filled(ENTRIES_MAX + 5)
    reply = ring.page(ask(after=1002, lines_max=10))
    assert rules_of(reply)[0] == 5
    assert reply.lost == 3


def test_a_page_of_one_nic_goes_past_the_others() -> None:
    ring = Ring(base=1)
    for number in range(6):
        ring.add(entry(number, NIC if number % 2 else "other"))
    reply = ring.page(ask(nic_id=NIC, after=1, lines_max=2))
    assert rules_of(reply) == [1, 3]
    assert rules_of(ring.page(ask(nic_id=NIC, after=reply.next, lines_max=2))) == [5]


def test_a_gap_in_the_kernels_numbers_is_what_was_lost() -> None:
    ring = Ring()
    for number in (0, 1, 5, 6, 2**32 - 1, 0):
        ring.count(number)
    assert ring.lost == 3 + (2**32 - 1 - 7)


# --- entries
def records(*rules: SecurityRule, log_dropped: bool = False) -> Records:
    group = SecurityGroup(
        group_id=GROUP, name="web", tenant="t", rules=list(rules), log_dropped=log_dropped
    )
    nic = SimpleNamespace(
        nic_id=NIC, network_id=NETWORK, addresses=("10.7.0.2", "fd07::2"), groups=[GROUP]
    )
    return cast(
        Records,
        SimpleNamespace(
            groups={GROUP: SimpleNamespace(group=group)},
            nics={NIC: nic},
            nics_of=lambda _: [nic],
        ),
    )


def logged(prefix: str, packet: bytes) -> nflog.Logged:
    return nflog.Logged(prefix, packet, 1.5, 0)


@pytest.mark.parametrize(("source", "target"), [("10.7.0.2", "1.1.1.1"), ("fd07::2", "2001::1")])
def test_an_allowed_packet_is_told_with_its_group_rule_and_nic(source: str, target: str) -> None:
    packet = packets.build(Packet("tcp", source, target, 5000, 443, 1))
    found = entry_of(logged("chv:01234567:2:out ", packet), NETWORK, records())
    assert found == LogEntry(
        time="1970-01-01T00:00:01.500Z",
        network_id=NETWORK,
        group_id=GROUP,
        rule=2,
        verdict="allowed",
        direction="egress",
        nic_id=NIC,
        protocol="tcp",
        source=source,
        source_port=5000,
        destination=target,
        destination_port=443,
    )


def test_a_dropped_packet_has_no_rule_and_the_receivers_nic() -> None:
    packet = packets.build(Packet("udp", "1.1.1.1", "10.7.0.2", 53, 99, 1))
    found = entry_of(logged("chv:01234567:drop:in ", packet), NETWORK, records())
    assert found is not None
    assert (found.verdict, found.rule, found.nic_id) == ("dropped", -1, NIC)


@pytest.mark.parametrize("prefix", ["", "other", "chv:zz:1:in ", "chv:01234567:1:in \x1b[2J"])
def test_prefixes_of_others_are_no_entries(prefix: str) -> None:
    assert entry_of(logged(prefix, b""), NETWORK, records()) is None


def test_a_packet_that_is_none_is_told_without_ends() -> None:
    found = entry_of(logged("chv:01234567:0:in ", b"\x00"), NETWORK, records())
    assert found is not None
    assert (found.protocol, found.source, found.nic_id) == ("", "", "")


RULE = SecurityRule(
    direction=Direction.EGRESS, protocol=IpProtocol.TCP, cidrs=["0.0.0.0/0"], log=False
)
TELLING = SecurityRule(
    direction=Direction.EGRESS, protocol=IpProtocol.TCP, cidrs=["0.0.0.0/0"], log=True
)


@pytest.mark.parametrize(
    ("rules", "log_dropped", "told"),
    [([RULE], False, False), ([RULE, TELLING], False, True), ([], True, True), ([], False, False)],
)
def test_only_networks_with_something_to_tell_are_listened_to(
    rules: list[SecurityRule], log_dropped: bool, told: bool
) -> None:
    found = records(*rules, log_dropped=log_dropped)
    assert telling(found) == ({NETWORK} if told else set())
