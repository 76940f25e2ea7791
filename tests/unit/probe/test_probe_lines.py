"""What the probe's lines become, and what damage to them costs."""

from __future__ import annotations

import pytest

from chv.probe.device_events import Acked, Check, Disk, DiskPlanned, Lease
from chv.probe.events import Beat, Boot, Command, Cpu, CpuTry, Done, Noise
from chv.probe.lines import LINE_BYTES_MAX, LineReader, parse_line

DISK = (
    '@43037 disk disk=0 dev=00:01.0 serial="vol-a" sectors=32768 ro=0 flush=1 config_wce=1 wce=1'
    " queue=128"
)
LEASE = (
    "@44793 lease nic=0 addr=10.0.2.15 mask=255.255.255.0 router=10.0.2.2 dns=10.0.2.3"
    ' server=10.0.2.2 domain="" mtu=0 secs=86400 us=3106'
)


def test_a_line_becomes_the_event_of_its_name() -> None:
    assert parse_line("@0 boot protocol=1") == Boot(at_us=0, protocol=1)
    assert parse_line(DISK) == Disk(
        at_us=43037, disk=0, dev="00:01.0", serial="vol-a", sectors=32768, ro=False, flush=True,
        config_wce=True, wce=True, queue=128,
    )  # fmt: skip


def test_an_empty_quoted_value_is_an_empty_text() -> None:
    lease = parse_line(LEASE)
    assert isinstance(lease, Lease)
    assert lease.domain == ""
    assert lease.us == 3106


def test_a_quoted_value_keeps_its_blanks() -> None:
    command = parse_line('@5 command text="disk=check net=ping:10.0.0.1 end=off"')
    assert command == Command(at_us=5, text="disk=check net=ping:10.0.0.1 end=off")


def test_a_key_that_is_a_python_keyword_has_a_name_of_its_own() -> None:
    line = "@1 disk-planned disk=0 plan=writer first=64 sectors=8 seed=3 depth=4 from=7"
    planned = parse_line(line)
    assert isinstance(planned, DiskPlanned)
    assert planned.from_seq == 7


def test_what_an_instruction_left_is_optional() -> None:
    assert parse_line("@1 cpu-try insn=popcnt") == CpuTry(at_us=1, insn="popcnt")
    assert parse_line("@2 cpu insn=popcnt result=ok") == Cpu(at_us=2, insn="popcnt", result="ok")
    assert parse_line("@2 cpu insn=movbe result=fault vector=6") == Cpu(
        at_us=2, insn="movbe", result="fault", vector=6
    )


def test_a_key_that_a_newer_guest_adds_is_ignored() -> None:
    assert parse_line("@0 boot protocol=1 colour=blue") == Boot(at_us=0, protocol=1)


@pytest.mark.parametrize(
    "text",
    [
        "SeaBIOS (version 1.16.2)",
        "@12 unheard-of thing=1",
        "@12 boot",
        "@12 boot protocol=one",
        "@x boot protocol=1",
        "@12 cpu insn=popcnt result=maybe",
        "@12 acked disk=0 seq=12",
        "@99999999999999999999 beat n=1",
        '@5 command text="cut',
        "@",
    ],
)
def test_what_is_no_event_is_noise(text: str) -> None:
    assert parse_line(text) == Noise(at_us=0, text=text)


def test_a_line_that_was_cut_short_costs_itself_alone() -> None:
    reader = LineReader()
    cut = b"@10 acked disk=0 seq=12@20 acked disk=0 seq=99 us=5\n"
    assert reader.feed(cut) == [Acked(at_us=20, disk=0, seq=99, us=5)]


def test_firmware_before_the_first_line_does_not_hide_it() -> None:
    reader = LineReader()
    assert reader.feed(b"Booting from ROM...@0 boot protocol=1\n") == [Boot(at_us=0, protocol=1)]


def test_bytes_may_come_in_any_pieces() -> None:
    said = (DISK + "\r\n" + LEASE + "\n@9 beat n=1\n").encode()
    whole = LineReader().feed(said)
    reader = LineReader()
    pieces = [event for at in range(len(said)) for event in reader.feed(said[at : at + 1])]
    assert pieces == whole
    assert len(whole) == 3


def test_an_endless_line_does_not_fill_the_memory() -> None:
    reader = LineReader()
    events = reader.feed(b"x" * (LINE_BYTES_MAX + 1))
    assert [type(event) for event in events] == [Noise]
    assert reader.feed(b"\n@1 beat n=1\n") == [Beat(at_us=1, n=1)]


def test_bytes_that_are_no_text_are_noise() -> None:
    events = LineReader().feed(b"\xff\xfe\x00\n@3 done ok=0 passed=1 failed=2\n")
    assert events[1] == Done(at_us=3, ok=False, passed=1, failed=2)


def test_a_check_says_whether_its_result_was_wanted() -> None:
    line = "@7 check nic=0 kind=tcp target=10.0.0.1:81 result=refused ok=1 addr=10.0.0.1 us=900"
    check = parse_line(line)
    assert isinstance(check, Check)
    assert check.ok
    assert check.target == "10.0.0.1:81"
