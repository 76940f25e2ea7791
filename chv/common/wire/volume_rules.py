"""Rules of Volume and VolumeSnapshot that span fields or need more than a pattern. Pure.

Fails with InvalidArgument naming field, value and fix.
"""

from __future__ import annotations

from chv.common.errors import InvalidArgument
from chv.common.names import check_name, shown
from chv.common.quantity import parse_bytes, parse_duration_s
from chv.common.wire.resource_base import ImageFormat
from chv.common.wire.storage import VolumeClass
from chv.common.wire.volume_resources import (
    BandwidthLimit,
    CloneModeName,
    IopsLimit,
    VolumeAccessMode,
    VolumeLimits,
    VolumeSnapshotSpec,
    VolumeSourceSpec,
    VolumeSpec,
)

VOLUME_BYTES_MIN = 1 << 20
VOLUME_BYTES_MAX = 1 << 46
SECTOR_BYTES = 512
BYTES_PER_SECOND_MAX = 1 << 50
IOPS_SIZE_BYTES_MAX = 1 << 30
FREEZE_S_MIN, FREEZE_S_MAX = 1.0, 60.0
PLACES = ("block", "lvm", "nbd", "iscsi", "rbd")
# What is there already is used as it is: we neither make nor wipe it.
FOUND = (VolumeClass.BLOCK, VolumeClass.NBD, VolumeClass.ISCSI)


def check_volume(spec: VolumeSpec) -> None:
    """Check a volume by itself."""
    _check_size(spec.size)
    _check_place(spec)
    _check_format(spec)
    if spec.source is not None:
        _check_source(spec, spec.source)
    elif spec.access_mode is VolumeAccessMode.READ_ONLY_MANY and spec.class_ not in FOUND:
        raise InvalidArgument(
            "nobody could ever write to it, so it would stay empty",
            field="spec.accessMode",
            hint="give it a source, or ReadWriteOnce",
        )
    if spec.encryption is not None:
        check_name(spec.encryption.key, field="spec.encryption.key")
    _check_limits(spec.limits)


def _check_size(text: str) -> None:
    size = parse_bytes(text, field="spec.size")
    if not VOLUME_BYTES_MIN <= size <= VOLUME_BYTES_MAX:
        raise InvalidArgument(
            f"{shown(text)} is out of range", field="spec.size", hint="1Mi to 64Ti"
        )
    if size % SECTOR_BYTES:
        raise InvalidArgument(
            f"{shown(text)} is not a multiple of {SECTOR_BYTES} bytes",
            field="spec.size",
            hint="use Ki, Mi or Gi",
        )


def _check_place(spec: VolumeSpec) -> None:
    """Exactly the place of the class is given; class `file` has none but perhaps a pool."""
    wanted = spec.class_.value
    for name in PLACES:
        given = getattr(spec, name) is not None
        if given and name != wanted:
            raise InvalidArgument(
                f"the place of class {name} in a volume of class {wanted}",
                field=f"spec.{name}",
                hint=f"write class: {name}, or leave spec.{name} out",
            )
        if name == wanted and not given:
            raise InvalidArgument(
                f"class {wanted} needs to know where", field=f"spec.{name}", hint=_EXAMPLES[name]
            )
    if spec.pool and spec.class_ is not VolumeClass.FILE:
        raise InvalidArgument(
            f"{shown(spec.pool)} is for volumes of class file",
            field="spec.pool",
            hint="leave it out",
        )
    _check_names(spec)


_EXAMPLES = {
    "block": "block: {device: /dev/sdb}",
    "lvm": "lvm: {volumeGroup: vg0}",
    "nbd": "nbd: {host: 192.0.2.1, export: disk}",
    "iscsi": "iscsi: {host: 192.0.2.1, target: iqn.2024-01.example:disk}",
    "rbd": "rbd: {pool: vms}",
}


def _check_names(spec: VolumeSpec) -> None:
    """What a pattern lets be empty and the class needs."""
    needed: list[tuple[str, str]] = []
    if spec.block is not None:
        needed.append(("spec.block.device", spec.block.device))
    if spec.lvm is not None:
        needed.append(("spec.lvm.volumeGroup", spec.lvm.volume_group))
    if spec.iscsi is not None:
        needed += [
            ("spec.iscsi.host", spec.iscsi.host),
            ("spec.iscsi.target", spec.iscsi.target),
        ]
    if spec.rbd is not None:
        needed.append(("spec.rbd.pool", spec.rbd.pool))
    if spec.nbd is not None:
        if spec.nbd.host and spec.nbd.socket:
            raise InvalidArgument(
                "a host and a socket", field="spec.nbd.socket", hint="leave one of them out"
            )
        needed.append(("spec.nbd.host", spec.nbd.host or spec.nbd.socket))
    for field, value in needed:
        if not value:
            raise InvalidArgument("it is empty", field=field, hint="say which")


def _check_format(spec: VolumeSpec) -> None:
    if spec.class_ is not VolumeClass.FILE and spec.format is not ImageFormat.RAW:
        raise InvalidArgument(
            f"class {spec.class_.value} has no format of its own",
            field="spec.format",
            hint="write format: raw",
        )


