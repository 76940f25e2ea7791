"""From the probe's lines to checks: what holds, and the words for what does not."""

from __future__ import annotations

import pytest

from chv.common.wire.network_resources import Network, NetworkSpec
from chv.common.wire.resource_base import ObjectMeta
from chv.host import verify_judge, verify_plan, verify_targets
from chv.host.verify import Check
from chv.host.verify_judge import Said
from chv.host.verify_plan import Names, Trial
from chv.probe.lines import parse_line

NAMES = Names("00c0ffee", "1.2.abc", uplink="198.18.0.1")
TRIAL = verify_plan.of_node(NAMES)
RECORDED = {"eth0": "192.0.2.11", "eth1": "192.0.2.12"}
MAC = [nic.mac for nic in TRIAL.nics]
START = ["boot protocol=1", "machine memory=133667840 cpus=1 cpus_max=1"]
NICS = [f"nic nic={n} dev=0:{n} mac={mac} link=1 mtu=1450" for n, mac in enumerate(MAC)]
LEASES = [
    f"lease nic={n} addr=192.0.2.1{n + 1} mask=255.255.255.0 router=192.0.2.1 dns=192.0.2.1 "
    'server=192.0.2.1 domain="d" mtu=1450 secs=60 us=900'
    for n in (0, 1)
]
DISK = 'disk disk=1 dev=3:0 serial="" sectors=32768 ro=0 flush=1 config_wce=1 wce=1 queue=128'
DONE = (
    "disk-done disk=1 plan={plan} ok={ok} sectors=64 bad={bad} first_bad=0 errors={errors} "
    "write_us=1 flush_us=1 read_us=1"
)


def check(nic: int, kind: str, target: str, result: str, addr: str = "0.0.0.0") -> str:
    return f"check nic={nic} kind={kind} target={target} result={result} ok=1 addr={addr} us=500000"


ANSWERS = [
    check(0, "ping", "router", "ok"),
    check(0, "dns", "verify-00c0ffee-vm.verify.internal", "ok", "192.0.2.11"),
    check(0, "dns", "record.verify.internal", "ok", "192.0.2.77"),
    check(0, "tcp", "router:53", "open"),
    check(0, "tcp", "169.254.169.254:80", "open"),
    check(0, "ping", "198.18.0.1", "ok"),
    check(0, "ping", "192.0.2.12", "timeout"),
    check(1, "tcp", "router:9", "timeout"),
    check(1, "ping", "192.0.2.11", "ok"),
]
WRITTEN = [DISK, DONE.format(plan="check", ok=1, bad=0, errors=0)]


def said(*lines: str) -> Said:
    return Said([parse_line(f"@{number} {line}") for number, line in enumerate(lines)])


def network(lines: list[str]) -> dict[str, Check]:
    found = verify_judge.network(said(*START, *lines), TRIAL, RECORDED)
    assert len({each.id for each in found}) == len(found)
    return {each.id: each for each in found}


def disks(*lines: str, trial: Trial = TRIAL) -> dict[str, Check]:
    return {each.id: each for each in verify_judge.disks(said(*START, *lines), trial)}


def test_all_holds_where_the_probe_says_so() -> None:
    assert all(each.ok for each in network([*NICS, *LEASES, *ANSWERS]).values())
    assert all(each.ok for each in disks(*WRITTEN).values())
    assert verify_judge.machine(said(*START), TRIAL).ok


@pytest.mark.parametrize(
    ("answer", "check_id", "words"),
    [
        (check(0, "ping", "router", "no-arp"), "gateway", "does not lead to the gateway"),
        (check(0, "ping", "router", "timeout"), "gateway", "a firewall rule drops"),
        (check(0, "dns", "record.verify.internal", "timeout"), "dns", "does not answer"),
        (check(0, "dns", "record.verify.internal", "nxdomain"), "dns", "no such name"),
        (
            check(0, "dns", "record.verify.internal", "ok", "192.0.2.78"),
            "dns",
            "the answer 192.0.2.78",
        ),
        (check(0, "tcp", "router:53", "timeout"), "firewall-open", "drops what is allowed"),
        (check(1, "ping", "192.0.2.11", "timeout"), "firewall-open", "drops what is allowed"),
        (check(0, "ping", "192.0.2.12", "ok"), "firewall-closed", "not in force"),
        (check(1, "tcp", "router:9", "refused"), "firewall-closed", "got a refusal"),
        (check(0, "ping", "198.18.0.1", "timeout"), "uplink", "`chv doctor`"),
        (check(0, "tcp", "169.254.169.254:80", "refused"), "metadata", "does not answer"),
    ],
)
def test_one_wrong_answer_fails_one_check_with_its_cause(
    answer: str, check_id: str, words: str
) -> None:
    fields = answer.split(" result=")[0]
    others = [each for each in ANSWERS if not each.startswith(fields)]
    assert len(others) == len(ANSWERS) - 1
    found = network([*NICS, *LEASES, *others, answer])
    assert {each.id for each in found.values() if not each.ok} == {check_id}
    assert words in found[check_id].message


