"""Builtin images: one builder at a time, nothing repeated. The build itself is replaced here."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from chv.common.errors import NotFound
from chv.guest import tiny
from chv.guest.tiny import BuiltArtifact, TinyImage, TinyManifest, recipe
from chv.images import ImageStore, builtin, ensure_builtin
from chv.probe import image as probe
from tests.helpers import wait_until

CONTENTS = {
    "kernel": bytes(0x202) + b"HdrS",
    "initramfs": b"070701",
    "disk.raw": b"disk",
}


class Builder:
    """Stands in for `build_tiny`; counts, and shows whether two ever ran at once."""

    def __init__(self) -> None:
        self.builds = 0
        self.running = 0
        self.running_max = 0

    async def build(self, out: Path, cache: Path, *, progress: Any) -> TinyImage:
        self.running += 1
        self.running_max = max(self.running, self.running_max)
        await anyio.sleep(0.02)
        out.mkdir(parents=True, exist_ok=True)
        artifacts = {}
        for name, content in CONTENTS.items():
            (out / name).write_bytes(content)
            digest = hashlib.sha256(content).hexdigest()
            artifacts[name] = BuiltArtifact(sha256=digest, size_bytes=len(content))
        manifest = TinyManifest(recipe=recipe(), artifacts=artifacts, built_from={})
        (out / tiny.MANIFEST).write_bytes(msgspec.json.encode(manifest))
        self.builds += 1
        self.running -= 1
        return TinyImage(directory=out, manifest=manifest)


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Builder:
    made = Builder()
    monkeypatch.setattr(builtin, "build_tiny", made.build)
    return made


def ignore(message: str) -> None:
    """Take no notice."""


async def test_the_artifacts_carry_their_names_and_formats(
    tmp_path: Path, builder: Builder
) -> None:
    store = ImageStore(tmp_path / "images")
    artifacts = await ensure_builtin("tiny", tmp_path / "cache", store, ignore)
    formats = {name: artifact.format for name, artifact in artifacts.items()}
    assert formats == {"kernel": "kernel", "initramfs": "initramfs", "disk": "raw"}
    assert all(store.get(artifact.sha256) for artifact in artifacts.values())


async def test_the_second_node_imports_without_a_build(tmp_path: Path, builder: Builder) -> None:
    for node in ("one", "two", "one"):
        await ensure_builtin("tiny", tmp_path / "cache", ImageStore(tmp_path / node), ignore)
    assert builder.builds == 1


async def test_two_nodes_at_once_build_once(tmp_path: Path, builder: Builder) -> None:
    async with anyio.create_task_group() as nodes:
        for node in ("one", "two", "three"):
            store = ImageStore(tmp_path / node)
            nodes.start_soon(ensure_builtin, "tiny", tmp_path / "cache", store, ignore)
    assert builder.builds == 1
    assert builder.running_max == 1


async def test_a_removed_artifact_comes_back(tmp_path: Path, builder: Builder) -> None:
    store = ImageStore(tmp_path / "images")
    before = await ensure_builtin("tiny", tmp_path / "cache", store, ignore)
    store.remove(before["disk"].sha256, lambda sha256: [])
    assert await ensure_builtin("tiny", tmp_path / "cache", store, ignore) == before
    assert store.get(before["disk"].sha256) is not None
    assert builder.builds == 1


async def test_an_unknown_name_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="huge"):
        await ensure_builtin("huge", tmp_path / "cache", ImageStore(tmp_path), ignore)


def hold(lock: str, ready: str) -> None:
    async def forever() -> None:
        async with builtin.exclusive(Path(lock), ignore):
            Path(ready).touch()
            await anyio.sleep(600)

    anyio.run(forever)


async def test_a_killed_builder_gives_the_lock_back(tmp_path: Path) -> None:
    lock, ready = tmp_path / "lock", tmp_path / "ready"
    holder = multiprocessing.get_context("spawn").Process(target=hold, args=(str(lock), str(ready)))
    holder.start()
    try:
        await wait_until(ready.exists, timeout_s=30)
        told: list[str] = []
        acquired = anyio.Event()

        async def want() -> None:
            async with builtin.exclusive(lock, told.append):
                acquired.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(want)
            await wait_until(lambda: told)
            assert not acquired.is_set()
            os.kill(holder.pid or 0, signal.SIGKILL)
            with anyio.fail_after(10):
                await acquired.wait()
    finally:
        holder.kill()
        holder.join()


async def test_the_probe_comes_with_the_package_and_is_built_nowhere(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    await anyio.to_thread.run_sync(store.recover)
    found = await ensure_builtin("probe", tmp_path / "cache", store, print)
    assert found.keys() == {"kernel"}
    kept = store.path(found["kernel"].sha256)
    assert kept.read_bytes() == probe.ELF_PATH.read_bytes()
    assert not (tmp_path / "cache").exists()
