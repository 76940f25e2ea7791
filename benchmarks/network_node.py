"""A nwd of its own for benchmarks: in a pretend host of namespaces, with a run directory in memory.

Nothing touches the machine's own namespace. The run directory is a tmpfs, as `/run` is on hosts;
the state directory is on a disk, for that is where records are made durable.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio

from chv.common.rpc import Client
from chv.common.wire import nwd as wire
from chv.common.wire import nwd_policy as policy
from tests.integration.nwd_helpers import IDS, Node, meta

SUBNET, SUBNET6 = "10.64.0.0/16", "fd00:7::/64"


class BenchNode(Node):
    """The node of the tests without what only tests want: failpoints and verbose logs."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.line: Client | None = None
        self.config.write_text(self.config.read_text().replace("debug", "info"))

    def _start(self, failpoints: str) -> None:
        assert not failpoints
        reader, writer = os.pipe()
        command = [sys.executable, "-m", "chv.nwd", "--config", str(self.config)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self.sandbox.host}", *command],
                env={**os.environ, "CHV_READY_FD": str(writer)},
                pass_fds=[writer],
                stderr=log,
            )
        os.close(writer)
        with os.fdopen(reader, "rb") as ready:
            if ready.read() != b"ready\n":
                raise RuntimeError(self.log.read_text()[-2000:])

    async def call(self, method: Any, params: Any) -> Any:
        """Call on the connection that is kept, if there is one."""
        if self.line is None:
            return await super().call(method, params)
        return await self.line.call(method, params)

    @asynccontextmanager
    async def kept_line(self) -> AsyncIterator[None]:
        """Make the calls of the block on one connection, as the agent does."""
        async with self.client() as self.line:
            try:
                yield
            finally:
                self.line = None

    @property
    def pid(self) -> int:
        """Return the process of nwd."""
        assert self.process is not None
        return self.process.pid

    def cpu_s(self) -> float:
        """Return the processor time that nwd has taken."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def make_network(self, **changes: Any) -> str:
        """Make a network of both families; return its id."""
        network_id = IDS.uid()
        await self.ensure(network_id, **({"subnet": SUBNET, "subnet6": SUBNET6} | changes))
        return network_id

    async def set_rules(self, group_id: str, rules: list[Any], generation: int = 1) -> None:
        """Make a security group so."""
        group = policy.SecurityGroup(group_id=group_id, name="bench", tenant="default", rules=rules)
        request = policy.SetSecurityGroup(meta=meta(generation), group=group)
        await self.call(policy.SET_GROUP, request)

    def attach_request(self, network_id: str, groups: list[str]) -> wire.AttachVmNic:
        """Return the request for a new NIC."""
        nic_id = IDS.uid()
        return wire.AttachVmNic(
            meta=meta(),
            nic_id=nic_id,
            vm_id=IDS.uid(),
            network_id=network_id,
            hostname=f"vm-{nic_id[:8]}",
            owner_uid=self.layout.vmm_uid(0),
            guest_ports=[22],
            security_groups=groups,
        )


@asynccontextmanager
async def nwd() -> AsyncIterator[BenchNode]:
    """Run one; nothing of it is left at the end."""
    with _root() as root:
        node = BenchNode(root)
        try:
            node.sandbox.make()
            await node.start()
            yield node
        finally:
            with anyio.CancelScope(shield=True):
                await node.cleanup()


@contextmanager
def _root() -> Iterator[Path]:
    """Yield a directory with a short path whose `run` is in memory."""
    root = Path(tempfile.mkdtemp(prefix="chvb-", dir="/var/tmp"))
    run = root / "run"
    run.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "none", run], check=True)
        for directory in (root, run):
            directory.chmod(0o711)
        yield root
    finally:
        subprocess.run(["umount", "-l", run], check=False)
        shutil.rmtree(root)


def proportional_kib(pid: int) -> int:
    """Return the proportional set size of a process."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1])
