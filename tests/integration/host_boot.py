"""A boot of the host under a node of tests, as a power cut leaves it.

Whatever of the instance lives in memory is gone at once: processes, namespaces, cgroups, all that
is below /run. Files and records are there. A test build pretends another boot id: the kernel's own
cannot be changed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import uuid
from pathlib import Path

import anyio

from chv.common.process import choose_provider, scan
from chv.host import devnode
from tests.integration.live_node import LiveNode, wait_for


def cut_power(node: LiveNode) -> None:
    """End everything of the node; the next `up` is in another boot of the host."""
    anyio.run(_cut_power, node.dev)
    node.environment["CHV_BOOT_ID"] = str(uuid.uuid4())


def reboot(node: LiveNode) -> None:
    """Cut the power and start the node again."""
    cut_power(node)
    node.up()


async def _cut_power(dev: devnode.DevNode) -> None:
    prefix = dev.layout.worker_prefix
    agent = devnode.agent_process(dev)
    # The agent first: its daemons go with it, and nobody sees a worker die.
    for worker in (*([agent] if agent is not None else []), *scan(prefix)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
    await anyio.to_thread.run_sync(
        wait_for, lambda: not scan(prefix), 20, "the end of all processes"
    )
    provider = choose_provider(dev.layout)
    await provider.retire()
    for netns in Path("/run/netns").glob(f"{dev.layout.netns_prefix}*"):
        subprocess.run(["ip", "netns", "delete", netns.name], check=True)  # noqa: ASYNC221
    if dev.sandbox is not None:
        await dev.sandbox.remove()
    shutil.rmtree(dev.layout.run)
