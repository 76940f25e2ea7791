"""Power loss: what was acknowledged is there, and all of it can be read, in every picture.

A writer works on an ext4 file system in an image file. A picture is a copy of the image taken
while the writer is stopped and nothing moves: what the disk would hold if the power went now.
Each picture is mounted (ext4 replays its journal), opened with our own code and compared with
what the writer had been told is durable. A careless writer proves that the harness sees losses.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from chv.common.errors import DataLoss, ResourceExhausted
from chv.common.files import atomic_write, remove_temporaries
from chv.common.store import Connection, Store
from tests.disks import fill, make_ext4, mounted
from tests.sampling import LONG

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a loop mount"),
    pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="needs mkfs.ext4"),
    pytest.mark.skipif(not Path("/dev/loop-control").exists(), reason="needs loop devices"),
]

PICTURES = int(os.environ.get("CHV_POWER_LOSS_PICTURES", "1000" if LONG else "40"))
CONTROL_PICTURES = 4
IMAGE_MIB = 24
MIGRATIONS = ["CREATE TABLE op (number INTEGER PRIMARY KEY, half TEXT, data BLOB) STRICT"]

WRITER = """
import os, sys
from functools import partial
from pathlib import Path
import anyio
from chv.common import files, store_file
from chv.common.store import Store

disk, acks, migration, careless = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
if careless == "careless":
    store_file._PRAGMAS += ("PRAGMA synchronous = NORMAL",)
    files.os.fsync = lambda fd: None

def acknowledge(fd, number):
    os.write(fd, b"%d\\n" % number)

def insert(db, number):
    db.execute("INSERT INTO op VALUES (?, 'first', ?)", (2 * number, b"x" * 400))
    db.execute("INSERT INTO op VALUES (?, 'second', ?)", (2 * number + 1, b"y" * 400))
    db.execute("DELETE FROM op WHERE number < ?", (2 * number - 400,))

async def store_writer(fd):
    async with Store.open(disk / "a.db", [migration], reserve_bytes=1 << 20) as store:
        number = 0
        while True:
            number += 1
            await store.write(partial(insert, number=number))
            acknowledge(fd, number)

async def file_writer(fd):
    number = 0
    while True:
        number += 1
        text = '{"number": %d, "pad": "%s"}' % (number, "z" * 3000)
        await anyio.to_thread.run_sync(files.atomic_write, disk / "state.json", text.encode())
        acknowledge(fd, number)

async def main():
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    async with anyio.create_task_group() as group:
        group.start_soon(store_writer, os.open(acks / "store", flags))
        group.start_soon(file_writer, os.open(acks / "file", flags))

anyio.run(main)
"""


@dataclass(frozen=True)
class Seen:
    """The newest number of the store and of the file, acknowledged or found."""

    store: int
    file: int


class Machine:
    """A running writer, its disk and its acknowledgements."""

    def __init__(self, root: Path, disk: Path, image: Path, *, mode: str) -> None:
        self._image = image
        self._acks = root / f"acks-{mode}"
        self._acks.mkdir()
        arguments = [str(disk), str(self._acks), MIGRATIONS[0], mode]
        self._process = subprocess.Popen([sys.executable, "-c", WRITER, *arguments])
        loop = subprocess.run(
            ["findmnt", "-n", "-o", "SOURCE", str(disk)], capture_output=True, text=True, check=True
        )
        self._statistics = Path("/sys/block") / Path(loop.stdout.strip()).name / "stat"

    def wait_for_progress(self, more: int = 5) -> None:
        before = self.acknowledged()
        deadline = time.monotonic() + 20
        while True:
            now = self.acknowledged()
            if now.store >= before.store + more and now.file >= before.file + more:
                return
            assert self._process.poll() is None, "the writer died"
            assert time.monotonic() < deadline, f"no progress since {before}"
            time.sleep(0.005)

    def acknowledged(self) -> Seen:
        return Seen(self._last("store"), self._last("file"))

    def _last(self, name: str) -> int:
        path = self._acks / name
        lines = path.read_text().split() if path.exists() else []
        return int(lines[-1]) if lines else 0

    def photograph(self, picture: Path) -> Seen:
        """Copy the image while nothing moves; return what was acknowledged until then."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            acknowledged = self.acknowledged()
            for _ in range(100):
                before = self._statistics.read_text()
                shutil.copyfile(self._image, picture)
                if self._statistics.read_text() == before and " T " in self._state():
                    return acknowledged
            raise AssertionError("the disk never rests")
        finally:
            self._process.send_signal(signal.SIGCONT)

    def _state(self) -> str:
        return Path(f"/proc/{self._process.pid}/stat").read_text()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def running(root: Path, mode: str) -> Iterator[Machine]:
    image = root / f"{mode}.img"
    make_ext4(image, IMAGE_MIB)
    with mounted(root / "disk", "-o", "loop", str(image)) as disk:
        machine = Machine(root, disk, image, mode=mode)
        try:
            yield machine
        finally:
            machine.kill()


