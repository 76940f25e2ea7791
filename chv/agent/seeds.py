"""Seed disks, host keys and the operator's key: the engine's `SeedPort`.

The host key is made once per VM and kept 0600 until the VM is deleted, so the pinned public half
stays true through every restart. The operator's key is the node's own: its public half goes onto
every seed, its private half (0600, root) is what `chv ssh` uses.
"""

from __future__ import annotations

from pathlib import Path

import anyio

from chv.agent.ports import SeedInfo, SeedRequest, VmHandle
from chv.common.files import atomic_create, atomic_write, ensure_dir
from chv.common.layout import Layout
from chv.common.secret import Secret
from chv.guest.host_keys import HostKey, make_host_key
from chv.guest.seed_disk import SeedNic, SeedSpec, build_seed

HOST_KEY = "ssh_host_ed25519_key"
SEED = "seed.iso"
OPERATOR_KEY = "operator_ed25519"


class Seeds:
    """Implements `SeedPort` on files in the VM's state directory."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    @property
    def operator_identity(self) -> Path:
        """The private key file for `chv ssh`."""
        return self._layout.state / "ssh" / OPERATOR_KEY

    async def ensure(self, vm: VmHandle, request: SeedRequest) -> SeedInfo:
        """Write the seed disk, owned by the VM's uid."""
        return await anyio.to_thread.run_sync(self._ensure, vm, request)

    def _ensure(self, vm: VmHandle, request: SeedRequest) -> SeedInfo:
        directory = self._layout.vm_state(vm.uid)
        host_key = _key_pair(directory / HOST_KEY)
        operator = self.operator_key()
        spec = SeedSpec(
            hostname=request.hostname,
            instance_id=f"{vm.uid}-{request.instance}" if request.instance else vm.uid,
            host_key=host_key,
            authorized_keys=[f"{operator.public} chv-operator", *request.ssh_authorized_keys],
            user_data=request.user_data,
            nics=[SeedNic(mac=nic.mac, address6=nic.address6) for nic in request.nics],
        )
        uid = self._layout.vmm_uid(vm.slot)
        path = directory / SEED
        atomic_write(path, build_seed(spec), mode=0o600, uid=uid, gid=uid)
        return SeedInfo(path=str(path), host_key_public=host_key.public)

    async def remove(self, vm: VmHandle) -> None:
        """Remove seed and keys."""
        await anyio.to_thread.run_sync(self._remove, vm)

    def _remove(self, vm: VmHandle) -> None:
        directory = self._layout.vm_state(vm.uid)
        for name in (SEED, HOST_KEY, f"{HOST_KEY}.pub"):
            (directory / name).unlink(missing_ok=True)

    def operator_key(self) -> HostKey:
        """Return the node's key pair for `chv ssh`, made at first use."""
        ensure_dir(self.operator_identity.parent, mode=0o700)
        return _key_pair(self.operator_identity)


def _key_pair(path: Path) -> HostKey:
    """Return the pair kept at `path` and `path`.pub; the first call makes it.

    The private half is written last and alone decides: a crash in between leaves a public file
    that the next call replaces.
    """
    public = path.with_name(f"{path.name}.pub")
    if not path.exists():
        made = make_host_key()
        atomic_write(public, f"{made.public}\n".encode(), mode=0o644)
        atomic_create(path, made.private.reveal(), mode=0o600)
    return HostKey(private=Secret(path.read_bytes()), public=public.read_text().strip())
