"""Files: all or nothing on write, exact modes, one holder a lock, honest copies."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from chv.common import failpoint, files
from chv.common.errors import (
    Conflict,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    OwnershipConflict,
    ResourceExhausted,
)
from chv.common.files import (
    FileLock,
    atomic_create,
    atomic_write,
    copy_file,
    ensure_dir,
    free_bytes,
    remove_temporaries,
    sha256_file,
)
from tests.disks import small_tmpfs

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "disk", size_mib=1) as disk:
        yield disk


def names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_write_replaces_the_whole_file(tmp_path: Path) -> None:
    target = tmp_path / "state"
    atomic_write(target, b"x" * 1000)
    atomic_write(target, b"new")
    assert target.read_bytes() == b"new"
    assert names(tmp_path) == {"state"}


def test_the_mode_is_exact_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        atomic_write(tmp_path / "a", b"")
        atomic_write(tmp_path / "b", b"", mode=0o644)
    finally:
        os.umask(old)
    assert (mode(tmp_path / "a"), mode(tmp_path / "b")) == (0o600, 0o644)


@needs_root
@pytest.mark.root
def test_the_owner_is_set_before_anyone_can_see_the_file(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a", b"x", mode=0o640, uid=1234, gid=4321)
    status = (tmp_path / "a").stat()
    assert (status.st_uid, status.st_gid, mode(tmp_path / "a")) == (1234, 4321, 0o640)


def test_a_write_replaces_a_link_and_not_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "state").symlink_to("precious")
    atomic_write(tmp_path / "state", b"new")
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "state").is_symlink()


def test_a_name_of_full_length_can_be_written(tmp_path: Path) -> None:
    atomic_write(tmp_path / ("n" * 255), b"x")
    assert names(tmp_path) == {"n" * 255}


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "state"
    atomic_write(target, b"old")
    failpoint.configure("common.files.fsync=error(EIO)")
    try:
        with pytest.raises(DataLoss, match="fsync"):
            atomic_write(target, b"new")
    finally:
        failpoint.reset()
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == {"state"}


@needs_root
@pytest.mark.root
def test_a_full_disk_leaves_the_old_file_and_nothing_else(small_disk: Path) -> None:
    target = small_disk / "state"
    atomic_write(target, b"old")
    with pytest.raises(ResourceExhausted, match="no space") as caught:
        atomic_write(target, b"x" * (2 << 20))
    assert caught.value.retriable
    assert target.read_bytes() == b"old"
    assert names(small_disk) == {"state"}
    atomic_write(target, b"x" * 1000)


def test_of_many_creators_one_wins_and_all_see_its_whole_data(tmp_path: Path) -> None:
    target, won = tmp_path / "instance", []

    def create(number: int) -> None:
        if atomic_create(target, f"{number}".encode() * 1000):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert target.read_text() == f"{won[0]}" * 1000
    assert names(tmp_path) == {"instance"}


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from chv.common.files import atomic_write;"
        f"atomic_write(Path({str(tmp_path / 'state')!r}), b'new')"
    )
    environ = os.environ | {"CHV_TEST_BUILD": "1", "CHV_FAILPOINTS": "common.files.fsync=kill"}
    subprocess.run([sys.executable, "-c", code], env=environ, check=False)
    (tmp_path / "mine.tmp").touch()
    assert len(names(tmp_path)) == 2
    assert remove_temporaries(tmp_path) == 1
    assert names(tmp_path) == {"mine.tmp"}


def test_a_directory_is_made_with_its_parents(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    ensure_dir(path, mode=0o711, uid=-1, gid=-1)
    assert (mode(path), mode(path.parent)) == (0o711, 0o755)


@needs_root
@pytest.mark.root
def test_mode_and_owner_of_a_directory_are_corrected_and_its_files_kept(tmp_path: Path) -> None:
    path = tmp_path / "d"
    path.mkdir(mode=0o777)
    (path / "file").touch()
    for _ in range(2):
        ensure_dir(path, mode=0o710, uid=1234, gid=4321)
        status = path.stat()
        assert (status.st_uid, status.st_gid, mode(path)) == (1234, 4321, 0o710)
    assert names(path) == {"file"}


def test_a_link_or_file_in_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").touch()
    with pytest.raises(OwnershipConflict, match="symbolic link"):
        ensure_dir(tmp_path / "link", mode=0o700, uid=-1, gid=-1)
    with pytest.raises(OwnershipConflict, match="not a directory"):
        ensure_dir(tmp_path / "file", mode=0o700, uid=-1, gid=-1)
    assert mode(tmp_path / "real") == 0o755


def test_a_lock_names_its_holder_and_is_free_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "agent.lock"
    with FileLock.acquire(path):
        with pytest.raises(Conflict, match=f"process {os.getpid()}"), FileLock.acquire(path):
            pass
        assert path.read_text() == f"{os.getpid()}\n"
    with FileLock.acquire(path):
        pass


def test_a_lock_is_not_inherited_by_what_the_holder_starts(tmp_path: Path) -> None:
    path = tmp_path / "agent.lock"
    with FileLock.acquire(path):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with FileLock.acquire(path):
            pass
    finally:
        child.kill()
        child.wait()


def test_a_killed_holder_frees_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "agent.lock"
    code = (
        "import sys, time; from pathlib import Path; from chv.common.files import FileLock\n"
        f"with FileLock.acquire(Path({str(path)!r})): print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout as stdout:
        assert stdout.readline() == "held\n"
        with pytest.raises(Conflict, match=f"process {child.pid}"), FileLock.acquire(path):
            pass
        child.kill()
        child.wait()
    with FileLock.acquire(path):
        pass


def test_a_lock_on_a_file_replaced_meanwhile_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock = tmp_path / "agent.lock", fcntl.flock
    calls: list[int] = []

    def replaced_between_open_and_lock(fd: int, operation: int) -> None:
        if not calls:
            path.unlink()
            path.touch()
        calls.append(fd)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", replaced_between_open_and_lock)
    with FileLock.acquire(path):
        with pytest.raises(Conflict, match=f"process {os.getpid()}"), FileLock.acquire(path):
            pass
        assert path.read_text() == f"{os.getpid()}\n"


def test_a_copy_is_equal_private_and_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(os.urandom(3_000_001))
    source.chmod(0o644)
    seen: list[tuple[int, int]] = []
    how = copy_file(source, target, progress=lambda done, size: seen.append((done, size)))
    assert how in ("copy", "reflink")
    assert target.read_bytes() == source.read_bytes()
    assert mode(target) == 0o600
    assert seen[-1] == (3_000_001, 3_000_001)
    assert names(tmp_path) == {"a", "b"}


@pytest.mark.parametrize("data_at", [[], [0], [10 << 20], [1 << 20, 30 << 20]])
def test_a_copy_keeps_its_holes(tmp_path: Path, data_at: list[int]) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    with source.open("wb") as file:
        file.truncate(40 << 20)
        for offset in data_at:
            file.seek(offset)
            file.write(b"data" * 1024)
    copy_file(source, target)
    assert target.stat().st_size == 40 << 20
    assert target.stat().st_blocks <= source.stat().st_blocks + 16
    assert sha256_file(target) == sha256_file(source)


@pytest.mark.parametrize("kind", ["directory", "fifo"])
def test_only_a_regular_file_is_copied(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "a"
    os.mkfifo(source) if kind == "fifo" else source.mkdir()
    with pytest.raises(InvalidArgument, match="regular file"):
        copy_file(source, tmp_path / "b")
    assert names(tmp_path) == {"a"}


def test_progress_can_give_a_copy_up(tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.write_bytes(b"x" * 100_000)

    def give_up(done: int, size: int) -> None:
        raise KeyError(done, size)

    with pytest.raises(KeyError):
        copy_file(source, tmp_path / "b", progress=give_up)
    assert names(tmp_path) == {"a"}


def test_a_source_that_shrinks_meanwhile_fails_the_copy(tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.write_bytes(b"x" * (2 * files.CHUNK_BYTES))

    def shrink(done: int, size: int) -> None:
        os.truncate(source, files.CHUNK_BYTES)

    with pytest.raises(FailedPrecondition, match="shorter"):
        copy_file(source, tmp_path / "b", progress=shrink)
    assert names(tmp_path) == {"a"}


@needs_root
@pytest.mark.root
def test_a_copy_onto_a_full_disk_leaves_nothing(tmp_path: Path, small_disk: Path) -> None:
    source = tmp_path / "a"
    source.write_bytes(b"x" * (2 << 20))
    with pytest.raises(ResourceExhausted):
        copy_file(source, small_disk / "b")
    assert names(small_disk) == set()


def test_the_digest_is_sha256_of_the_content(tmp_path: Path) -> None:
    source = tmp_path / "a"
    data = os.urandom(2_500_000)
    source.write_bytes(data)
    seen: list[int] = []
    digest = sha256_file(source, lambda done, size: seen.append(done))
    assert digest == hashlib.sha256(data).hexdigest()
    assert seen[-1] == len(data)
    assert seen == sorted(seen)


def test_free_space_shrinks_by_what_is_written(tmp_path: Path) -> None:
    assert 0 < free_bytes(tmp_path) <= os.statvfs(tmp_path).f_blocks * 4096


def test_other_system_errors_pass_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as caught:
        atomic_write(tmp_path / "missing" / "x", b"")
    assert caught.value.errno == errno.ENOENT


def test_no_descriptor_is_leaked(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    before = len(names(Path("/proc/self/fd")))
    atomic_write(tmp_path / "b", b"x")
    atomic_create(tmp_path / "b", b"x")
    copy_file(tmp_path / "a", tmp_path / "c")
    sha256_file(tmp_path / "a")
    ensure_dir(tmp_path / "d", mode=0o700, uid=-1, gid=-1)
    with FileLock.acquire(tmp_path / "l"), pytest.raises(Conflict):
        FileLock.acquire(tmp_path / "l").__enter__()
    assert len(names(Path("/proc/self/fd"))) == before
