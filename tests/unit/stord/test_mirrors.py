"""A mirror is started in the order in which it misses no write; see `chv.stord.qsd.mirrors`."""

from __future__ import annotations

from typing import Any, cast

import anyio.lowlevel
import pytest

from chv.common.wire.stord import VolumeBackend, VolumeClass, VolumeFormat
from chv.stord.luks import PAYLOAD_BYTES
from chv.stord.move_rules import limited
from chv.stord.qsd import graph, mirrors
from chv.stord.qsd.monitor import Monitor
from chv.stord.records import Volume, VolumeState

VOLUME = "6f1c2a34-0000-4000-8000-000000000001"
ROW = Volume(
    volume_id=VOLUME,
    generation=1,
    backend=VolumeBackend(class_name=VolumeClass.FILE, format=VolumeFormat.RAW, size_bytes=1 << 20),
    state=VolumeState.OPEN,
)


class Recorder:
    """A monitor that says yes to all and remembers it."""

    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []

    async def add_node(self, node: graph.Node) -> None:
        await self.call("blockdev-add", node)

    async def call(self, command: str, arguments: graph.Node) -> None:
        await anyio.lowlevel.checkpoint()
        self.said.append((command, cast(dict[str, Any], arguments)))


def layer(image_format: str = "raw", key: str = "") -> graph.LayerNode:
    protocol = graph.Protocol(driver="file", options={"filename": "/v/disk"})
    return graph.LayerNode(number=1, format=image_format, protocol=protocol, key=key)


@pytest.mark.parametrize("target", [layer(), layer("qcow2"), layer("qcow2", "default/k")])
async def test_a_target_gives_nothing_back_until_the_mirror_runs(target: graph.LayerNode) -> None:
    recorder = Recorder()

    await mirrors.start(cast(Monitor, recorder), ROW, target, "job")

    (added, opened), (mirror, job), (reopened, anew) = recorder.said
    assert (added, mirror, reopened) == ("blockdev-add", "blockdev-mirror", "blockdev-reopen")
    assert opened["discard"] == "ignore"
    assert opened["file"]["discard"] == "unmap"
    assert job["speed"] == mirrors.SLOWLY_BPS
    (options,) = anew["options"]
    assert options["discard"] == "unmap"
    assert options["file"] == graph.protocol_node(VOLUME, 1)
    assert {**opened, "discard": "", "file": ""} == {**options, "discard": "", "file": ""}


async def test_an_encrypted_raw_target_is_not_opened_anew() -> None:
    recorder = Recorder()
    await mirrors.start(cast(Monitor, recorder), ROW, layer(key="default/k"), "job")
    assert [command for command, _ in recorder.said] == ["blockdev-add", "blockdev-mirror"]


@pytest.mark.parametrize(("key", "header"), [("", 0), ("default/k", PAYLOAD_BYTES)])
def test_a_larger_place_is_seen_as_large_as_the_disk_and_its_header(key: str, header: int) -> None:
    node = cast(dict[str, Any], graph.overlay(VOLUME, limited(layer(key=key), 1 << 20)))
    assert node["file"]["size"] == (1 << 20) + header
    assert node["file"]["node-name"] == graph.protocol_node(VOLUME, 1)
    assert "node-name" not in node["file"]["file"]
