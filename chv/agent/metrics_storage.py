"""Storage in the metrics: what stord counts, under names of ours. Pure.

KubeVirt's storage metrics count the guest's requests by disk. Nobody here counts those: stord
tells what the storage daemon of a VM moved, for all its disks together, so these have other names.
"""

from __future__ import annotations

from chv.agent.metrics_text import Family
from chv.agent.tables import Tables
from chv.common.wire.stord import StorageMetrics


def storage_families(tables: Tables, counted: StorageMetrics | None) -> list[Family]:
    """Return the families; nothing where stord was not heard of."""
    if counted is None:
        return []
    return [*_vms(tables, counted), *_volumes(tables, counted), *_places(counted)]


def _vms(tables: Tables, counted: StorageMetrics) -> list[Family]:
    prefix = "chv_vm_storage_daemon"
    read = Family(f"{prefix}_read_bytes_total", "counter", "Read from storage for all disks.")
    written = Family(f"{prefix}_written_bytes_total", "counter", "Written for all disks.")
    resident = Family(f"{prefix}_resident_bytes", "gauge", "Resident memory.")
    for each in counted.vms:
        labels = _names(tables, each.vm_id)
        if labels is not None:
            read.add(each.read_bytes, **labels)
            written.add(each.write_bytes, **labels)
            resident.add(each.resident_bytes, **labels)
    return [read, written, resident]


def _volumes(tables: Tables, counted: StorageMetrics) -> list[Family]:
    size = Family("chv_volume_size_bytes", "gauge", "Size as the guest sees it.")
    allocated = Family("chv_volume_allocated_bytes", "gauge", "Bytes that it takes.")
    errors = Family("chv_volume_errors_total", "counter", "Errors seen since stord started.")
    for each in counted.volumes:
        labels = _names(tables, each.volume_id)
        if labels is not None:
            size.add(each.size_bytes, **labels)
            allocated.add(each.allocated_bytes, **labels)
            errors.add(each.errors, **labels)
    return [size, allocated, errors]


def _places(counted: StorageMetrics) -> list[Family]:
    total = Family("chv_storage_place_size_bytes", "gauge", "Size of where volumes are.")
    free = Family("chv_storage_place_free_bytes", "gauge", "Free there.")
    promised = Family("chv_storage_place_promised_bytes", "gauge", "Sizes of all volumes there.")
    for each in counted.places:
        total.add(each.total_bytes, location=each.location)
        free.add(each.free_bytes, location=each.location)
        promised.add(each.promised_bytes, location=each.location)
    return [total, free, promised]


def _names(tables: Tables, uid: str) -> dict[str, str] | None:
    stored = tables.objects.get(uid)
    if stored is None:
        return None
    return {"namespace": stored.key[1], "name": stored.key[2]}
