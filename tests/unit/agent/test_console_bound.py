"""The bound over all recordings of a node: which parts go, which stay, and when it is looked at."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chv.agent.console import bound as module
from chv.agent.console.bound import RecordingsBound, make_room
from chv.agent.console.disk import Disk
from chv.agent.console.recording import Recording
from tests.helpers import wait_until


def vm(vms: Path, name: str, current: int, older: int = 0, age: int = 0) -> Path:
    directory = vms / name
    directory.mkdir(parents=True)
    (directory / "console.log").write_bytes(b"x" * current)
    if older:
        part = directory / "console.log.1"
        part.write_bytes(b"x" * older)
        os.utime(part, ns=(10**18 - age, 10**18 - age))
    (directory / "vmm.log").write_bytes(b"x" * 10_000)  # not a recording
    return directory


def left(vms: Path) -> list[str]:
    return sorted(str(path.relative_to(vms)) for path in vms.glob("*/console.log*"))


def test_who_uses_most_loses_its_rotated_part_first_and_then_the_oldest(tmp_path: Path) -> None:
    vm(tmp_path, "a", 10, 90)
    vm(tmp_path, "b", 100, 100)
    vm(tmp_path, "c", 10, 90, age=5)
    assert make_room(tmp_path, 400) == 0
    assert make_room(tmp_path, 399) == 1
    assert left(tmp_path) == [
        "a/console.log", "a/console.log.1", "b/console.log", "c/console.log", "c/console.log.1",
    ]  # fmt: skip
    assert make_room(tmp_path, 210) == 1
    assert "a/console.log.1" in left(tmp_path)
    assert "c/console.log.1" not in left(tmp_path)


def test_what_is_current_stays_whatever_the_bound(tmp_path: Path) -> None:
    vm(tmp_path, "a", 100, 50)
    vm(tmp_path, "b", 200)
    assert make_room(tmp_path, 0) == 1
    assert left(tmp_path) == ["a/console.log", "b/console.log"]
    assert (tmp_path / "a" / "vmm.log").exists()


def test_no_vms_and_no_directory_are_no_error(tmp_path: Path) -> None:
    assert make_room(tmp_path / "none", 0) == 0
    (tmp_path / "file").touch()
    assert make_room(tmp_path, 0) == 0


async def test_what_is_written_stays_within_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chv.agent.console.recording.FILE_BYTES_MAX", 4000)
    monkeypatch.setattr(module, "CHECK_BYTES", 1000)
    monkeypatch.setattr(module, "MARGIN_BYTES", 2000)
    vms = tmp_path / "vms"
    stopped = vm(vms, "stopped", 3000, 3000)
    bytes_max = 14_000
    with Disk() as disk:
        RecordingsBound(disk, vms).set(bytes_max)
        spools = []
        for name in ("a", "b"):
            (vms / name).mkdir()
            spools.append(disk.open(name, vms / name))
        for _ in range(200):
            for spool in spools:
                await spool.write(b"y" * 70 + b"\n")
            await wait_until(lambda: not disk.waiting_bytes)
            assert sum(path.stat().st_size for path in vms.glob("*/console.log*")) <= bytes_max
        for spool in spools:
            spool.release()
    assert (stopped / "console.log").stat().st_size == 3000
    assert (vms / "a" / "console.log").read_bytes().endswith(b"y\n")


async def test_a_bound_that_is_lowered_is_kept_at_once(tmp_path: Path) -> None:
    vm(tmp_path, "a", 100, 8 << 20)
    with Disk() as disk:
        bound = RecordingsBound(disk, tmp_path)
        bound.drain()
        assert len(left(tmp_path)) == 2  # nobody has said how much yet
        bound.set(4 << 20)
        await wait_until(lambda: left(tmp_path) == ["a/console.log"])


def test_a_recording_goes_on_where_its_rotated_part_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chv.agent.console.recording.FILE_BYTES_MAX", 500)

    def room(_: int) -> None:
        make_room(tmp_path, 0)

    log = Recording(tmp_path / "a", on_written=room)
    (tmp_path / "a").mkdir()
    for number in range(50):
        log.write(f"line {number}\n".encode())
    log.close()
    assert (tmp_path / "a" / "console.log").read_bytes().endswith(b"line 49\n")
