"""A daemon's own log: bounded, nothing lost, nobody else's file touched."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chv.common import log_rotation, logs


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_rotation, "FILE_BYTES_MAX", 1000)


@pytest.fixture(name="path")
def log_path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "stord.log"
    with path.open("a") as stream:
        logs.setup("stord", "info", stream)
        yield path
    logs.setup("stord", "info", sys.stderr)


def numbers(*paths: Path) -> list[int]:
    lines = [line for path in paths for line in path.read_text().splitlines()]
    return [int(line.rpartition(":")[2].rstrip("}")) for line in lines]


def test_a_full_log_goes_on_in_a_new_file_and_one_older_is_kept(path: Path) -> None:
    log = logs.get("chv.x")
    older = path.with_name("stord.log.1")
    for number in range(100):
        log.info("e", number=number)
    assert sorted(path.parent.iterdir()) == [path, older]
    kept = numbers(older, path)
    assert kept == list(range(kept[0], 100))
    assert older.stat().st_size < 1200
    assert path.stat().st_size < 1200
    assert path.stat().st_mode == older.stat().st_mode


def test_a_rotation_that_fails_loses_no_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    log = logs.get("chv.x")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        for number in range(30):
            log.info("e", number=number)
    assert numbers(path) == list(range(30))
    log.info("e", number=30)
    assert numbers(path.with_name("stord.log.1")) == list(range(31))


def test_a_file_of_another_name_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    with path.open("a") as stream:
        logs.setup("stord", "info", stream)
        for number in range(30):
            logs.get("chv.x").info("e", number=number)
        logs.setup("stord", "info", sys.stderr)
    assert [each.name for each in tmp_path.iterdir()] == ["mine.txt"]
