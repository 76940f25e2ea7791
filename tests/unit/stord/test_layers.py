"""Changes of layers: what they make of a record, and what they refuse by name and number."""

from __future__ import annotations

import msgspec
import pytest

from chv.common.errors import FailedPrecondition, NotFound, ResourceExhausted
from chv.common.wire.stord import VolumeBackend, VolumeClass, VolumeFormat
from chv.stord import layers
from chv.stord.layers import LAYERS_MAX
from chv.stord.records import ChangeKind, Layer, Volume, VolumeState

EMPTY = Volume(
    volume_id="v",
    generation=1,
    state=VolumeState.OPEN,
    backend=VolumeBackend(class_name=VolumeClass.FILE, format=VolumeFormat.RAW, size_bytes=512),
    backup_bitmap="b",
)


def with_snapshots(*names: str) -> Volume:
    row = EMPTY
    for name in names:
        row = layers.finish_snapshot(layers.begin_snapshot(row, name, "now"), 512)
    return row


def test_a_snapshot_freezes_the_top_and_puts_an_empty_layer_on_it() -> None:
    row = with_snapshots("a", "b")
    assert row.layers == (
        Layer(number=0, snapshots=("a",)),
        Layer(number=1, snapshots=("b",)),
        Layer(number=2),
    )
    assert [(each.snapshot_id, each.layer) for each in row.snapshots] == [("a", 0), ("b", 1)]
    assert row.next_layer == 3


def test_an_abandoned_snapshot_uses_up_its_number_and_nothing_else() -> None:
    row = layers.abandon(layers.begin_snapshot(EMPTY, "a", "now"))
    assert (row.layers, row.snapshots, row.change) == (EMPTY.layers, (), None)
    assert (
        layers.begin_snapshot(row, "b", "now").change
        != layers.begin_snapshot(EMPTY, "b", "now").change
    )


def test_a_merge_lets_the_layer_below_stand_for_the_one_above() -> None:
    row = layers.begin_merge(with_snapshots("a", "b", "c"), "b")
    assert row.change is not None
    assert (row.change.kind, row.change.layer) == (ChangeKind.MERGE, 2)
    assert not layers.is_active(row)
    merged = layers.finish_merge(row)
    assert layers.numbers(merged) == [0, 1, 3]
    assert [(each.snapshot_id, each.layer) for each in merged.snapshots] == [("a", 0), ("c", 1)]


def test_only_the_merge_of_the_top_is_active_and_pivots() -> None:
    row = layers.begin_merge(with_snapshots("a"), "a")
    assert layers.is_active(row)
    pivoted = layers.pivot(row)
    assert pivoted.change is not None
    assert pivoted.change.kind is ChangeKind.PIVOT
    assert layers.numbers(layers.finish_merge(pivoted)) == [0]


def test_a_cancelled_merge_leaves_its_snapshot_marked_and_of_no_use() -> None:
    row = layers.abandon(layers.begin_merge(with_snapshots("a", "b"), "a"))
    assert layers.numbers(row) == [0, 1, 2]
    with pytest.raises(FailedPrecondition, match="no longer whole"):
        layers.require_whole(row, "a")
    assert layers.require_whole(row, "b").layer == 1
    assert layers.numbers(layers.finish_merge(layers.begin_merge(row, "a"))) == [0, 2]


def test_a_restoration_puts_an_empty_layer_on_the_snapshot() -> None:
    row = layers.restored(with_snapshots("a", "b"), "b")
    assert layers.numbers(row) == [0, 1, 3]
    assert [each.snapshot_id for each in row.snapshots] == ["a", "b"]


def test_no_change_of_layers_keeps_the_record_of_what_a_backup_lacks() -> None:
    row = with_snapshots("a")
    assert row.backup_bitmap == ""
    marked = msgspec.structs.replace(row, backup_bitmap="b")
    assert layers.begin_merge(marked, "a").backup_bitmap == ""
    assert layers.restored(marked, "a").backup_bitmap == ""


def test_later_snapshots_are_told_oldest_first() -> None:
    row = with_snapshots("a", "b", "c")
    assert layers.from_on(row, "b") == ["b", "c"]
    with pytest.raises(NotFound, match="d"):
        layers.from_on(row, "d")


def test_a_full_chain_is_refused_with_its_number() -> None:
    row = with_snapshots(*(f"s{number}" for number in range(LAYERS_MAX - 1)))
    with pytest.raises(ResourceExhausted, match=str(LAYERS_MAX)):
        layers.check_room(row)
    layers.check_room(EMPTY)
    with pytest.raises(ResourceExhausted):
        layers.check_room(EMPTY, LAYERS_MAX - 1)
