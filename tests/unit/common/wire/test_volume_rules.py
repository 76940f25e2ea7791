"""What a Volume or VolumeSnapshot may say by itself; each refusal names field and fix."""

from __future__ import annotations

from typing import Any

import pytest

from chv.common.errors import InvalidArgument
from chv.common.wire.manifest import encode, parse
from chv.common.wire.types import API_VERSION


def document(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": "x"}, "spec": spec}


def volume(**spec: Any) -> dict[str, Any]:
    return document("Volume", {"size": "1Gi", **spec})


LVM = {"class": "lvm", "format": "raw", "lvm": {"volumeGroup": "vg0"}}
NBD = {"class": "nbd", "format": "raw", "nbd": {"host": "192.0.2.1"}}
GOOD = [
    {},
    {"pool": "fast", "format": "raw"},
    LVM,
    NBD,
    {"class": "nbd", "format": "raw", "nbd": {"socket": "/run/nbd.sock", "export": "a b"}},
    {"class": "block", "format": "raw", "block": {"device": "/dev/sdb"}},
    {"class": "iscsi", "format": "raw",
     "iscsi": {"host": "192.0.2.1", "target": "iqn.2024-01.example:disk", "lun": 1}},
    {"class": "rbd", "format": "raw", "rbd": {"pool": "vms"}},
    {"source": {"snapshot": "s", "mode": "Full"}, "format": "raw"},
    {**LVM, "source": {"snapshot": "s", "mode": "Full", "snapshotVolume": "v"}},
    {"source": {"backup": "/b", "backupSequence": 3}},
    {"accessMode": "ReadOnlyMany", "source": {"image": "i"}},
    {**NBD, "accessMode": "ReadOnlyMany"},
    {"encryption": {"key": "k"}},
    {"limits": {"iopsTotal": {"limit": 5, "burst": 5, "burstSeconds": 9}, "iopsSize": "4Ki"}},
    {"limits": {"bandwidthRead": {"limit": "1Mi"}, "bandwidthWrite": {"limit": "2M"}}},
]  # fmt: skip
BAD = [
    ({"class": "lvm", "format": "raw"}, "spec.lvm", "lvm: {volumeGroup: vg0}"),
    ({"lvm": {"volumeGroup": "vg0"}}, "spec.lvm", "write class: lvm, or leave spec.lvm out"),
    ({**LVM, "nbd": {"host": "h"}}, "spec.nbd", "write class: nbd, or leave spec.nbd out"),
    ({**LVM, "pool": "fast"}, "spec.pool", "leave it out"),
    ({**LVM, "format": "qcow2"}, "spec.format", "write format: raw"),
    ({"class": "lvm", "format": "raw", "lvm": {"volumeGroup": ""}}, "spec.lvm.volumeGroup", ""),
    ({"class": "nbd", "format": "raw", "nbd": {}}, "spec.nbd.host", "say which"),
    ({**NBD, "nbd": {"host": "h", "socket": "/s"}}, "spec.nbd.socket", ""),
    ({"source": {}}, "spec.source", "exactly one of image, snapshot, backup"),
    ({"source": {"image": "i", "backup": "/b"}}, "spec.source", ""),
    ({"source": {"image": "i", "mode": "Full"}}, "spec.source.mode", "leave it out"),
    ({"source": {"image": "i", "snapshotVolume": "v"}}, "spec.source.snapshotVolume", ""),
    ({"source": {"image": "i", "backupSequence": 1}}, "spec.source.backupSequence", ""),
    ({**NBD, "source": {"image": "i"}}, "spec.source", ""),
    ({"format": "raw", "source": {"snapshot": "s"}}, "spec.source.mode", "write mode: Full"),
    ({"accessMode": "ReadOnlyMany"}, "spec.accessMode", ""),
    ({"encryption": {"key": "K!"}}, "spec.encryption.key", ""),
    ({"size": "10"}, "spec.size", ""),
    ({"size": "100Ti"}, "spec.size", "1Mi to 64Ti"),
    ({"limits": {"iopsTotal": {"limit": 5}, "iopsRead": {"limit": 5}}},
     "spec.limits.iopsTotal", ""),
    ({"limits": {"bandwidthTotal": {"limit": "5Mi"}, "bandwidthWrite": {"limit": "5Mi"}}},
     "spec.limits.bandwidthTotal", "read and write apart"),
    ({"limits": {"iopsRead": {"limit": 9, "burst": 8}}}, "spec.limits.iopsRead.burst", ""),
    ({"limits": {"iopsRead": {"burst": 8}}}, "spec.limits.iopsRead.burst", "set limit"),
    ({"limits": {"iopsRead": {"limit": 8, "burstSeconds": 4}}},
     "spec.limits.iopsRead.burstSeconds", "set burst"),
    ({"limits": {"bandwidthRead": {"limit": "5"}}}, "spec.limits.bandwidthRead.limit", "write 5Mi"),
    ({"limits": {"iopsSize": "2Gi"}}, "spec.limits.iopsSize", "512 bytes to 1Gi"),
]  # fmt: skip


@pytest.mark.parametrize("spec", GOOD, ids=str)
def test_a_volume_that_makes_sense_is_read_and_written_as_it_is(spec: dict[str, Any]) -> None:
    read = parse(volume(**spec))
    assert parse(encode(read)) == read


@pytest.mark.parametrize(("spec", "field", "hint"), BAD, ids=str)
def test_a_volume_that_makes_none_names_field_and_fix(
    spec: dict[str, Any], field: str, hint: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse(volume(**spec))
    assert caught.value.field == field
    assert hint in caught.value.hint
    assert caught.value.resource == "Volume default/x"


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({}, "spec.volume"),
        ({"volume": "a", "virtualMachine": "b"}, "spec.volume"),
        ({"virtualMachine": "B"}, "spec.virtualMachine"),
        ({"volume": "a", "freeze": "500ms"}, "spec.freeze"),
        ({"volume": "a", "freeze": "61s"}, "spec.freeze"),
        ({"volume": "a", "freeze": "1m"}, "spec.freeze"),
    ],
)
def test_a_snapshot_that_makes_no_sense_names_the_field(spec: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse(document("VolumeSnapshot", spec))
    assert caught.value.field == field


@pytest.mark.parametrize("freeze", ["1s", "60s", "1500ms", ""])
def test_a_freeze_is_bounded(freeze: str) -> None:
    assert parse(document("VolumeSnapshot", {"virtualMachine": "a", "freeze": freeze}))