def look_at(root: Path, picture: Path) -> Seen:
    """Mount a picture and read it with our own code; fails where anything is unreadable."""
    with mounted(root / "picture", "-o", "loop", str(picture)) as disk:
        state = disk / "state.json"
        number = json.loads(state.read_bytes())["number"] if state.exists() else 0
        assert remove_temporaries(disk) <= 1
        names = {entry.name for entry in disk.iterdir()} - {"lost+found"}
        sides = {f"a.db{end}" for end in ("", "-wal", "-shm", "-journal", ".reserve")}
        assert names <= sides | {"state.json"}
        return Seen(anyio.run(newest_whole_transaction, disk / "a.db"), number)


async def newest_whole_transaction(path: Path) -> int:
    def check(db: Connection) -> int:
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        low, high, count = db.execute(
            "SELECT min(number), max(number), count(*) FROM op"
        ).fetchone()
        if count == 0:
            return 0
        assert low % 2 == 0 and high % 2 == 1, "half a transaction"
        assert count == high - low + 1, "a transaction in the middle is missing"
        return int(high) // 2

    async with Store.open(path, MIGRATIONS, reserve_bytes=0) as store:
        return await store.read(check)


def pictures(root: Path, mode: str, count: int) -> Iterator[tuple[Seen, Seen]]:
    """Yield (acknowledged, found) of that many pictures."""
    moments = random.Random(5)
    with running(root, mode) as machine:
        machine.wait_for_progress()
        for number in range(count):
            machine.wait_for_progress(moments.randrange(1, 12))
            picture = root / f"picture-{number}.img"
            acknowledged = machine.photograph(picture)
            yield acknowledged, look_at(root, picture)
            picture.unlink()


def test_no_acknowledged_write_is_lost_when_the_power_goes(tmp_path: Path) -> None:
    seen = list(pictures(tmp_path, "durable", PICTURES))
    assert len(seen) == PICTURES
    lost = [
        (acknowledged, found)
        for acknowledged, found in seen
        if found.store < acknowledged.store or found.file < acknowledged.file
    ]
    assert not lost
    assert seen[-1][0].store > PICTURES, "the writer worked meanwhile"


def test_the_harness_sees_what_a_careless_writer_loses(tmp_path: Path) -> None:
    lost = 0
    with running(tmp_path, "careless") as machine:
        for number in range(CONTROL_PICTURES):
            machine.wait_for_progress(20)
            picture = tmp_path / f"picture-{number}.img"
            acknowledged = machine.photograph(picture)
            try:
                lost += look_at(tmp_path, picture).store < acknowledged.store
            except (DataLoss, ValueError, AssertionError):
                lost += 1
    # Now and then the kernel happens to write in time; that it mostly does not is the control.
    assert lost >= CONTROL_PICTURES // 2


def test_a_full_ext4_disk_refuses_and_heals(tmp_path: Path) -> None:
    """As on tmpfs, with delayed allocation and a journal in between."""

    async def main(disk: Path) -> None:
        async with Store.open(disk / "a.db", MIGRATIONS, reserve_bytes=1 << 20) as store:
            ballast = fill(disk)
            with pytest.raises(ResourceExhausted):
                for number in range(100_000):
                    await store.write(
                        lambda db, n=number: db.execute(  # type: ignore[misc]
                            "INSERT INTO op VALUES (?, 'x', zeroblob(100000))", (n,)
                        )
                    )
            assert store.is_short_of_space
            with pytest.raises(ResourceExhausted):
                atomic_write(disk / "state.json", b"x" * (1 << 20))
            assert not (disk / "state.json").exists()
            kept = await store.read(lambda db: db.execute("SELECT count(*) FROM op").fetchone()[0])
            assert kept > 0, "the reserve was of use"
            ballast.unlink()
            await store.write(lambda db: db.execute("DELETE FROM op"))
        assert await newest_whole_transaction(disk / "a.db") == 0

    make_ext4(tmp_path / "full.img", 12)
    with mounted(tmp_path / "disk", "-o", "loop", str(tmp_path / "full.img")) as disk:
        anyio.run(main, disk)
