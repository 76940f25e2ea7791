"""The KVM device: whether it is there, and how a VMM without privileges gets at it.

Looks at owner and mode alone. A device that exists proves nothing: what KVM is good for is found
out by `trial`.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

KVM_DEVICE = Path("/dev/kvm")


@dataclass(frozen=True, slots=True)
class KvmAccess:
    """How a VMM without privileges gets at the KVM device."""

    groups: tuple[int, ...] = ()
    private: bool = False  # root's alone: it gets a node of its own
    refusal: str = ""  # there is no such device

    @property
    def own_devices(self) -> tuple[str, ...]:
        """The nodes that a program gets made for it."""
        return (str(KVM_DEVICE),) if self.private else ()


def kvm_access(device: Path = KVM_DEVICE) -> KvmAccess:
    """Look at the device's owner and mode."""
    try:
        status = device.stat()
    except OSError as error:
        return KvmAccess(refusal=f"no {device}: {error.strerror}")
    if not stat.S_ISCHR(status.st_mode):
        return KvmAccess(refusal=f"{device} is not a device")
    if status.st_mode & 0o006 == 0o006:
        return KvmAccess()
    if status.st_gid != 0 and status.st_mode & 0o060 == 0o060:
        return KvmAccess(groups=(status.st_gid,))
    return KvmAccess(private=True)
