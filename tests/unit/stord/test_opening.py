"""What the command line of a storage daemon opens, and what is left to its monitor."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from chv.common.wire.stord import Limits, Rate
from chv.stord.opening import is_plain
from chv.stord.qsd import graph

VOLUME = "0123abcd-1111-2222-3333-444455556666"


def layer(driver: str = "file", *, key: str = "", number: int = 0) -> graph.LayerNode:
    protocol = graph.Protocol(driver=driver, options={"filename": "/v/disk"}, aio="native")
    return graph.LayerNode(number=number, format="qcow2", protocol=protocol, key=key)


def serving(**changes: object) -> graph.Serving:
    disk = graph.Disk(volume_id=VOLUME, own=(layer(), layer(number=3)))
    return graph.Serving(
        disk=msgspec.structs.replace(disk, **changes),
        lock_path=Path("/v/lock"),
        socket_path=Path("/r/0123abcd11.sock"),
    )


def parsed(options: list[str]) -> list[tuple[str, dict[str, object]]]:
    pairs = zip(options[::2], options[1::2], strict=True)
    return [(name, msgspec.json.decode(text)) for name, text in pairs]


def test_the_lock_is_taken_before_anything_is_opened_and_the_export_comes_last() -> None:
    options = parsed(graph.options(serving()))

    names = [node.get("node-name", node.get("id")) for _, node in options]
    assert names == [f"{each}-0123abcd11" for each in ("l", "g", "f3", "t")] + ["t-0123abcd11"]
    kinds = ["--blockdev", "--object", "--blockdev", "--blockdev", "--export"]
    assert [option for option, _ in options] == kinds
    assert options[4][1]["addr"] == {"type": "unix", "path": "/r/0123abcd11.sock"}


def test_disks_come_before_the_monitor_so_that_an_answer_means_they_are_served() -> None:
    argv = graph.argv(Path("/r/m"), Path("/r/p"), "qsd", (serving(),))

    assert argv.index("--export") < argv.index("--chardev") < argv.index("--monitor")


def test_a_disk_that_is_only_read_is_exported_so() -> None:
    *_, (_, writable) = parsed(graph.options(serving()))
    *_, (_, read_only) = parsed(graph.options(serving(read_only=True)))

    assert writable["writable"] is True
    assert "writable" not in read_only  # QEMU's default


def test_only_a_group_with_limits_is_told_of_them() -> None:
    limits = Limits(iops_total=Rate(limit=10))

    without = parsed(graph.options(serving()))[1][1]
    limited = parsed(graph.options(serving(limits=limits)))[1][1]

    assert without == {"qom-type": "throttle-group", "id": "g-0123abcd11"}
    assert limited["limits"] == graph.limits_arguments(limits)


@pytest.mark.parametrize(
    ("layers", "plain"),
    [
        ((layer(), layer("host_device")), True),
        ((layer(), layer(key="disk/key")), False),
        ((layer("nbd"),), False),
        ((layer("rbd"), layer()), False),
    ],
)
def test_neither_a_key_nor_a_server_is_for_a_command_line(
    layers: tuple[graph.LayerNode, ...], plain: bool
) -> None:
    *below, top = layers

    assert is_plain(graph.Disk(volume_id=VOLUME, below=tuple(below), own=(top,))) is plain
