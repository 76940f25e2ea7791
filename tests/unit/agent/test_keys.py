"""Encryption keys: whole or not at all, never shown, never gone while a volume may need one."""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from chv.agent.engine import Engine
from chv.common.errors import (
    AlreadyExists,
    ChvError,
    FailedPrecondition,
    InUse,
    InvalidArgument,
    NotFound,
)
from chv.common.layout import Layout
from chv.common.wire import agent as api
from chv.common.wire.types import Empty
from tests.sim.bench import Bench, everything, manifest, volume
from tests.sim.chaos import Chaos
from tests.sim.world import Machine

SECRET = "correct horse battery staple"


@asynccontextmanager
async def open_bench(root: Path) -> AsyncIterator[Bench]:
    """An engine whose keys are below `root`."""
    import random

    machine = Machine(1, Chaos(random.Random(1), delays_s=(0.0,)))
    machine.chaos.quiet = True
    machine.host.stord.mishaps = False
    world = replace(machine.world(), layout=Layout(instance="simsim", state_root=root))
    engine = Engine(machine.agent_store(), world)
    await engine.load()
    async with anyio.create_task_group() as group:
        await group.start(engine.run)
        yield Bench(machine, engine)
        group.cancel_scope.cancel()


async def put(bench: Bench, name: str, text: str = "", **more: Any) -> api.KeyInfo:
    key = base64.b64encode(text.encode()).decode()
    return await bench.engine.keys.put(api.PutKey(name=name, key=key, requester="test", **more))


async def drop(bench: Bench, name: str) -> None:
    await bench.engine.keys.delete(api.DeleteKey(name=name, requester="test"))


async def encrypted(bench: Bench, key: str) -> None:
    reply = await bench.apply(volume(encryption={"key": key}))
    await bench.final(reply.results[0].operation_id)


def path_of(root: Path, name: str, namespace: str = "default") -> Path:
    return root / "simsim" / "keys" / namespace / name


async def test_a_key_is_a_private_file_with_the_bytes_that_were_given(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        info = await put(bench, "disk", SECRET)
        path = path_of(tmp_path, "disk")
        assert path.read_bytes() == SECRET.encode()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for directory in (path.parent, path.parent.parent):
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert path.stat().st_uid == os.geteuid()
        assert (info.namespace, info.name, info.used_by) == ("default", "disk", [])


async def test_a_key_that_is_not_given_is_random_text_of_256_bits(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        for name in ("one", "two"):
            await put(bench, name)
        one, two = (path_of(tmp_path, name).read_text() for name in ("one", "two"))
        assert one != two
        assert len(bytes.fromhex(one)) == 32


async def test_a_name_is_used_once_and_the_first_key_stays(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await put(bench, "disk", SECRET)
        with pytest.raises(AlreadyExists):
            await put(bench, "disk", "another passphrase")
        assert path_of(tmp_path, "disk").read_bytes() == SECRET.encode()
        await put(bench, "disk", "another passphrase", namespace="other")


@pytest.mark.parametrize(
    "key",
    ["AAA", base64.b64encode(b"short").decode(), base64.b64encode(b"\xff" * 32).decode(),
     base64.b64encode(b"null\0" * 8).decode(), base64.b64encode(b"x" * 4097).decode()],
)  # fmt: skip
async def test_what_could_be_no_passphrase_is_refused_without_a_word_of_it(
    tmp_path: Path, key: str
) -> None:
    async with open_bench(tmp_path) as bench:
        with pytest.raises(InvalidArgument) as caught:
            await bench.engine.keys.put(api.PutKey(name="bad", key=key, requester="test"))
        assert caught.value.field == "key"
        assert key not in str(caught.value)
        assert not path_of(tmp_path, "bad").exists()


async def test_keys_are_listed_by_name_and_user_and_never_by_value(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await put(bench, "disk", SECRET)
        await encrypted(bench, "disk")
        keys = (await bench.engine.keys.list_all(Empty())).keys
        assert [(key.name, key.used_by) for key in keys] == [("disk", ["data"])]
        assert SECRET not in repr(keys)
        backend = next(iter(bench.machine.host.stord.volumes.values())).backend
        assert backend.encryption is not None
        assert backend.encryption.key == "default/disk"


async def test_a_volume_does_not_name_a_key_that_is_not_there(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        with pytest.raises(InvalidArgument) as caught:
            await encrypted(bench, "none")
        assert caught.value.field == "spec.encryption.key"
        assert caught.value.hint == "chv key create none -n default"


async def test_a_key_in_use_is_not_deleted_and_one_that_is_not_leaves_nothing(
    tmp_path: Path,
) -> None:
    async with open_bench(tmp_path) as bench:
        for name in ("disk", "spare"):
            await put(bench, name, SECRET)
        await encrypted(bench, "disk")
        with pytest.raises(InUse, match="data"):
            await drop(bench, "disk")
        await drop(bench, "spare")
        assert [path.name for path in path_of(tmp_path, "spare").parent.iterdir()] == ["disk"]
        with pytest.raises(NotFound):
            await drop(bench, "spare")


async def test_the_old_key_stays_until_stord_has_left_it(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        for name in ("old", "new"):
            await put(bench, name, SECRET)
        await encrypted(bench, "old")
        sim = bench.machine.host.stord
        sim.rotates = False  # it takes its time
        await bench.apply(volume(encryption={"key": "new"}))
        for name in ("old", "new"):
            with pytest.raises(InUse):
                await drop(bench, name)
        sim.rotates = True
        await bench.until("Ready", "data", "Volume")
        await drop(bench, "old")
        with pytest.raises(InUse):
            await drop(bench, "new")


async def test_a_key_is_not_rotated_below_a_vm_while_there_are_snapshots(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        for name in ("old", "new"):
            await put(bench, name, SECRET)
        others = [each for each in everything() if each["kind"] != "Volume"]
        await bench.apply(*others, volume(encryption={"key": "old"}))
        await bench.until("phase=Running")
        reply = await bench.apply(manifest("VolumeSnapshot", "snap", {"volume": "data"}))
        await bench.final(reply.results[0].operation_id)
        await bench.until("phase=Attached", "data", "Volume")
        with anyio.fail_after(20):
            while not bench.get("Volume", "data").status.snapshots:
                await anyio.sleep(0.05)
        with pytest.raises(FailedPrecondition, match="default/web") as caught:
            await bench.apply(volume(encryption={"key": "new"}))
        assert caught.value.field == "spec.encryption.key"
        assert caught.value.hint == "stop the VM or delete the snapshots first"
        assert bench.get("Volume", "data").spec.encryption.key == "old"


async def test_whether_it_is_encrypted_is_fixed_at_creation(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await put(bench, "disk", SECRET)
        reply = await bench.apply(volume())
        await bench.final(reply.results[0].operation_id)
        with pytest.raises(ChvError) as caught:
            await bench.apply(volume(encryption={"key": "disk"}))
        assert caught.value.field == "spec.encryption"