def test_what_was_not_tried_is_a_failure() -> None:
    found = network([*NICS, *LEASES])
    assert [each.id for each in found.values() if each.ok] == ["dhcp"]
    assert "not tried" in found["gateway"].message


def test_no_lease_a_wrong_one_and_no_nic_are_told_apart() -> None:
    late = "lease-late nic=0 waited_us=4000000"
    found = network([*NICS, late, LEASES[1], check(0, "ping", "router", "no-target")])
    assert "eth0 got no lease within 4 s" in found["dhcp"].message
    assert "not tried, eth0 has no lease" in found["gateway"].message
    other = LEASES[0].replace("addr=192.0.2.11", "addr=192.0.2.99")
    assert "its record says 192.0.2.11" in network([*NICS, other, LEASES[1]])["dhcp"].message
    assert "sees no NIC eth0" in network([NICS[1], LEASES[1]])["dhcp"].message


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["disk-error disk=1 op=flush sector=0 seq=0 status=1 errors=1"], "a flush failed"),
        (["disk-error disk=1 op=write sector=64 seq=0 status=1 errors=1"], "a write failed"),
        ([DONE.format(plan="check", ok=0, bad=3, errors=0)], "3 of 64 sectors differ"),
        (
            ["disk-stall disk=1 op=write sector=64 seq=0 waited_us=2000000 status=255"],
            "no answer for 2 s",
        ),
        ([], "the probe said nothing"),
    ],
)
def test_a_disk_that_fails_says_how(lines: list[str], words: str) -> None:
    found = disks(DISK, *lines)
    assert not found["disk"].ok
    assert words in found["disk"].message
    assert "chv logs daemon/stord" in found["disk"].message


def test_a_disk_that_the_guest_would_not_flush_is_a_failure() -> None:
    found = disks(DISK.replace(" wce=1", " wce=0"), WRITTEN[1])
    assert found["disk"].ok
    assert "the write cache is off" in found["disk-cache"].message
    assert "no flush" in disks(DISK.replace(" flush=1", " flush=0"))["disk-cache"].message


def test_a_disk_that_is_not_there_is_named_by_its_size() -> None:
    assert "no disk of 16 MiB" in disks()["disk"].message


def test_what_a_reset_lost_is_told() -> None:
    there = said(*START, DISK, DONE.format(plan="verify", ok=1, bad=0, errors=0))
    lost = said(*START, DISK, DONE.format(plan="verify", ok=0, bad=5, errors=0))
    assert verify_judge.kept(there, TRIAL, "reset", "a reset")[0].ok
    message = verify_judge.kept(lost, TRIAL, "reset", "a reset")[0].message
    assert "5 of 64 sectors differ after a reset" in message
    assert not verify_judge.kept(said(*START), TRIAL, "reset", "a reset")[0].ok


def test_boots_are_told_apart() -> None:
    events = said(*START, DISK, *START).events
    assert [len(boot.events) for boot in verify_judge.boots(events)] == [3, 2]
    assert verify_judge.boots(events[1:3]) == []


def test_too_few_cpus_or_too_little_memory_is_a_failure() -> None:
    for line in (
        "machine memory=133667840 cpus=2 cpus_max=2",
        "machine memory=66000000 cpus=1 cpus_max=1",
    ):
        assert not verify_judge.machine(said("boot protocol=1", line), TRIAL).ok


def test_everything_that_is_made_carries_the_label_and_fits_the_command_line() -> None:
    for document in TRIAL.documents:
        assert document["metadata"]["labels"] == {verify_plan.LABEL: "1.2.abc"}
        assert document["metadata"]["name"].startswith("verify-00c0ffee-")
    assert len(TRIAL.first.render()) < 1024


def test_addresses_on_a_users_network_are_free_ones() -> None:
    spec = NetworkSpec(subnet="10.0.0.0/29")
    lan = Network(metadata=ObjectMeta(name="lan", namespace="default"), spec=spec)
    assert verify_targets.free_addresses(lan, frozenset({"10.0.0.6"}), 2) == [
        "10.0.0.5",
        "10.0.0.4",
    ]
    trial = verify_plan.of_network(NAMES, lan, frozenset({"10.0.0.6"}))
    assert [nic.address for nic in trial.nics] == ["10.0.0.5", "10.0.0.4"]
    assert trial.second is None
