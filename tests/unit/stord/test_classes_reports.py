"""What LVM, Ceph and QEMU print, recorded from the real ones, and what becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from chv.common.config import StorageConfig
from chv.common.errors import (
    ChvError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
    Unsupported,
)
from chv.common.layout import Layout
from chv.common.process import CommandFailed
from chv.common.process.command import Completed
from chv.common.wire.stord import RbdPlace, VolumeBackend, VolumeClass, VolumeFormat
from chv.stord import enlarge
from chv.stord.backends import block, ceph, elsewhere, iscsi, lvm, lvm_tools, nbd, rbd, remote
from chv.stord.backends.base import Inspection

LVS = b"""  {
      "report": [
          {
              "lv": [
                  {"lv_name":"pool", "lv_size":"134217728", "lv_tags":"", "pool_lv":"",
                   "data_percent":"6.25", "metadata_percent":"10.94", "zero":"zero"},
                  {"lv_name":"chv-abc123-x", "lv_size":"8388608", "lv_tags":"a,chv_abc123",
                   "pool_lv":"pool", "data_percent":"0.00", "metadata_percent":"", "zero":""}
              ]
          }
      ]
  }
"""


def lvm_said(text: str) -> ChvError:
    return lvm_tools.translate(CommandFailed("lvs", Completed(5, b"", text.encode())))


# --- LVM
def test_a_report_of_lvm_is_read_with_its_percentages_and_tags() -> None:
    (pool, thin), groups = lvm_tools.parse(LVS)

    assert pool.zeroes
    assert pool.data_free_bytes == 125829120
    assert pool.scarcest_free_bytes < pool.data_free_bytes  # its metadata is fuller
    assert (thin.size_bytes, thin.tags, thin.zeroes) == (8 << 20, ["a", "chv_abc123"], False)
    assert groups == []


def test_an_empty_report_has_no_rows() -> None:
    assert lvm_tools.parse(b'{"report": [{"lv": []}]}') == ([], [])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('  Volume group "vg" has insufficient free space (5 extents): 9 required.\n',
         ResourceExhausted),
        ('  Volume group "vg" not found\n  Cannot process volume group vg\n', NotFound),
        ('  Failed to find logical volume "vg/a"\n', NotFound),
        ("  /dev/mapper/control: open failed: Operation not permitted\n"
         "  Failure to communicate with kernel device-mapper driver.\n", Unsupported),
        ("  Something new\n", CommandFailed),
    ],
)  # fmt: skip
def test_what_lvm_says_becomes_a_typed_error(text: str, error: type[ChvError]) -> None:
    assert isinstance(lvm_said(text), error)


# --- QEMU
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("qemu-img: Could not open 'json:{}': Unknown driver 'rbd'", Unsupported),
        ("qemu-img: Could not open 'json:{}': Failed to connect to '127.0.0.1:1': "
         "Connection refused", Unavailable),
        ("qemu-img: Could not open 'json:{}': Requested export not available\n"
         "server reported: export 'vol' not present", NotFound),
        ("qemu-img: Could not open 'json:{}': iSCSI: Failed to connect to LUN : SENSE KEY:"
         "ILLEGAL_REQUEST(5) ASCQ:LOGICAL_UNIT_NOT_SUPPORTED(0x2500)", NotFound),
        ("qemu-img: Could not open 'json:{}': Failed to connect to '/n.sock': Permission denied",
         PermissionDenied),
        ("", Unavailable),
    ],
)  # fmt: skip
def test_what_qemu_says_of_a_server_becomes_a_typed_error(text: str, error: type[ChvError]) -> None:
    said = remote.translate("rbd", "rbd server rbd://vms", text, 7)

    assert isinstance(said, error)
    assert "json:" not in said.message


def test_a_missing_driver_is_told_with_its_package() -> None:
    assert "qemu-block-extra" in remote.missing_driver("iscsi").hint


# --- Ceph
@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("127.0.0.1:0/3402175474", "127.0.0.1"),
        ("v1:10.0.0.2:0/17", "10.0.0.2"),
        ("[fd00::7]:0/17", "fd00::7"),
        ("v1:[fd00::7]:0/17", "fd00::7"),
    ],
)
def test_the_host_of_a_watcher_is_found(address: str, host: str) -> None:
    assert ceph._host(address) == host  # the text is the cluster's


def test_an_address_of_this_node_is_ours_and_another_is_not() -> None:
    assert ceph.is_ours("127.0.0.1")
    assert not ceph.is_ours("192.0.2.1")  # RFC 5737: nobody has it


@pytest.mark.parametrize(
    "conf", ["/etc/passwd", "/etc/ceph/../passwd", "/etc/ceph/a b", "/etc/ceph/x:id=y", "/etc/ceph"]
)
def test_a_configuration_outside_of_etc_ceph_is_refused(conf: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        ceph.configuration(RbdPlace(pool="vms", conf=conf))

    assert refused.value.field == "backend.rbd.conf"


# --- common
@pytest.mark.parametrize("module", [block, lvm, nbd, iscsi, rbd])
async def test_a_spec_without_its_place_is_invalid(module: object, tmp_path: Path) -> None:
    layout = Layout("abc123", tmp_path / "run", tmp_path / "state")
    backend: elsewhere.Elsewhere = module.make(layout, StorageConfig())  # type: ignore[attr-defined]
    spec = VolumeBackend(class_name=backend.class_name, format=VolumeFormat.RAW, size_bytes=512)

    with pytest.raises(InvalidArgument) as refused:
        await backend.check(spec)

    assert refused.value.field == f"backend.{backend.class_name.value}"


def inspection(state: str, size_bytes: int = 0) -> Inspection:
    return Inspection(location="there", state=state, size_bytes=size_bytes, problem="why")


@pytest.mark.parametrize(
    ("found", "error"),
    [
        (inspection("missing"), NotFound),
        (inspection("broken"), Unavailable),
        (inspection("open", 511), FailedPrecondition),
    ],
)
def test_what_is_away_or_too_small_is_refused(found: Inspection, error: type[ChvError]) -> None:
    spec = VolumeBackend(class_name=VolumeClass.NBD, format=VolumeFormat.RAW, size_bytes=512)

    with pytest.raises(error):
        elsewhere.refuse_smaller(found, spec)


class Fixed:
    """A device that has so many bytes."""

    def __init__(self, found: Inspection) -> None:
        self._found = found

    async def inspect(self, _volume_id: str, _spec: VolumeBackend) -> Inspection:
        return self._found


@pytest.mark.parametrize("name", [VolumeClass.BLOCK, VolumeClass.NBD, VolumeClass.ISCSI])
async def test_a_size_beyond_the_device_is_refused_with_what_it_has(name: VolumeClass) -> None:
    found = Inspection(location="there", state="open", size_bytes=1024, device_bytes=1024)
    device: Any = Fixed(found)
    fits = VolumeBackend(class_name=name, format=VolumeFormat.RAW, size_bytes=1024)
    await enlarge.refuse_beyond_device(device, "v", fits)

    with pytest.raises(InvalidArgument, match=r"1536 bytes .* 1024 of there") as refused:
        larger = msgspec.structs.replace(fits, size_bytes=1536)
        await enlarge.refuse_beyond_device(device, "v", larger)

    assert refused.value.field == "backend.size_bytes"


async def test_a_size_is_not_promised_while_the_device_is_away() -> None:
    device: Any = Fixed(inspection("broken"))
    spec = VolumeBackend(class_name=VolumeClass.NBD, format=VolumeFormat.RAW, size_bytes=512)

    with pytest.raises(Unavailable):
        await enlarge.refuse_beyond_device(device, "v", spec)
