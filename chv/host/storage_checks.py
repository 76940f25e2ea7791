"""`chv doctor`: which classes of volumes this machine can serve, the package of each, how many VMs.

A class that is not usable is worth knowing, not an error: a node needs none but `file`. Looks at
programs, QEMU's modules and the kernel; changes and runs nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

# Where Debian puts QEMU's modules, below a directory that is named for the architecture.
MODULE_DIRECTORIES = ("/usr/lib/*/qemu", "/usr/lib/qemu", "/usr/local/lib/*/qemu")
MISC_DEVICES = Path("/proc/misc")
DEVICE_MAPPER = "device-mapper"
# Linux's limit of asynchronous requests, of the whole host, and what a storage daemon takes of it.
LIMITS = Path("/proc/sys/fs")
REQUESTS_PER_VM = 1024
VMS_MIN = 200
REQUESTS_MAX = 1 << 20
REQUESTS_REMEDY = (
    f"echo fs.aio-max-nr={REQUESTS_MAX} > /etc/sysctl.d/60-chv.conf "
    "&& sysctl -p /etc/sysctl.d/60-chv.conf"
)


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What a class takes: programs, a module of QEMU, the kernel's device mapper."""

    class_name: str
    packages: str
    programs: tuple[str, ...] = ()
    module: str = ""
    device_mapper: bool = False


CLASSES = (
    Need(class_name="block", packages="qemu-utils", programs=("qemu-img",)),
    Need(
        class_name="lvm",
        packages="lvm2 thin-provisioning-tools",
        programs=("lvcreate", "lvextend", "lvremove", "lvs", "vgs"),
        device_mapper=True,
    ),
    Need(class_name="nbd", packages="qemu-utils", programs=("qemu-img",)),
    Need(class_name="iscsi", packages="qemu-block-extra", module="block-iscsi.so"),
    Need(
        class_name="rbd",
        packages="qemu-block-extra ceph-common",
        programs=("rbd", "ceph-conf", "ceph-authtool"),
        module="block-rbd.so",
    ),
)


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """The host's asynchronous requests: how many there may be, and are."""

    limit: int
    taken: int

    @property
    def vms(self) -> int:
        """How many VMs there may be, those that run included."""
        return self.limit // REQUESTS_PER_VM


def requests() -> Requests:
    """Return what the kernel says."""
    limit, taken = (int((LIMITS / name).read_text()) for name in ("aio-max-nr", "aio-nr"))
    return Requests(limit=limit, taken=taken)


def missing(need: Need) -> list[str]:
    """Return what of a class is not there, in words."""
    absent = [program for program in need.programs if shutil.which(program) is None]
    if need.module and not has_module(need.module):
        absent.append(f"QEMU's {need.module}")
    if need.device_mapper and not has_device_mapper():
        absent.append("the kernel's device mapper")
    return absent


def has_module(name: str) -> bool:
    """Tell whether QEMU has a module."""
    patterns = (f"{directory.lstrip('/')}/{name}" for directory in MODULE_DIRECTORIES)
    return any(next(Path("/").glob(pattern), None) for pattern in patterns)


def has_device_mapper() -> bool:
    """Tell whether the kernel has it now."""
    lines = MISC_DEVICES.read_text().splitlines()
    return any(line.split()[1:] == [DEVICE_MAPPER] for line in lines)


def remedy(need: Need, absent: list[str]) -> str:
    """Return what to type."""
    if need.device_mapper and len(absent) == 1 and not has_device_mapper():
        return "modprobe dm_mod dm_thin_pool"
    return f"apt-get install {need.packages}"
