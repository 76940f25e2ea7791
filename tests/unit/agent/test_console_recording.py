"""The serial recording: whole lines with times, rotation, survival of a full disk."""

from __future__ import annotations

import errno
import os
from datetime import datetime, tzinfo
from pathlib import Path

import pytest

from chv.agent.console import recording
from chv.agent.console.recording import Recording, tail_lines, was_held


def texts(directory: Path, count: int = 1000) -> list[str]:
    return [line.split(" ", 1)[1] for line in tail_lines(directory, count)]


def test_lines_are_whole_however_the_guest_sends_them(tmp_path: Path) -> None:
    log = Recording(tmp_path)
    for chunk in (b"he", b"llo\r\nwor", b"ld\n", b"end"):
        log.write(chunk)
    assert texts(tmp_path) == ["hello", "world"]
    log.close()
    assert texts(tmp_path) == ["hello", "world", "end"]


def test_every_line_carries_a_time(tmp_path: Path) -> None:
    log = Recording(tmp_path)
    log.write(b"one\n")
    log.close()
    assert tail_lines(tmp_path, 1)[0].split(" ")[0].endswith("Z")


def test_a_clock_set_back_puts_no_line_before_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Recording(tmp_path)
    log.write(b"one\n")

    class Earlier(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Earlier:
            return cls(2000, 1, 1, tzinfo=tz)

    monkeypatch.setattr(recording, "datetime", Earlier)
    log.write(b"two\n")
    log.close()
    one, two = tail_lines(tmp_path, 2)
    assert one.split(" ")[0] == two.split(" ")[0]


def test_endless_line_is_cut_and_bounded(tmp_path: Path) -> None:
    log = Recording(tmp_path)
    log.write(b"x" * (3 * recording.LINE_BYTES_MAX))
    assert len(log._partial) <= recording.LINE_BYTES_MAX
    log.close()
    assert sum(len(text) for text in texts(tmp_path)) == 3 * recording.LINE_BYTES_MAX


def test_rotation_keeps_two_files_within_their_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "FILE_BYTES_MAX", 500)
    log = Recording(tmp_path)
    for number in range(100):
        log.write(f"line {number}\n".encode())
    log.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["console.log", "console.log.1"]
    assert all(path.stat().st_size <= 500 for path in tmp_path.iterdir())
    assert texts(tmp_path)[-1] == "line 99"
    assert len(texts(tmp_path)) > 10


def test_reopened_recording_appends(tmp_path: Path) -> None:
    for text in (b"first\n", b"second\n"):
        log = Recording(tmp_path)
        log.write(text)
        log.close()
    assert texts(tmp_path) == ["first", "second"]


def test_tail_zero_is_nothing(tmp_path: Path) -> None:
    log = Recording(tmp_path)
    log.write(b"one\n")
    log.close()
    assert tail_lines(tmp_path, 0) == []


def test_full_disk_loses_output_and_not_the_recorder_and_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    log = Recording(tmp_path, told.append)
    good, log._fd = log._fd, os.open("/dev/full", os.O_WRONLY)
    log.write(b"lost\nlost too\n")
    assert told == ["No space left on device"]
    os.close(log._fd)
    log._fd = good
    log.write(b"there\nmore\n")
    assert texts(tmp_path) == ["--- 2 lines are lost: they could not be written", "there", "more"]
    log._fd = os.open("/dev/full", os.O_WRONLY)
    log.write(b"again\n")
    assert len(told) == 2
    os.close(log._fd)
    log._fd = good
    log.close()


def test_a_line_that_was_written_in_part_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Recording(tmp_path)
    log.write(b"whole\n")
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
        log.write(b"torn\n")
    assert texts(tmp_path) == ["whole"]
    log.write(b"next\n")
    log.close()
    assert texts(tmp_path) == ["whole", "--- 1 lines are lost: they could not be written", "next"]


def test_a_rotation_that_fails_keeps_what_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "FILE_BYTES_MAX", 60)
    log = Recording(tmp_path)
    log.write(b"first\n")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        log.write(b"too much for one file\n")
    assert texts(tmp_path) == ["first"]
    log.close()


def test_a_disk_without_room_for_the_file_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        log = Recording(tmp_path)
        log.write(b"lost\n")
    log.write(b"there\n")
    log.close()
    assert texts(tmp_path) == ["--- 1 lines are lost: they could not be written", "there"]


def test_a_socket_older_than_the_record_was_held_before(tmp_path: Path) -> None:
    serial = tmp_path / "serial"
    assert not was_held(tmp_path, serial)
    log = Recording(tmp_path)
    log.mark("attached")
    log.close()
    os.utime(tmp_path / "console.log", ns=(1, 1))
    serial.touch()
    assert not was_held(tmp_path, serial)
    later = serial.stat().st_ctime_ns + 1
    os.utime(tmp_path / "console.log", ns=(later, later))
    assert was_held(tmp_path, serial)
