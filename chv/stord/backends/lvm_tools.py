"""LVM's commands and what they report, as typed calls; and zeros written over new space.

Names reach argv only after the wire types have checked them: none can begin an option. Reports
are LVM's JSON with sizes in bytes. Errors: Unsupported (lvm2 or the kernel's device mapper is
missing), NotFound (group, pool), ResourceExhausted (space), Unavailable (no answer), Internal.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
from pathlib import Path

import msgspec

from chv.common.errors import (
    ChvError,
    DeadlineExceeded,
    NotFound,
    ResourceExhausted,
    Unavailable,
    Unsupported,
)
from chv.common.process import CommandFailed, run

PACKAGE = "lvm2"
TIMEOUT_S = 25.0
PERCENT = 100
ZERO_CHUNK_BYTES = 64 << 20
_BLKZEROOUT = 0x127F  # linux/fs.h
_REPORT = ("--reportformat", "json", "--units", "b", "--nosuffix")
_FULL = ("nsufficient free space", "nsufficient suitable", "not enough free", "free extents")
_NO_KERNEL = ("device-mapper driver missing", "/dev/mapper/control: open failed", "modprobe")


class LogicalVolume(msgspec.Struct, frozen=True):
    """A row of `lvs`. Percentages are empty where they have no meaning."""

    lv_name: str
    lv_size: str
    lv_tags: str = ""
    pool_lv: str = ""
    data_percent: str = ""
    metadata_percent: str = ""
    zero: str = ""

    @property
    def size_bytes(self) -> int:
        """How large it is."""
        return int(self.lv_size)

    @property
    def data_free_bytes(self) -> int:
        """How much of a pool's data space is free."""
        return _rest(self.size_bytes, self.data_percent)

    @property
    def scarcest_free_bytes(self) -> int:
        """The same, or what it would be were data as full as metadata, where that is less."""
        return min(self.data_free_bytes, _rest(self.size_bytes, self.metadata_percent))

    @property
    def tags(self) -> list[str]:
        """Its tags."""
        return self.lv_tags.split(",") if self.lv_tags else []

    @property
    def zeroes(self) -> bool:
        """Tell whether a thin pool gives out zeros for what was never written."""
        return self.zero == "zero"


def _rest(size_bytes: int, used_percent: str) -> int:
    return int(size_bytes * (PERCENT - float(used_percent or 0)) / PERCENT)


class VolumeGroup(msgspec.Struct, frozen=True):
    """A row of `vgs`."""

    vg_name: str
    vg_size: str
    vg_free: str


class _Rows(msgspec.Struct, frozen=True):
    lv: list[LogicalVolume] = []
    vg: list[VolumeGroup] = []


class _Report(msgspec.Struct, frozen=True):
    report: list[_Rows]


def parse(text: bytes) -> tuple[list[LogicalVolume], list[VolumeGroup]]:
    """Read a JSON report."""
    rows = msgspec.json.decode(text, type=_Report).report
    return [lv for row in rows for lv in row.lv], [vg for row in rows for vg in row.vg]


async def logical_volume(volume_group: str, name: str) -> LogicalVolume | None:
    """Return a logical volume; None: there is none of that name."""
    found = await _select(volume_group, f"lv_name={name}")
    return found[0] if found else None


async def tagged(volume_group: str, tag: str) -> list[LogicalVolume]:
    """Return the logical volumes that carry a tag."""
    return await _select(volume_group, f"lv_tags={{{tag}}}")


async def _select(volume_group: str, condition: str) -> list[LogicalVolume]:
    fields = ",".join(LogicalVolume.__struct_fields__)
    argv = ["lvs", *_REPORT, "-o", fields, "-S", condition, volume_group]
    return parse(await _lvm(argv))[0]


async def volume_group(name: str) -> VolumeGroup:
    """Return a volume group."""
    fields = ",".join(VolumeGroup.__struct_fields__)
    return parse(await _lvm(["vgs", *_REPORT, "-o", fields, name]))[1][0]


async def make(volume_group: str, name: str, size_bytes: int, *, thin_pool: str, tag: str) -> None:
    """Make a logical volume, thin where a pool is named; what it held before is wiped later."""
    argv = ["lvcreate", "--yes", "--wipesignatures", "y", "--addtag", tag, "--name", name]
    if thin_pool:
        argv += ["--virtualsize", f"{size_bytes}b", "--thinpool", thin_pool, volume_group]
    else:
        argv += ["--size", f"{size_bytes}b", volume_group]
    await _lvm(argv)


async def extend(volume_group: str, name: str, size_bytes: int) -> None:
    """Make it larger; LVM refuses where it is that large already."""
    await _lvm(["lvextend", "--size", f"{size_bytes}b", f"{volume_group}/{name}"])


async def activate(volume_group: str, name: str) -> None:
    """Let the kernel show it; fine when it does."""
    await _lvm(["lvchange", "--activate", "y", f"{volume_group}/{name}"])


async def remove(volume_group: str, name: str) -> None:
    """Remove it; fine when there is none."""
    if await logical_volume(volume_group, name) is not None:
        await _lvm(["lvremove", "--yes", f"{volume_group}/{name}"])


async def _lvm(argv: list[str]) -> bytes:
    if shutil.which(argv[0]) is None:
        raise Unsupported(
            f"{argv[0]} is missing", field="backend.class_name", hint=f"apt-get install {PACKAGE}"
        )
    quiet = {"LVM_SUPPRESS_FD_WARNINGS": "1"}
    try:
        return (await run(argv, timeout_s=TIMEOUT_S, environment=quiet)).stdout
    except DeadlineExceeded as error:
        raise Unavailable(f"LVM did not answer {argv[0]} within {TIMEOUT_S:g} s") from error
    except CommandFailed as error:
        raise translate(error) from error


def translate(failed: CommandFailed) -> ChvError:
    """Return our error for what LVM says; its exit codes tell nothing apart."""
    text = failed.stderr.decode(errors="replace")
    if any(sign in text for sign in _NO_KERNEL):
        return Unsupported(
            "the kernel of this node has no device mapper",
            field="backend.class_name",
            hint="modprobe dm_mod dm_thin_pool",
        )
    if any(sign in text for sign in _FULL):
        return ResourceExhausted(f"the volume group is full: {failed.message}")
    if "not found" in text or "Failed to find" in text:
        return NotFound(failed.message, field="backend.lvm")
    return failed


def zero(device: Path, start: int, end: int) -> int:
    """Write zeros from `start`, one chunk at most; return how far it came. Blocks."""
    length = min(ZERO_CHUNK_BYTES, end - start)
    if length > 0:
        fd = os.open(device, os.O_WRONLY | os.O_EXCL | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, _BLKZEROOUT, struct.pack("QQ", start, length))
            os.fsync(fd)
        finally:
            os.close(fd)
    return start + length
