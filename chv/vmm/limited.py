"""What a driver refuses as long as its VMM, or its version, cannot do it.

A driver takes `Limited` as its base and overrides what it can. Every method here raises
Unsupported naming the VMM and the verb; nothing is accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import anyio.lowlevel

from chv.common.errors import Unsupported
from chv.vmm.driver import Counters, Feature, Sizes, VmmConfig


class Limited:
    """The verbs of `VmmDriver` that not every VMM has."""

    name = ""

    def features(self) -> frozenset[Feature]:
        """Nothing beyond what every driver does."""
        return frozenset()

    def kept_files(self, runtime_dir: Path) -> tuple[Path, ...]:
        """Nothing is kept outside of the runtime directory."""
        del runtime_dir
        return ()

    def unfiltered(self, pid: int) -> tuple[str, ...] | None:
        """It has no filters to speak of."""
        del pid
        return None

    async def create(
        self, runtime_dir: Path, config: VmmConfig, nic_fds: Mapping[str, Sequence[int]]
    ) -> None:
        """The VM is made by the command line: nothing is left to do."""
        del runtime_dir, config, nic_fds
        await anyio.lowlevel.checkpoint()

    async def sizes(self, runtime_dir: Path) -> Sizes:
        """Refuse."""
        self._refuse("tell sizes", runtime_dir)

    async def set_cpus(self, runtime_dir: Path, cpus: int) -> None:
        """Refuse."""
        self._refuse("change the number of CPUs", runtime_dir, cpus)

    async def set_memory(self, runtime_dir: Path, memory_bytes: int) -> None:
        """Refuse."""
        self._refuse("change the memory", runtime_dir, memory_bytes)

    async def snapshot(self, runtime_dir: Path, directory: Path) -> None:
        """Refuse."""
        self._refuse("save memory", runtime_dir, directory)

    async def receive(
        self,
        runtime_dir: Path,
        config: VmmConfig,
        nic_fds: Mapping[str, Sequence[int]],
        socket: Path,
    ) -> None:
        """Refuse."""
        self._refuse("receive a VM", runtime_dir, config, nic_fds, socket)

    async def send(self, runtime_dir: Path, socket: Path) -> None:
        """Refuse."""
        self._refuse("send a VM", runtime_dir, socket)

    async def counters(self, runtime_dir: Path) -> Counters:
        """Refuse."""
        self._refuse("count", runtime_dir)

    async def core_dump(self, runtime_dir: Path, path: Path) -> None:
        """Refuse."""
        self._refuse("dump guest memory", runtime_dir, path)

    async def nmi(self, runtime_dir: Path) -> None:
        """Refuse."""
        self._refuse("inject an NMI", runtime_dir)

    def _refuse(self, verb: str, *_: object) -> NoReturn:
        raise Unsupported(f"{self.name} cannot {verb}", field="spec.vmm")
