"""What is saved with memory leaves as much free as volumes do."""

from __future__ import annotations

from pathlib import Path

import pytest

from chv.agent.ports import VmHandle
from chv.agent.resources.places import floor_bytes, measured
from chv.agent.saves import Saves
from chv.common.config import Config, StorageConfig
from chv.common.errors import InvalidArgument, ResourceExhausted
from chv.common.layout import Layout


def layout_in(directory: Path) -> Layout:
    layout = Layout("aaaaaa", directory / "run", directory / "state")
    layout.state.mkdir(parents=True)
    return layout


async def test_a_save_that_would_make_the_space_critical_is_refused(tmp_path: Path) -> None:
    storage = StorageConfig(space_critical_bytes=2**50)
    saves = Saves(layout_in(tmp_path), storage)
    vm = VmHandle(uid="0" * 8, namespace="default", name="web", slot=0)
    with pytest.raises(ResourceExhausted, match=f"and {2**50} must stay free"):
        await saves.prepare(vm, "snapshot", 1 << 20)


def test_the_floor_is_the_larger_of_share_and_bytes(tmp_path: Path) -> None:
    none = StorageConfig(space_critical_percent=100, space_critical_bytes=0)
    assert floor_bytes(tmp_path, none) == 0
    share = floor_bytes(tmp_path, StorageConfig(space_critical_percent=90, space_critical_bytes=0))
    assert share > 0
    assert floor_bytes(tmp_path, StorageConfig(space_critical_percent=90)) >= share


def test_pools_on_one_disk_share_its_room_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    layout = layout_in(tmp_path)
    config = Config(storage=StorageConfig(pools={"fast": str(tmp_path / "fast")}))
    places = measured(config, layout, frozenset({"", "fast"}))
    assert places[""] is places["fast"]
    with pytest.raises(InvalidArgument, match="no pool 'slow'") as caught:
        measured(config, layout, frozenset({"slow"}))
    assert caught.value.hint == "one of fast, or leave it out"
