"""The inventory: gathered beside the event loop, kept for a while, answered with its age.

What hangs (a file system that does not answer) costs the caller `GATHER_S` and nobody else
anything: then the last inventory is answered, however old. Fails with Unavailable where there
never was one.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from chv.agent.daemons import Daemons
from chv.agent.probes import Probes
from chv.agent.resources import cgroups, hardware
from chv.agent.resources.commitment import Budget
from chv.agent.resources.places import measured
from chv.agent.resources.room import commitment, fitting
from chv.agent.tables import Tables
from chv.common.clock import Clock, timestamp
from chv.common.config import Config
from chv.common.errors import ChvError, Unavailable
from chv.common.files import sha256_file
from chv.common.layout import Layout
from chv.common.process import Provider, run
from chv.common.rpc import Server
from chv.common.wire import agent_inventory as wire
from chv.common.wire.types import Feature

KEPT_S = 30.0
GATHER_S = 10.0
VERSION_S = 5.0
# Programs that are no VMM, and how each tells its version.
PROGRAMS = {"qemu-storage-daemon": "--version", "qemu-img": "--version", "dnsmasq": "--version"}
OPTIONAL = {
    "qemu-system-x86_64": "--version",
    "nft": "--version",
    "iscsiadm": "--version",
    "lvm": "version",
    "rbd": "--version",
}


@dataclass(frozen=True)
class InventoryParts:
    """What is looked at and through."""

    config: Config
    layout: Layout
    clock: Clock
    provider: Provider
    probes: Probes
    daemons: Daemons
    tables: Callable[[], Tables]
    budget: Budget


class InventoryApi:
    """The handlers of `chv.common.wire.agent_inventory`."""

    def __init__(self, parts: InventoryParts) -> None:
        self._parts = parts
        self._last: wire.InventoryReply | None = None
        self._at = 0.0
        self._lock = anyio.Lock()
        self._programs: dict[tuple[str, int, int], wire.ProgramInventory] = {}

    def register(self, server: Server) -> None:
        """Give every method its handler."""
        server.add(wire.GET_INVENTORY, self.get)
        server.add(wire.FIT_VMS, self.fit)

    async def get(self, request: wire.GetInventory) -> wire.InventoryReply:
        """Return the inventory, looking again where the last look is old."""
        clock, asked = self._parts.clock, self._parts.clock.monotonic()
        async with self._lock:
            young = self._last is not None and clock.monotonic() - self._at < KEPT_S
            # Who waited for the lock has a look that began after the question.
            if not young or (request.fresh and self._at < asked):
                with anyio.move_on_after(GATHER_S):
                    began = clock.monotonic()
                    self._last, self._at = await self._gather(), began
        if self._last is None:
            raise Unavailable("the machine does not answer: a file system of the node hangs")
        return msgspec.structs.replace(
            self._last,
            age_s=clock.monotonic() - self._at,
            commitment=commitment(self._parts.tables(), self._parts.budget),
        )

    async def fit(self, request: wire.FitVms) -> wire.FitReply:
        """Say how many fit into what is left now."""
        parts = self._parts
        pools = frozenset(disk.pool for group in request.groups for disk in group.disks)
        places = await anyio.to_thread.run_sync(
            measured, parts.config, parts.layout, pools, abandon_on_cancel=True
        )
        return fitting(parts.tables(), parts.budget, places, request, parts.config.limits.vms_max)

    async def _gather(self) -> wire.InventoryReply:
        parts = self._parts
        promised = commitment(parts.tables(), parts.budget)  # here: tables change on the loop
        seen = await anyio.to_thread.run_sync(self._look, promised, abandon_on_cancel=True)
        programs = [
            await self._program(name, option) for name, option in (PROGRAMS | OPTIONAL).items()
        ]
        vmms = parts.probes.results()
        return msgspec.structs.replace(
            seen,
            programs=[each for each in programs if each.path or each.name in PROGRAMS],
            vmms=vmms,
            kvm="; ".join(f"{each.name}: {each.reason}" for each in vmms if each.reason),
            features=self._features(),
        )

    def _look(self, promised: wire.Commitment) -> wire.InventoryReply:
        """Read all that is a file. Blocks."""
        parts, storage = self._parts, self._parts.config.storage
        mounted = hardware.mounts()
        places = {
            "state": parts.layout.state,
            "run": parts.layout.run,
            "images": Path(parts.config.images.cache_dir),
            **{f"pool {name}": Path(path) for name, path in storage.pools.items()},
            **{f"backups {path}": Path(path) for path in storage.backup_paths},
        }
        system = platform.uname()
        return wire.InventoryReply(
            gathered_at=timestamp(parts.clock.now()),
            age_s=0.0,
            kernel=system.release,
            architecture=system.machine,
            cpu=hardware.cpu(),
            numa=hardware.numa(),
            memory=hardware.memory_inventory(),
            disks=hardware.disks(mounted),
            places=[hardware.place(purpose, path, mounted) for purpose, path in places.items()],
            cgroup=cgroups.inventory(parts.provider),
            commitment=promised,
        )

    def _features(self) -> list[Feature]:
        found: list[Feature] = []
        for name in ("stord", "nwd"):
            health = self._parts.daemons.health(name)
            found += health.features if health is not None else []
        return found

    async def _program(self, name: str, option: str) -> wire.ProgramInventory:
        """Ask a program for its version, once for each file."""
        config = self._parts.config
        configured = {
            "qemu-storage-daemon": config.storage.storage_daemon_binary,
            "qemu-system-x86_64": config.vmm.qemu_binary,
        }
        path = configured.get(name) or shutil.which(name)
        if not path or not Path(path).exists():
            return wire.ProgramInventory(name=name)
        status = Path(path).stat()
        key = (path, status.st_ino, status.st_mtime_ns)
        if key not in self._programs:
            digest = await anyio.to_thread.run_sync(sha256_file, Path(path).resolve())
            version = await _version(path, option)
            self._programs[key] = wire.ProgramInventory(
                name=name, path=path, version=version, sha256=digest
            )
        return self._programs[key]


async def _version(path: str, option: str) -> str:
    """Return the first line that it says; empty where it says none."""
    try:
        done = await run([path, option], timeout_s=VERSION_S, check=False)
    except ChvError:
        return ""
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    return lines[0].strip()[:200] if lines else ""
