"""The single authority on where things are and what they are called.

Pure: composes paths and names, makes nothing. Every name that other instances could see carries
the instance id. Unix socket paths must stay under 108 bytes (sun_path, unix(7)); `check` says
so before anything is made.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from chv.common.errors import InvalidArgument
from chv.common.ids import INSTANCE_PATTERN, short_uid

SOCKET_PATH_BYTES_MAX = 107
# systemd leaves 1879048192..2147483647 unassigned (UIDS-GIDS document, systemd v252).
UID_BASE = 1_900_000_000
UID_BLOCK_SIZE = 100_000
UID_BLOCKS = 2_400
NETWORKS_KEPT_MAX = 4096


@dataclass(frozen=True)
class Layout:
    """Paths and names of one node instance."""

    instance: str
    run_root: Path = Path("/run/chv")
    state_root: Path = Path("/var/lib/chv")

    def __post_init__(self) -> None:
        if not INSTANCE_PATTERN.match(self.instance):
            raise InvalidArgument(
                f"{self.instance!r} is not an instance id",
                field="node.instance",
                hint="six characters of a-z and 0-9",
            )

    # --- /run: gone after a reboot
    @cached_property
    def run(self) -> Path:
        """0711 root."""
        return self.run_root / self.instance

    @property
    def api(self) -> Path:
        """0750 root:chv, the daemons' sockets."""
        return self.run / "api"

    def socket(self, daemon: str) -> Path:
        """Return the API socket of `agent`, `stord`, `nwd` or `console`."""
        return self.api / f"{daemon}.sock"

    def lock(self, daemon: str) -> Path:
        """Return the lock file that refuses a second daemon of this kind."""
        return self.api / f"{daemon}.lock"

    @property
    def vms(self) -> Path:
        """0711 root, one directory per VM."""
        return self.run / "vm"

    def vm(self, vm_uid: str) -> Path:
        """0710 root:<vm gid>, holds the VM's vhost-user sockets."""
        return self.vms / short_uid(vm_uid)

    def vmm(self, vm_uid: str) -> Path:
        """0700 <vm uid>: serial, vsock and monitor sockets that the VMM makes."""
        return self.vm(vm_uid) / "vmm"

    def qsd(self, vm_uid: str) -> Path:
        """0700 <storage uid>: the storage daemon's monitor and unprimed exports."""
        return self.vm(vm_uid) / "qsd"

    def external_name(self, volume_uid: str) -> str:
        """Return the name of the logical volume (or RBD image) of a volume."""
        return f"chv-{self.instance}-{volume_uid}"

    def export(self, vm_uid: str, volume_uid: str) -> Path:
        """Return the VMM-facing vhost-user-blk socket; the same name for the attachment's life."""
        return self.vm(vm_uid) / f"{short_uid(volume_uid)}.sock"

    def network_run(self, network_uid: str) -> Path:
        """Return the directory of a network's dnsmasq files."""
        return _network_run(self.run, network_uid)

    # --- /var/lib: outlives a reboot
    @property
    def state(self) -> Path:
        """0711 root."""
        return self.state_root / self.instance

    def database(self, daemon: str) -> Path:
        """Return the SQLite file of a daemon."""
        return self.state / f"{daemon}.db"

    @property
    def logs(self) -> Path:
        """JSON-line logs of the daemons and outputs of the workers."""
        return self.state / "logs"

    @property
    def images(self) -> Path:
        """Content-addressed artifacts, `sha256/<64 hex>`."""
        return self.state / "images"

    def image(self, sha256: str) -> Path:
        """Return the file of one artifact."""
        return self.images / "sha256" / sha256

    def volume(self, volume_uid: str) -> Path:
        """Return the directory of a volume of class `file`."""
        return self.state / "volumes" / volume_uid

    @property
    def keys(self) -> Path:
        """0700 root: encryption keys, `<namespace>/<name>`, each 0600."""
        return self.state / "keys"

    def device(self, volume_uid: str) -> Path:
        """Return our own node of the block device of a volume; the host's own is never touched."""
        return Path("/dev") / f"chv-{self.instance}" / volume_uid

    def cluster_access(self, volume_uid: str, uid: int) -> Path:
        """0700 <uid>: how the storage daemon reaches a volume's Ceph cluster, and its key."""
        return self.volume(volume_uid) / f"ceph-{uid}"

    def vm_state(self, vm_uid: str) -> Path:
        """0711 root: seed disk (0600, the VM's uid), host keys, serial recording."""
        return self.state / "vms" / vm_uid

    def vm_save(self, vm_uid: str) -> Path:
        """0711 root: below it the VM's uid has a directory while it is saved."""
        return self.vm_state(vm_uid) / "save"

    def vm_restore(self, vm_uid: str) -> Path:
        """0710 root:<vm gid>: the snapshot that the VM starts from, for that one start."""
        return self.vm_state(vm_uid) / "restore"

    @property
    def vm_snapshots(self) -> Path:
        """0700 root, one directory per VirtualMachineSnapshot."""
        return self.state / "snapshots"

    def vm_snapshot(self, snapshot_uid: str) -> Path:
        """0700 root: memory and devices of a saved VM, each file 0600 root."""
        return self.vm_snapshots / snapshot_uid

    # --- names in the kernel
    def netns(self, network_uid: str) -> str:
        """Return the name of a network's namespace, `chv-<instance>-<short uid>`."""
        return f"chv-{self.instance}-{short_uid(network_uid)}"

    @property
    def netns_prefix(self) -> str:
        """Every namespace of this instance starts with it, and no other does."""
        return f"chv-{self.instance}-"

    @property
    def host_table(self) -> str:
        """Return the name of our one nft table in the host's own ruleset."""
        return f"chv_{self.instance}"

    def worker_id(self, kind: str, uid: str, nonce: str) -> str:
        """Return the id a worker carries in its argv, `chv:<instance>:<kind>:<short>:<nonce>`."""
        return f"chv:{self.instance}:{kind}:{short_uid(uid)}:{nonce}"

    @property
    def worker_prefix(self) -> str:
        """Every worker id of this instance starts with it."""
        return f"chv:{self.instance}:"

    @property
    def cgroup(self) -> str:
        """Return the name of the cgroup below which this instance's workers live."""
        return f"chv-{self.instance}"

    def uplink(self, network_uid: str) -> str:
        """Return the host's end of a network's uplink, `c<instance><8 of the uid>`: 15 bytes."""
        return f"c{self.instance}{short_uid(network_uid)[:8]}"

    def tap(self, nic_uid: str) -> str:
        """Return the name of a NIC's tap; it is unique within its network's namespace."""
        return f"t{short_uid(nic_uid)}"

    def ifb(self, nic_uid: str) -> str:
        """Return the name of the link that shapes what a NIC's guest sends, beside its tap."""
        return self.ifb_of(self.tap(nic_uid))

    def ifb_of(self, tap: str) -> str:
        """Return the same from the name of the tap."""
        return f"i{tap[1:]}"

    # --- uids of the VMs
    @property
    def uid_block(self) -> int:
        """Return the first uid of this instance's block of `UID_BLOCK_SIZE`."""
        block = zlib.crc32(self.instance.encode()) % UID_BLOCKS
        return UID_BASE + block * UID_BLOCK_SIZE

    def vmm_uid(self, slot: int) -> int:
        """Return the uid (and gid) of the VMM in a VM's slot, slots from 0."""
        return self.uid_block + 2 * slot

    def storage_uid(self, slot: int) -> int:
        """Return the uid (and gid) of the storage daemon in a VM's slot."""
        return self.uid_block + 2 * slot + 1

    @property
    def dns_uid(self) -> int:
        """Return the uid (and gid) of this instance's dnsmasq workers, beyond every VM slot."""
        return self.uid_block + UID_BLOCK_SIZE - 1

    @property
    def tools_uid(self) -> int:
        """Return the uid (and gid) under which stord runs qemu-img on detached volumes."""
        return self.uid_block + UID_BLOCK_SIZE - 2


@lru_cache(NETWORKS_KEPT_MAX)  # asked a dozen times in each attach of a NIC
def _network_run(run: Path, network_uid: str) -> Path:
    return run / "net" / short_uid(network_uid)


def check_socket_path(path: Path) -> Path:
    """Return `path`; raise InvalidArgument where the kernel could not bind it."""
    if len(str(path).encode()) > SOCKET_PATH_BYTES_MAX:
        raise InvalidArgument(
            f"socket path {str(path)!r} is longer than {SOCKET_PATH_BYTES_MAX} bytes",
            field="node.run_dir",
            hint="choose a shorter run_dir",
        )
    return path
