"""A real stord with an instance of its own, for what is measured without agent and guest."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import choose_provider, scan, wait_gone
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire import stord as wire
from chv.common.wire.types import CallMeta

IDS = Ids()
MIB = 1 << 20
GIB = 1 << 30


@dataclass
class Stord:
    """A stord of an instance of its own, and a client."""

    root: Path
    layout: Layout
    process: subprocess.Popen[bytes]
    client: BlockingClient
    slots: dict[str, int] = field(default_factory=dict)

    def open(
        self, volume_id: str, format_: wire.VolumeFormat, size_bytes: int, **backend: Any
    ) -> wire.VolumeInfo:
        """Open a volume of class `file`."""
        request = wire.OpenVolume(
            meta=meta(backend.pop("generation", 1)),
            volume_id=volume_id,
            backend=wire.VolumeBackend(
                class_name=wire.VolumeClass.FILE, format=format_, size_bytes=size_bytes, **backend
            ),
        )
        return self.client.call(wire.OPEN_VOLUME, request)

    def attach(self, volume_id: str, vm_id: str, generation: int = 1) -> wire.AttachmentInfo:
        """Attach to a VM; each VM has uids of its own."""
        slot = self.slots.setdefault(vm_id, len(self.slots))
        request = wire.AttachVolumeToVm(
            meta=meta(generation),
            volume_id=volume_id,
            vm_id=vm_id,
            storage_uid=self.layout.storage_uid(slot),
            vm_gid=self.layout.vmm_uid(slot),
        )
        return self.client.call(wire.ATTACH_VOLUME, request)

    def attach_all(self, volume_ids: list[str], vm_id: str) -> list[wire.AttachmentInfo]:
        """Attach to a VM all that it has, as its start does."""
        slot = self.slots.setdefault(vm_id, len(self.slots))
        request = wire.AttachVolumesToVm(
            meta=meta(),
            vm_id=vm_id,
            storage_uid=self.layout.storage_uid(slot),
            vm_gid=self.layout.vmm_uid(slot),
            volumes=[wire.VolumeToAttach(volume_id=each, generation=1) for each in volume_ids],
        )
        outcomes = self.client.call(wire.ATTACH_VOLUMES, request).outcomes
        infos = [each.attachment for each in outcomes if each.attachment is not None]
        if len(infos) != len(volume_ids):
            raise SystemExit(f"not all volumes were attached: {outcomes}")
        return infos

    def detach(self, volume_id: str, vm_id: str, generation: int = 1) -> None:
        """Detach."""
        request = wire.DetachVolumeFromVm(meta=meta(generation), volume_id=volume_id, vm_id=vm_id)
        self.client.call(wire.DETACH_VOLUME, request)


@contextmanager
def stord(storage: str = "") -> Iterator[Stord]:
    """Run a stord; nothing of it is left at the end."""
    root = Path(tempfile.mkdtemp(prefix="chv-bench-", dir="/run"))
    state = Path(tempfile.mkdtemp(prefix="chv-bench-", dir="/var/tmp"))
    for directory in (root, state):
        directory.chmod(0o711)
    layout = Layout(IDS.instance(), root, state)
    config = root / "chv.toml"
    config.write_text(
        f'[node]\ninstance = "{layout.instance}"\nrun_dir = "{root}"\nstate_dir = "{state}"\n'
        f"[storage]\n{storage}\n"
    )
    process = _started(config, root / "stord.log")
    try:
        with BlockingClient(layout.socket("stord")) as client:
            yield Stord(root, layout, process, client)
    finally:
        process.kill()
        process.wait()
        anyio.run(_end_workers, layout)
        for directory in (root, state):
            shutil.rmtree(directory)


def _started(config: Path, log: Path) -> subprocess.Popen[bytes]:
    reader, writer = os.pipe()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "chv.stord", "--config", str(config)],
            env={**os.environ, "CHV_READY_FD": str(writer)},
            pass_fds=[writer],
            stderr=output,
        )
    os.close(writer)
    with os.fdopen(reader, "rb") as ready:
        if ready.read() != b"ready\n":
            raise SystemExit(f"stord did not start: {log.read_text()[-2000:]}")
    return process


async def _end_workers(layout: Layout) -> None:
    provider = choose_provider(layout)
    for worker in scan(layout.worker_prefix):
        await provider.kill(worker.record(), signal.SIGKILL)
        await wait_gone(worker.record())
    await provider.retire()


def meta(generation: int = 1) -> CallMeta:
    """Return what a call carries."""
    return CallMeta(operation_id=IDS.operation(), generation=generation)
