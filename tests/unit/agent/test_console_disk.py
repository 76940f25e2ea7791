"""The thread that writes recordings: a disk that hangs, one that is slow, and one that works."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from chv.agent.console import disk as module
from chv.agent.console.disk import SPOOL_BYTES_MAX, Disk, Spool
from chv.agent.console.log_stream import LINES_MAX, LogStream
from chv.agent.console.recording import tail_lines
from tests.helpers import wait_until

CHUNK = b"x" * 4000 + b"\n"
MARK = "bytes were not recorded]"


class Hang:
    """Holds every write to a recording while it is on."""

    def __init__(self) -> None:
        self.on = threading.Event()
        self._go = threading.Event()
        self._go.set()
        self._write = os.write

    def begin(self) -> None:
        self._go.clear()

    def end(self) -> None:
        self._go.set()

    def write(self, fd: int, data: bytes) -> int:
        if threading.current_thread().name == "disk":
            if not self._go.is_set():
                self.on.set()
            assert self._go.wait(60)
        return self._write(fd, data)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    made = Hang()
    monkeypatch.setattr(os, "write", made.write)
    yield made
    made.end()


def texts(directory: Path) -> list[str]:
    return [line.split(" ", 1)[1] for line in tail_lines(directory, 10_000)]


def spool(disk: Disk, directory: Path) -> Spool:
    directory.mkdir(exist_ok=True)
    return disk.open(directory.name, directory)


async def hung(disk: Disk, hang: Hang, directory: Path) -> Spool:
    """Return a spool whose first line hangs in the disk."""
    made = spool(disk, directory)
    hang.begin()
    await made.write(b"first\n")
    await wait_until(hang.on.is_set)
    return made


async def test_a_hung_disk_costs_output_that_is_counted_and_nobody_waits_twice(
    tmp_path: Path, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = 0
    sleep = anyio.sleep

    async def counted(delay: float) -> None:
        nonlocal waits
        waits += 1
        await sleep(delay)

    with Disk() as disk:
        made = await hung(disk, hang, tmp_path / "a")
        monkeypatch.setattr(anyio, "sleep", counted)
        written = 0
        while not made._lost_bytes:
            await made.write(CHUNK)
            written += len(CHUNK)
        assert made._waiting_bytes <= SPOOL_BYTES_MAX
        assert waits > 0
        before, waits = waits, 0
        for _ in range(100):
            await made.write(CHUNK)
        assert before and not waits  # dropped at once: the guest goes on
        lost = made._lost_bytes
        assert lost == 101 * len(CHUNK)
        hang.end()
        await wait_until(lambda: not made._scheduled)
        await made.write(b"later\n")
        made.release()
        await wait_until(lambda: not disk.spools)
    lines = texts(tmp_path / "a")
    assert lines[0] == "first"
    assert lines[-2:] == [f"[chv: {lost} {MARK}", "later"]
    assert len(lines) == 3 + written // len(CHUNK) - 1


async def test_a_hung_disk_delays_no_other_line_and_all_is_written_when_it_works_again(
    tmp_path: Path, hang: Hang
) -> None:
    with Disk() as disk:
        one = await hung(disk, hang, tmp_path / "a")
        other = spool(disk, tmp_path / "b")
        for number in range(10):
            await other.write(f"line {number}\n".encode())
        other.release()  # returns at once as well
        again = spool(disk, tmp_path / "b")  # attached anew meanwhile
        again.mark("--- console attached")
        await again.write(b"anew\n")
        again.release()
        one.release()
        hang.end()
        await wait_until(lambda: not disk.spools)
    assert texts(tmp_path / "a") == ["first"]
    wanted = [*(f"line {number}" for number in range(10)), "--- console attached", "anew"]
    assert texts(tmp_path / "b") == wanted


async def test_the_gap_stands_where_the_output_is_missing(tmp_path: Path, hang: Hang) -> None:
    with Disk() as disk:
        made = await hung(disk, hang, tmp_path / "a")
        await made.write(b"half a li")
        made._lose(7)
        hang.end()
        await wait_until(lambda: not made._scheduled)
        await made.write(b"ne\n")
        made.release()
        await wait_until(lambda: not disk.spools)
    assert texts(tmp_path / "a") == ["first", "half a li", f"[chv: 7 {MARK}", "ne"]


async def test_what_waits_is_bounded_over_all_lines_and_by_number(
    tmp_path: Path, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SPOOLS_BYTES_MAX", 3 * SPOOL_BYTES_MAX // 2)
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    with Disk() as disk:
        made = [await hung(disk, hang, tmp_path / "a"), *(spool(disk, tmp_path / n) for n in "bc")]
        for each in made:
            for _ in range(2 * SPOOL_BYTES_MAX // module.ITEM_BYTES):
                await each.write(b"x")  # a byte in memory is far more than a byte
        assert disk.waiting_bytes <= module.SPOOLS_BYTES_MAX
        assert all(each._lost_bytes for each in made)
        hang.end()
        for each in made:
            each.release()
        await wait_until(lambda: not disk.spools)
        assert disk.waiting_bytes == 0
    assert all(any(MARK in text for text in texts(tmp_path / n)) for n in "abc")


async def test_a_line_that_lost_nothing_has_no_gap(tmp_path: Path) -> None:
    with Disk() as disk:
        made = spool(disk, tmp_path / "a")
        for _ in range(4 * SPOOL_BYTES_MAX // len(CHUNK)):
            await made.write(CHUNK)  # four times what may wait: a disk that works keeps up
        made.release()
    assert texts(tmp_path / "a") == ["x" * 4000] * (4 * SPOOL_BYTES_MAX // len(CHUNK))


async def test_a_bug_in_one_recording_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Disk() as disk:
        bad, good = spool(disk, tmp_path / "a"), spool(disk, tmp_path / "b")
        monkeypatch.setattr(bad._recording, "write", lambda *_: 1 / 0)
        await bad.write(b"x\n")
        await good.write(b"good\n")
        bad.release()
        good.release()
        await wait_until(lambda: not disk.spools)
        assert disk.waiting_bytes == 0
    assert texts(tmp_path / "b") == ["good"]


async def test_the_log_of_the_holder_does_not_wait_for_the_disk(tmp_path: Path, hang: Hang) -> None:
    with (tmp_path / "console.log").open("w") as file, Disk() as disk:
        made = await hung(disk, hang, tmp_path / "a")
        stream = LogStream(disk, file, "console.log")
        for number in range(LINES_MAX):
            stream.write(f"{number}\n")
        with pytest.raises(BlockingIOError):
            stream.write("too much\n")
        hang.end()
        made.release()
    assert (tmp_path / "console.log").read_text().split() == [str(n) for n in range(LINES_MAX)]
