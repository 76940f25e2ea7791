"""Changes of layers against a model: no order of them, cut short anywhere, loses a block."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from chv.common.wire.stord import VolumeBackend, VolumeClass, VolumeFormat
from chv.stord import layers
from chv.stord.layers import LAYERS_MAX
from chv.stord.records import ChangeKind, Volume, VolumeState

BLOCKS = 6
Content = dict[int, int]
EMPTY = Volume(
    volume_id="v",
    generation=1,
    state=VolumeState.OPEN,
    backend=VolumeBackend(
        class_name=VolumeClass.FILE, format=VolumeFormat.RAW, size_bytes=512 * BLOCKS
    ),
)


def check(row: Volume) -> None:
    """What holds for every record, in the middle of a change or not."""
    numbers = layers.numbers(row)
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 0
    assert all(number < row.next_layer for number in numbers)
    assert row.top.snapshots == ()
    by_layer = {(s, layer.number) for layer in row.layers for s in layer.snapshots}
    assert by_layer == {(each.snapshot_id, each.layer) for each in row.snapshots}
    assert len(row.snapshots) == len(row.layers) - 1
    if row.change is not None and row.change.kind is not ChangeKind.SNAPSHOT:
        assert row.change.layer in numbers[1:]
    if row.change is not None and row.change.kind is ChangeKind.SNAPSHOT:
        assert row.change.layer not in numbers


@dataclass
class Machine:
    """A volume: its record, its files, and what its guest and its snapshots must read."""

    row: Volume = EMPTY
    files: dict[int, Content] = field(default_factory=lambda: {0: {}})
    guest: Content = field(default_factory=dict)
    kept: dict[str, Content] = field(default_factory=dict)
    count: int = 0

    def chain(self, numbers: list[int]) -> Content:
        content: Content = {}
        for number in numbers:
            content |= self.files[number]
        return content

    def verify(self) -> None:
        check(self.row)
        assert self.chain(layers.numbers(self.row)) == self.guest
        for snapshot in self.row.snapshots:
            if not snapshot.deleting:
                upto = [layer.number for layer in layers.upto(self.row, snapshot.layer)]
                assert self.chain(upto) == self.kept[snapshot.snapshot_id]

    def write(self, block: int) -> None:
        self.count += 1
        self.guest[block] = self.count
        self.files[self.row.top.number][block] = self.count

    def snapshot(self, kill: int) -> None:
        """`kill`: after how many of the steps; what is left of them is settled by the files."""
        if len(self.row.layers) >= LAYERS_MAX:
            return
        self.count += 1
        name = f"s{self.count}"
        self.row = layers.begin_snapshot(self.row, name, "now")
        check(self.row)
        assert self.row.change is not None
        number = self.row.change.layer
        if kill >= 1:
            self.files[number] = {}
        if kill >= 2:  # the transaction: from here on the guest writes to the overlay
            self.kept[name] = dict(self.guest)
            self.files[number][0] = self.guest[0] = self.count
        if number in self.files:
            self.kept.setdefault(name, dict(self.guest))
            self.row = layers.finish_snapshot(self.row, 512 * BLOCKS)
        else:
            self.row = layers.abandon(self.row)

    def merge(self, index: int, kill: int) -> None:
        if not self.row.snapshots:
            return
        snapshot = self.row.snapshots[index % len(self.row.snapshots)]
        self.row = layers.begin_merge(self.row, snapshot.snapshot_id)
        check(self.row)
        assert self.row.change is not None
        source, target = self.row.change.layer, layers.below(self.row, self.row.change.layer)
        moved = list(self.files[source].items())
        part = moved if kill >= 2 else moved[: len(moved) // 2]
        self.files[target] |= dict(part)
        self.verify()  # whole with the layer, however much of it was merged
        if kill == 0:  # cancelled, or the storage daemon died: the guest writes on
            self.row = layers.abandon(self.row)
            return
        self.files[target] |= dict(moved)
        if layers.is_active(self.row):
            self.row = layers.pivot(self.row)
            check(self.row)
            self.count += 1
            self.files[target][1] = self.guest[1] = self.count  # written after the pivot
        self.row = layers.finish_merge(self.row)
        del self.files[source]

    def restore(self, index: int) -> None:
        whole = [each for each in self.row.snapshots if not each.deleting]
        if not whole:
            return
        snapshot = whole[index % len(whole)]
        if len(layers.from_on(self.row, snapshot.snapshot_id)) > 1:
            return  # refused: it has later ones
        before = self.row
        self.files[self.row.next_layer] = {}
        self.row = layers.restored(self.row, snapshot.snapshot_id)
        for gone in set(layers.numbers(before)) - set(layers.numbers(self.row)):
            del self.files[gone]
        self.guest = dict(self.kept[snapshot.snapshot_id])


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, int, int]:
    verb = draw(st.sampled_from(["write", "write", "snapshot", "merge", "restore"]))
    return verb, draw(st.integers(0, BLOCKS - 1)), draw(st.integers(0, 2))


@settings(max_examples=300, deadline=None)
@given(st.lists(steps(), max_size=60))
def test_no_order_of_changes_loses_a_block_of_the_volume_or_of_a_snapshot(
    plan: list[tuple[str, int, int]],
) -> None:
    machine = Machine()
    for verb, number, kill in plan:
        if verb == "write":
            machine.write(number)
        elif verb == "snapshot":
            machine.snapshot(kill)
        elif verb == "merge":
            machine.merge(number, kill)
        else:
            machine.restore(number)
        machine.verify()
        assert machine.row.change is None
        assert set(machine.files) == set(layers.numbers(machine.row))


@given(st.lists(st.integers(0, 5), max_size=40))
def test_a_chain_never_grows_past_its_limit_and_numbers_never_come_back(plan: list[int]) -> None:
    row, seen = EMPTY, {0}
    for index, step in enumerate(plan):
        if step and len(row.layers) < LAYERS_MAX:
            row = layers.finish_snapshot(layers.begin_snapshot(row, f"s{index}", "now"), 512)
            assert row.top.number not in seen
            seen.add(row.top.number)
        elif row.snapshots:
            row = layers.finish_merge(
                layers.begin_merge(row, row.snapshots[step % len(row.snapshots)].snapshot_id)
            )
        check(row)