def _check_source(spec: VolumeSpec, source: VolumeSourceSpec) -> None:
    given = [name for name in ("image", "snapshot", "backup") if getattr(source, name)]
    if len(given) != 1:
        what = " and ".join(given) if given else "none of them"
        raise InvalidArgument(
            f"{what}", field="spec.source", hint="exactly one of image, snapshot, backup"
        )
    kind = given[0]
    if kind in ("image", "snapshot"):
        check_name(getattr(source, kind), field=f"spec.source.{kind}")
    if source.snapshot_volume and kind != "snapshot":
        _refuse_alien("snapshotVolume", "snapshot")
    if source.mode is not CloneModeName.LINKED and kind != "snapshot":
        _refuse_alien("mode", "snapshot")
    if source.backup_sequence and kind != "backup":
        _refuse_alien("backupSequence", "backup")
    if spec.class_ in FOUND:
        raise InvalidArgument(
            f"what is on a volume of class {spec.class_.value} is used as it is",
            field="spec.source",
            hint="leave it out, or take class file, lvm or rbd",
        )
    linked = kind == "snapshot" and source.mode is CloneModeName.LINKED
    if linked and (spec.class_ is not VolumeClass.FILE or spec.format is ImageFormat.RAW):
        raise InvalidArgument(
            "a linked clone is an overlay, a qcow2 file",
            field="spec.source.mode",
            hint="write mode: Full, or class: file and format: qcow2",
        )


def _refuse_alien(name: str, kind: str) -> None:
    raise InvalidArgument(
        f"it belongs to a {kind}", field=f"spec.source.{name}", hint="leave it out"
    )


# --- limits


def _check_limits(limits: VolumeLimits) -> None:
    iops = {
        "iopsTotal": limits.iops_total,
        "iopsRead": limits.iops_read,
        "iopsWrite": limits.iops_write,
    }
    bandwidth = {
        "bandwidthTotal": limits.bandwidth_total,
        "bandwidthRead": limits.bandwidth_read,
        "bandwidthWrite": limits.bandwidth_write,
    }
    rates = {name: _iops(limit) for name, limit in iops.items()}
    rates |= {name: _bandwidth(name, limit) for name, limit in bandwidth.items()}
    for name, (limit, burst, seconds) in rates.items():
        _check_burst(f"spec.limits.{name}", limit, burst, seconds)
    for kind in ("iops", "bandwidth"):
        parts = [name for name in (f"{kind}Read", f"{kind}Write") if rates[name][0]]
        if rates[f"{kind}Total"][0] and parts:
            raise InvalidArgument(
                f"a total does not go together with {' or '.join(parts)}",
                field=f"spec.limits.{kind}Total",
                hint="limit the total, or read and write apart",
            )
    if limits.iops_size:
        size = parse_bytes(limits.iops_size, field="spec.limits.iopsSize")
        if not SECTOR_BYTES <= size <= IOPS_SIZE_BYTES_MAX:
            raise InvalidArgument(
                f"{shown(limits.iops_size)} is out of range",
                field="spec.limits.iopsSize",
                hint="512 bytes to 1Gi",
            )


def _iops(limit: IopsLimit) -> tuple[int, int, int]:
    return limit.limit, limit.burst, limit.burst_seconds


def _bandwidth(name: str, limit: BandwidthLimit) -> tuple[int, int, int]:
    numbers = []
    for part in ("limit", "burst"):
        field, text = f"spec.limits.{name}.{part}", getattr(limit, part)
        count = parse_bytes(text, field=field) if text else 0
        if count > BYTES_PER_SECOND_MAX:
            raise InvalidArgument(
                f"{shown(text)} is out of range", field=field, hint="at most 1024Ti a second"
            )
        numbers.append(count)
    return numbers[0], numbers[1], limit.burst_seconds


def _check_burst(field: str, limit: int, burst: int, seconds: int) -> None:
    if burst and not limit:
        raise InvalidArgument("a burst above no limit", field=f"{field}.burst", hint="set limit")
    if burst and burst < limit:
        raise InvalidArgument(
            f"{burst} is less than the limit {limit}",
            field=f"{field}.burst",
            hint="at least the limit, or leave it out",
        )
    if seconds != 1 and not burst:
        raise InvalidArgument(
            "it is for how long a burst may last", field=f"{field}.burstSeconds", hint="set burst"
        )


# --- VolumeSnapshot


def check_snapshot(spec: VolumeSnapshotSpec) -> None:
    """Check a snapshot by itself."""
    if bool(spec.volume) is bool(spec.virtual_machine):
        what = "a volume and a virtual machine" if spec.volume else "of what?"
        raise InvalidArgument(
            what, field="spec.volume", hint="exactly one of volume and virtualMachine"
        )
    if spec.volume:
        check_name(spec.volume, field="spec.volume")
    else:
        check_name(spec.virtual_machine, field="spec.virtualMachine")
    if spec.freeze:
        seconds = parse_duration_s(spec.freeze, field="spec.freeze")
        if not FREEZE_S_MIN <= seconds <= FREEZE_S_MAX:
            raise InvalidArgument(
                f"{shown(spec.freeze)} is out of range", field="spec.freeze", hint="1s to 60s"
            )
