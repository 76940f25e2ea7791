"""A development node's directory under callers that come at the same time."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from chv.common.errors import Conflict
from chv.host import devnode


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Be the other `chv up`."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def make(directory: Path) -> devnode.DevNode:
    return devnode.make(directory, sandboxed=False)


def test_many_makers_at_once_get_one_node(tmp_path: Path) -> None:
    directory, found = tmp_path / "node", []
    barrier = threading.Barrier(8)

    def maker() -> None:
        barrier.wait()
        found.append(make(directory).layout.instance)

    threads = [threading.Thread(target=maker) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert set(found) == {devnode.find(directory).layout.instance}
    assert (directory / "socket").read_text().split("/")[-3] == found[0]


def test_maker_waits_for_the_other_and_finds_its_node(tmp_path: Path) -> None:
    thread_found: list[Path] = []
    with held(tmp_path):
        thread = threading.Thread(target=lambda: thread_found.append(make(tmp_path).config_path))
        thread.start()
        thread.join(timeout=0.2)
        assert not (tmp_path / "node.toml").exists()
    thread.join()
    assert thread_found == [tmp_path / "node.toml"]


def test_busy_directory_is_a_conflict_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make(tmp_path)
    monkeypatch.setattr(devnode, "LOCK_TIMEOUT_S", 0.1)
    with held(tmp_path):
        with pytest.raises(Conflict, match="locked by another"):
            make(tmp_path)
        with pytest.raises(Conflict, match="locked by another"):
            anyio.run(devnode.start, node)
    assert make(tmp_path).layout.instance == node.layout.instance


def test_lost_pointer_to_the_socket_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make(tmp_path)
    (tmp_path / "socket").write_text("/run/chv/elsewhere/api/agent.sock\n")
    monkeypatch.setattr(devnode, "ensure_dir", lambda *args, **options: None)
    anyio.run(devnode.prepare, node)
    assert (tmp_path / "socket").read_text() == f"{node.socket}\n"
