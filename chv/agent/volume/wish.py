"""What a Volume's spec means in stord's words, and stord's limits in the spec's. Pure.

Sources are resolved by the caller: a name becomes a path or an id there, and only there.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from chv.common.quantity import format_bytes, parse_bytes
from chv.common.wire import stord
from chv.common.wire.resources import (
    BandwidthLimit,
    BlockSpec,
    ImageFormat,
    IopsLimit,
    IscsiSpec,
    LvmSpec,
    NbdSpec,
    RbdSpec,
    SpacePolicyName,
    Struct,
    Volume,
    VolumeAccessMode,
    VolumeLimits,
    VolumeSpec,
)

_replace = msgspec.structs.replace

P = TypeVar("P", bound=msgspec.Struct)
Source = stord.VolumeSource | stord.SnapshotSource | stord.BackupSource
PLACES = ("class_name", "format", "pool", "block", "lvm", "nbd", "iscsi", "rbd")
NO_LIMITS = VolumeLimits()
SOURCES = ("source", "snapshot", "backup")


def backend_of(volume: Volume, source: Source | None) -> stord.VolumeBackend:
    """Return the volume as stord is to make it; `source` is what its source resolves to."""
    spec = volume.spec
    return stord.VolumeBackend(
        class_name=spec.class_,
        format=stord.VolumeFormat(spec.format.value),
        size_bytes=parse_bytes(spec.size, field="spec.size"),
        pool=spec.pool,
        block=_place(spec.block, stord.BlockDevice),
        lvm=_place(spec.lvm, stord.LvmPlace),
        nbd=_place(spec.nbd, stord.NbdPlace),
        iscsi=_place(spec.iscsi, stord.IscsiPlace),
        rbd=_place(spec.rbd, stord.RbdPlace),
        source=source if isinstance(source, stord.VolumeSource) else None,
        snapshot=source if isinstance(source, stord.SnapshotSource) else None,
        backup=source if isinstance(source, stord.BackupSource) else None,
        access=_ACCESS[spec.access_mode],
        encryption=_encryption(volume),
        limits=limits_of(spec.limits),
        space_policy=_POLICY[spec.space_policy],
    )


_ACCESS = {
    VolumeAccessMode.READ_WRITE_ONCE: stord.AccessMode.READ_WRITE_ONCE,
    VolumeAccessMode.READ_ONLY_MANY: stord.AccessMode.READ_ONLY_MANY,
}
_POLICY = {
    SpacePolicyName.STOP: stord.SpacePolicy.STOP,
    SpacePolicyName.REPORT: stord.SpacePolicy.REPORT,
}


def key_name(volume: Volume) -> str:
    """Return `<namespace>/<name>` of the key that is to open the volume, '' for none."""
    encryption = volume.spec.encryption
    return f"{volume.metadata.namespace}/{encryption.key}" if encryption is not None else ""


def _encryption(volume: Volume) -> stord.Encryption | None:
    name = key_name(volume)
    return stord.Encryption(key=name) if name else None


def _place(spec: Struct | None, kind: type[P]) -> P | None:
    """The places have the same fields on both sides, named as each side names them."""
    if spec is None:
        return None
    return kind(**{name: getattr(spec, name) for name in kind.__struct_fields__})


# --- where it is


def at_the_place_of(wanted: stord.VolumeBackend, there: stord.VolumeBackend) -> stord.VolumeBackend:
    """Return `wanted`, but where and from what `there` is."""
    return _replace(wanted, **{name: getattr(there, name) for name in (*PLACES, *SOURCES)})


def with_the_source_of(
    wanted: stord.VolumeBackend, there: stord.VolumeBackend
) -> stord.VolumeBackend:
    """Return `wanted` as made from what `there` was made from: that never changes."""
    return _replace(wanted, **{name: getattr(there, name) for name in SOURCES})


def same_place(one: stord.VolumeBackend, other: stord.VolumeBackend) -> bool:
    """Tell whether two descriptions mean the same place in the same format."""
    return all(getattr(one, name) == getattr(other, name) for name in PLACES)


def place_text(backend: stord.VolumeBackend) -> str:
    """Return the place in words that differ for every other place."""
    given = {name: getattr(backend, name) for name in PLACES}
    plain = msgspec.to_builtins({name: value for name, value in given.items() if value})
    return ", ".join(f"{name} {value}" for name, value in plain.items())


def moved_back(spec: VolumeSpec, there: stord.VolumeBackend) -> VolumeSpec:
    """Return the spec with the place where the volume is."""
    return _replace(
        spec,
        class_=there.class_name,
        format=ImageFormat(there.format.value),
        pool=there.pool,
        block=_spec_place(there.block, BlockSpec),
        lvm=_spec_place(there.lvm, LvmSpec),
        nbd=_spec_place(there.nbd, NbdSpec),
        iscsi=_spec_place(there.iscsi, IscsiSpec),
        rbd=_spec_place(there.rbd, RbdSpec),
    )


def _spec_place(place: msgspec.Struct | None, kind: type[P]) -> P | None:
    if place is None:
        return None
    return kind(**{name: getattr(place, name) for name in place.__struct_fields__})


# --- limits


def limits_of(limits: VolumeLimits) -> stord.Limits:
    """Return the limits in numbers."""
    return stord.Limits(
        iops_total=_iops(limits.iops_total),
        iops_read=_iops(limits.iops_read),
        iops_write=_iops(limits.iops_write),
        bps_total=_bandwidth(limits.bandwidth_total),
        bps_read=_bandwidth(limits.bandwidth_read),
        bps_write=_bandwidth(limits.bandwidth_write),
        iops_size_bytes=_bytes(limits.iops_size),
    )


def shown_limits(limits: stord.Limits) -> VolumeLimits:
    """Return what the storage daemon reports as a manifest would say it."""
    shown: dict[str, object] = {
        "iops_total": _shown_iops(limits.iops_total),
        "iops_read": _shown_iops(limits.iops_read),
        "iops_write": _shown_iops(limits.iops_write),
        "bandwidth_total": _shown_bandwidth(limits.bps_total),
        "bandwidth_read": _shown_bandwidth(limits.bps_read),
        "bandwidth_write": _shown_bandwidth(limits.bps_write),
        "iops_size": _quantity(limits.iops_size_bytes),
    }
    # A default is left out of the JSON only where it is not given.
    given = {name: value for name, value in shown.items() if value != getattr(NO_LIMITS, name)}
    return _replace(NO_LIMITS, **given) if given else NO_LIMITS


def _iops(limit: IopsLimit) -> stord.Rate:
    return stord.Rate(limit=limit.limit, burst=limit.burst, burst_s=limit.burst_seconds)


def _bandwidth(limit: BandwidthLimit) -> stord.Rate:
    return stord.Rate(
        limit=_bytes(limit.limit), burst=_bytes(limit.burst), burst_s=limit.burst_seconds
    )


def _shown_iops(rate: stord.Rate) -> IopsLimit:
    return IopsLimit(limit=rate.limit, burst=rate.burst, burst_seconds=rate.burst_s)


def _shown_bandwidth(rate: stord.Rate) -> BandwidthLimit:
    return BandwidthLimit(
        limit=_quantity(rate.limit), burst=_quantity(rate.burst), burst_seconds=rate.burst_s
    )


def _bytes(text: str) -> int:
    return parse_bytes(text) if text else 0


def _quantity(count: int) -> str:
    return format_bytes(count) if count else ""
