"""What a storage daemon, and qemu-img, may touch: rules for Landlock, and whether it has a network.

Both run under uids of their own, so file modes keep volumes apart; these rules keep everything
else away from a process that a guest or an image has taken over: the system's files beside
libraries, other state of the node, the network. Pure but for asking which paths exist. Where the
kernel has no Landlock nothing is enforced and `feature` says so.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from chv.common.config import StorageConfig
from chv.common.errors import FailedPrecondition
from chv.common.layout import Layout
from chv.common.process import Access, PathAccess, landlock_abi
from chv.common.wire.stord import CloneMode, VolumeBackend, VolumeClass
from chv.common.wire.types import Feature
from chv.stord.records import Backend, Volume

LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64")
LOADER_CACHE = "/etc/ld.so.cache"
HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
CPUS = "/sys/devices/system/cpu"
# Where names of servers are looked up, and what says who they are.
NETWORK_FILES = (
    *("/etc/resolv.conf", "/etc/hosts", "/etc/host.conf", "/etc/nsswitch.conf", "/etc/gai.conf"),
    *("/etc/services", "/etc/ceph", "/etc/ssl", "/usr/share/ca-certificates"),
)


def storage_daemon_rules(
    layout: Layout, storage: StorageConfig, vm_id: str, binary: str, *, network: bool
) -> tuple[PathAccess, ...]:
    """Return what the storage daemon of a VM may touch, now and after any later attach.

    Volumes and pools as a whole: which of their files it can open is a matter of owners, which
    change at each attach. Devices likewise, where the node allows any.
    """
    volumes = layout.volume(vm_id).parent
    rules = [
        *_program(binary),
        PathAccess(str(layout.qsd(vm_id)), Access.OWN),
        *_optional(Access.WRITE, [str(volumes), *storage.pools.values(), *storage.backup_paths]),
        *_optional(Access.READ, [str(layout.images), *storage.allowed_paths]),
    ]
    if storage.allowed_devices or storage.volume_groups:
        rules += [PathAccess("/dev", Access.DEVICE), PathAccess("/sys", Access.READ)]
    if network:
        rules += _optional(Access.READ, NETWORK_FILES)
    return tuple(rules)


class Touched(msgspec.Struct, frozen=True, kw_only=True):
    """What one piece of work on detached volumes needs beside a program's own files.

    `directory`: one that it may make files in. `remote`: it speaks to servers.
    """

    owns: tuple[Path, ...] = ()
    reads: tuple[Path, ...] = ()
    directory: Path | None = None
    remote: bool = False


def tool_rules(layout: Layout, binary: str, touched: Touched) -> tuple[PathAccess, ...]:
    """Return what a tool may touch for the length of one piece of work, and nothing else."""
    rules = [
        *_program(binary),
        *(PathAccess(str(path), Access.DEVICE) for path in touched.owns),
        *(PathAccess(str(path), Access.READ) for path in touched.reads),
    ]
    if touched.directory is not None:
        rules.append(PathAccess(str(touched.directory), Access.OWN))
    if any(str(path).startswith("/dev/") for path in (*touched.owns, *touched.reads)):
        rules.append(PathAccess("/sys", Access.READ, optional=True))
    if touched.remote:  # what a cluster is told is beside the volume
        rules += _optional(Access.READ, [*NETWORK_FILES, str(layout.volume("x").parent)])
    return tuple(rules)


def is_remote(text: str) -> bool:
    """Tell whether block nodes, as JSON, speak to a server over a network."""
    return any(sign in text for sign in ('"inet"', '"iscsi"', '"rbd"'))


def needs_network(volumes: Mapping[str, Volume], volume_id: str) -> bool:
    """Tell whether serving the volume takes a network: its own class, or one that it rests on."""
    while (row := volumes.get(volume_id)) is not None:
        if _is_remote(row.backend):
            return True
        source = row.backend.snapshot
        if source is None or source.mode is not CloneMode.LINKED:
            return False
        volume_id = source.volume_id
    return False


def require_network(backend: Backend, what: str) -> None:
    """Refuse what the VM's storage daemon cannot reach; a network is given at its start alone."""
    if not backend.network:
        raise FailedPrecondition(
            f"{what} needs a network, and the VM's storage daemon was started without one",
            resource=backend.vm_id,
            hint="stop the VM, then do it, then start the VM",
        )


def _is_remote(spec: VolumeBackend) -> bool:
    """Tell whether a network is needed; an NBD server on a Unix socket is reached without."""
    if spec.nbd is not None:
        return not spec.nbd.socket
    return spec.class_name in (VolumeClass.ISCSI, VolumeClass.RBD)


def feature() -> Feature:
    """Tell what the kernel enforces."""
    version = landlock_abi()
    if not version:
        return Feature(
            name="landlock",
            present=False,
            detail="the kernel has none: storage daemons are confined by their uids alone",
        )
    return Feature(name="landlock", present=True, detail=f"version {version}")


def _program(binary: str) -> list[PathAccess]:
    """Return what every program needs to run: itself, its libraries, harmless devices."""
    path = Path(shutil.which(binary) or binary).resolve()
    found = [
        PathAccess(str(path), Access.EXECUTE),
        *_optional(Access.EXECUTE, LIBRARIES),
        *_optional(Access.READ, (LOADER_CACHE, CPUS)),
        *_optional(Access.DEVICE, HARMLESS_DEVICES),
    ]
    own_libraries = path.parent.parent / "lib"
    if own_libraries.parent != Path("/"):  # a storage daemon that was installed elsewhere
        found += _optional(Access.EXECUTE, [str(own_libraries)])
    return found


def _optional(access: Access, paths: Sequence[str]) -> list[PathAccess]:
    return [PathAccess(path, access, optional=True) for path in paths]
