"""The serial recording: whole lines with times, rotation, survival of a full disk."""

from __future__ import annotations

import os
from datetime import datetime, tzinfo
from pathlib import Path

import pytest

from chv.agent.console import recording
from chv.agent.console.recording import Recording, tail_lines


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


def test_full_disk_loses_output_and_not_the_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Recording(tmp_path)
    os.close(log._fd)
    log._fd = os.open("/dev/full", os.O_WRONLY)
    log.write(b"lost\n")
    log.close()
    assert texts(tmp_path) == []
