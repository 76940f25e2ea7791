"""What `chv net` takes and prints; a pcap as its readers need it."""

from __future__ import annotations

import io
import os
import socket
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from chv.cli import pcap
from chv.cli.commands import net
from chv.cli.parser import build_parser
from chv.common.errors import InvalidArgument
from chv.common.wire import agent_watch as api
from chv.common.wire.nwd_policy import LogEntry, NicStats

ENTRY = LogEntry(
    time="2026-01-01T00:00:00.000Z",
    network_id="n",
    group_id="g",
    rule=3,
    verdict="allowed",
    direction="egress",
    nic_id="i",
    protocol="tcp",
    source="10.7.0.2",
    source_port=5000,
    destination="2001:db8::1",
    destination_port=443,
)
NAMES = {"g": "web", "i": "hello/eth0", "g:3": "egress[1]"}


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("1.1.1.1:443", ("1.1.1.1", 443)),
        ("web.example:80", ("web.example", 80)),
        ("web", ("web", 0)),
        ("[2001:db8::1]:443", ("2001:db8::1", 443)),
        ("[2001:db8::1]", ("2001:db8::1", 0)),
        ("2001:db8::1", ("2001:db8::1", 0)),
    ],
)
def test_a_target_is_a_host_and_a_port(text: str, target: tuple[str, int]) -> None:
    assert net.parse_target(text) == target


@pytest.mark.parametrize("text", ["", ":80", "a:99999", "a:b", "a:80 ", "[::1]80", "a:-1"])
def test_what_is_no_target_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidArgument, match="HOST:PORT"):
        net.parse_target(text)


def test_an_entry_is_one_line_with_names() -> None:
    assert net.log_line(ENTRY, NAMES) == (
        "2026-01-01T00:00:00.000Z allowed egress  hello/eth0 tcp"
        " 10.7.0.2:5000 -> [2001:db8::1]:443 (group web egress[1])"
    )
    dropped = msgspec.structs.replace(ENTRY, rule=-1, verdict="dropped", protocol="")
    assert net.log_line(dropped, {}).endswith("i ? 10.7.0.2:5000 -> [2001:db8::1]:443 (group g)")


def test_no_control_character_reaches_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = msgspec.structs.replace(ENTRY, protocol="\x1b[2J\n\x07\u202e")
    net._print_chunk(api.NetworkLogChunk(entries=[evil], names=NAMES))
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert not set(printed) & set("\x1b\x07\u202e")


def test_lost_packets_are_said_beside_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    net._print_chunk(api.NetworkLogChunk(entries=[ENTRY], names=NAMES, lost=7))
    captured = capsys.readouterr()
    assert "7 packets" in captured.err
    assert "lost" not in captured.out


def test_a_line_of_json_has_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    net._print_json(api.NetworkLogChunk(entries=[ENTRY], names=NAMES))
    found = msgspec.json.decode(capsys.readouterr().out)
    assert (found["group"], found["nic"], found["place"]) == ("web", "hello/eth0", "egress[1]")


def test_drops_are_shown_by_reason_the_most_first() -> None:
    stats = NicStats(nic_id="i", rx_bytes=5, tx_dropped=2, drops={"a": 1, "b": 9, "none": 0})
    row = net.stats_row(
        api.VmNicStats(namespace="d", vm="hello", interface="eth0", network="lan", stats=stats)
    )
    assert row == ["hello", "eth0", "lan", "5", "0", "0", "0", "2", "b 9, a 1"]


@pytest.mark.parametrize("target", ["pod/x", "vm/", "network/"])
def test_statistics_are_of_a_vm_or_a_network(target: str) -> None:
    arguments = build_parser().parse_args(["net", "stats", target])
    with pytest.raises(InvalidArgument):
        net._ask(cast(Any, None), arguments)


# --- pcap
def frames_of(data: bytes) -> list[bytes]:
    found, offset = [], 24
    while offset < len(data):
        seconds, micros, kept, length = struct.unpack_from("=IIII", data, offset)
        assert seconds > 0
        assert micros < 1_000_000
        assert kept == length
        found.append(data[offset + 16 : offset + 16 + kept])
        offset += 16 + kept
    return found


class Out(io.BytesIO):
    """A stream with a descriptor, as a file or a pipe has."""

    def __init__(self) -> None:
        super().__init__()
        self.reader, self.writer = os.pipe()

    def fileno(self) -> int:
        return self.writer


@pytest.fixture
def pair() -> Any:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with left, right:
        yield left, right


def copied(source: socket.socket, limits: pcap.Limits) -> tuple[Out, pcap.Counter]:
    out, counter = Out(), pcap.Counter()
    pcap.write_header(out)
    pcap.copy(source, out, limits, counter)
    return out, counter


def test_a_capture_ends_with_its_count(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    for number in range(5):
        right.send(bytes(14 + number))
    out, counter = copied(left, pcap.Limits(count_max=3))
    data = out.getvalue()
    assert struct.unpack_from("=IHH", data) == (0xA1B2C3D4, 2, 4)
    assert struct.unpack_from("=II", data, 16) == (pcap.FRAME_BYTES_MAX, 1)
    assert [len(each) for each in frames_of(data)] == [14, 15, 16]
    assert counter.frames == 3


def test_a_capture_ends_with_its_time(pair: tuple[socket.socket, socket.socket]) -> None:
    out, counter = copied(pair[0], pcap.Limits(duration_s=0.05))
    assert (len(out.getvalue()), counter.frames) == (24, 0)


def test_a_capture_ends_when_its_reader_leaves(pair: tuple[socket.socket, socket.socket]) -> None:
    out, counter = Out(), pcap.Counter()
    os.close(out.reader)
    worker = threading.Thread(
        target=pcap.copy, args=(pair[0], out, pcap.Limits(duration_s=30), counter)
    )
    worker.start()
    worker.join(5)
    assert not worker.is_alive()


def test_a_file_is_for_its_owner_alone_and_an_unwritable_one_is_refused(tmp_path: Path) -> None:
    with net._destination(str(tmp_path / "x.pcap")) as out:
        out.write(b"x")
    assert (tmp_path / "x.pcap").stat().st_mode & 0o777 == 0o600
    with (
        pytest.raises(InvalidArgument, match="cannot write"),
        net._destination(str(tmp_path / "none" / "x")),
    ):
        pass


def test_a_terminal_as_a_file_is_refused() -> None:
    leader, follower = os.openpty()
    try:
        with (
            pytest.raises(InvalidArgument, match="terminal"),
            net._destination(os.ttyname(follower)),
        ):
            pass
    finally:
        os.close(leader)
        os.close(follower)


def test_standard_output_that_is_a_terminal_is_refused_before_anybody_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pcap, "is_terminal", lambda _: True)
    arguments = build_parser().parse_args(["--socket", "/nowhere", "net", "capture", "hello"])
    with pytest.raises(InvalidArgument, match="terminal"):
        net.capture(arguments)


def test_loss_is_nothing_where_the_kernel_does_not_count() -> None:
    assert pcap.lost(cast(socket.socket, SimpleNamespace(getsockopt=_raise))) == 0


def _raise(*_: object) -> bytes:
    raise OSError
