"""Rules of stord without effects: limits, growth under a VM, crash class, tombstones."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from chv.common.errors import InvalidArgument, StaleGeneration
from chv.common.store import Store
from chv.common.wire.stord import (
    CrashClass,
    Limits,
    Rate,
    VmmClient,
    VolumeBackend,
    VolumeClass,
    VolumeFormat,
)
from chv.stord import crash_class, graveyard, limits
from chv.stord.graveyard import Graveyard
from chv.stord.growth import MAJOR_MIN, Situation, may_grow_online
from chv.stord.keeper import loss_recorded
from chv.stord.records import (
    MIGRATIONS,
    Attachment,
    Backend,
    BackendPhase,
    ChangeKind,
    Layer,
    LayerChange,
    Records,
    Volume,
    VolumeState,
)


# --- limits
@pytest.mark.parametrize(
    ("refused", "field"),
    [
        (Limits(iops_total=Rate(limit=9), iops_read=Rate(limit=1)), "iops_total"),
        (Limits(bps_total=Rate(limit=9), bps_write=Rate(limit=1)), "bps_total"),
        (Limits(iops_read=Rate(burst=5)), "iops_read.burst"),
        (Limits(bps_write=Rate(limit=10, burst=9)), "bps_write.burst"),
        (Limits(bps_read=Rate(limit=1, burst=10**14, burst_s=11)), "bps_read.burst_s"),
        (Limits(bps_total=Rate(limit=10**15 + 1)), "bps_total"),
        (Limits(iops_size_bytes=4096), "iops_size_bytes"),
        (Limits(iops_size_bytes=4096, bps_total=Rate(limit=9)), "iops_size_bytes"),
    ],
)
def test_what_qemu_refuses_is_refused_with_its_field(refused: Limits, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        limits.check(refused)

    assert caught.value.field == f"backend.limits.{field}"


@pytest.mark.parametrize(
    "good",
    [
        Limits(),
        Limits(iops_total=Rate(limit=1), bps_read=Rate(limit=1), bps_write=Rate(limit=2)),
        Limits(iops_read=Rate(limit=5, burst=5, burst_s=3600), iops_size_bytes=1),
        Limits(bps_total=Rate(limit=10**15, burst=10**15)),
    ],
)
def test_what_qemu_takes_passes(good: Limits) -> None:
    limits.check(good)


# --- growth under a VM
def test_a_disk_grows_under_its_vm_only_where_everything_that_makes_it_safe_holds() -> None:
    both = (False, True)
    allowed = [
        Situation(
            client=client,
            major=major,
            serving=serving,
            connected=connected,
            told=told,
            read_only=read_only,
        )
        for client in VmmClient
        for major in (0, 7, MAJOR_MIN, 11)
        for serving, connected, told, read_only in itertools.product(both, repeat=4)
    ]
    allowed = [now for now in allowed if may_grow_online(now)]

    assert allowed == [
        Situation(client=VmmClient.QEMU, major=major, serving=True, connected=True, told=True)
        for major in (MAJOR_MIN, 11)
    ]


# --- crash class
def volume(**changes: object) -> Volume:
    spec = {"class_name": VolumeClass.FILE, "format": VolumeFormat.RAW, "size_bytes": 1 << 20}
    backend = VolumeBackend(**(spec | changes))  # type: ignore[arg-type]
    return Volume(volume_id="v", generation=1, backend=backend, state=VolumeState.OPEN)


def changed(row: Volume, **changes: object) -> Volume:
    return msgspec.structs.replace(row, **changes)


def attached(**changes: object) -> Attachment:
    fields = {"volume_id": "v", "vm_id": "m", "read_only": False, "proxied": True}
    return Attachment(**(fields | changes))  # type: ignore[arg-type]


OVERLAID = changed(volume(), layers=(Layer(number=0), Layer(number=1)))
QCOW2 = volume(format=VolumeFormat.QCOW2)
SNAPSHOT_BEGUN = changed(volume(), change=LayerChange(kind=ChangeKind.SNAPSHOT, layer=1))
MOVE_BEGUN = changed(volume(), change=LayerChange(kind=ChangeKind.MOVE))
CACHED = volume(class_name=VolumeClass.RBD)


@pytest.mark.parametrize(
    ("row", "disk", "keeps"),
    [
        (attached(), volume(), True),
        (attached(), volume(class_name=VolumeClass.LVM), True),
        (attached(), MOVE_BEGUN, True),
        (attached(proxied=False), volume(), False),
        (attached(), QCOW2, False),
        (attached(), OVERLAID, False),
        (attached(), SNAPSHOT_BEGUN, False),
        (attached(), CACHED, False),
        (attached(), None, False),
        (attached(read_only=True), QCOW2, True),
        (attached(read_only=True, proxied=False), volume(), False),
    ],
)
def test_a_vm_is_kept_only_where_nothing_of_its_disk_was_in_the_storage_daemon(
    row: Attachment, disk: Volume | None, keeps: bool
) -> None:
    expected = CrashClass.KEEP_VM if keeps else CrashClass.RESET_VM

    assert crash_class.of_attachment(row, disk) is expected


def test_the_class_of_a_vm_is_the_worst_of_its_disks() -> None:
    keep, reset = CrashClass.KEEP_VM, CrashClass.RESET_VM

    assert crash_class.worst([keep, keep]) is keep
    assert crash_class.worst([keep, reset, keep]) is reset
    assert crash_class.worst([]) is reset


def test_a_recovery_that_failed_is_not_counted_as_another_loss() -> None:
    serving = Backend(vm_id="m", storage_uid=1, vm_gid=1, boot_id="b", phase=BackendPhase.SERVING)

    lost = loss_recorded(serving, "it ended", "then")
    recovering = msgspec.structs.replace(lost, phase=BackendPhase.RECOVERING)
    again = loss_recorded(recovering, "x", "y")

    assert (lost.losses, again.losses) == (1, 1)
    assert lost.last_loss.startswith("then: it ended")


# --- tombstones
class Clock:
    """A clock that stands."""

    def __init__(self) -> None:
        self.moment = datetime(2026, 1, 1, tzinfo=UTC)

    def now(self) -> datetime:
        return self.moment

    def monotonic(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(seconds)


async def test_tombstones_keep_the_newest_generation_and_are_forgotten_with_age_and_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graveyard, "TOMBSTONES_MAX", 2)
    async with Store.open(tmp_path / "s.db", MIGRATIONS) as store:
        records, clock = await Records.load(store), Clock()
        yard = Graveyard(records, clock)
        await records.drop_volume("a", yard.stone("a", 5))
        await records.drop_volume("a", yard.stone("a", 3))
        with pytest.raises(StaleGeneration, match="deleted at generation 5"):
            yard.refuse_late("a", 4)
        yard.refuse_late("a", 5)
        for name in ("b", "c"):
            clock.moment += timedelta(days=1)
            await records.drop_volume(name, yard.stone(name, 1))

        await yard.tend()
        assert set(records.tombstones) == {"b", "c"}
        clock.moment += graveyard.AGE_MAX
        await yard.tend()
        assert set(records.tombstones) == {"c"}
        assert set((await Records.load(store)).tombstones) == {"c"}
