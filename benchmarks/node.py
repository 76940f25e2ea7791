"""Nodes for benchmarks, with real daemons, storage and network: no guests, or the probe."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio

from chv.cli.commands.up import delete_everything
from chv.host import devnode

READY_TIMEOUT_S = 60.0
CLEAN_TIMEOUT_S = 600.0


async def start(node: devnode.DevNode) -> None:
    """Start the node and wait until it may create VMs."""
    await devnode.start(node)
    await devnode.await_ready(node, READY_TIMEOUT_S)


@contextmanager
def fake_node() -> Iterator[devnode.DevNode]:
    """A running node whose VMM is the fake one."""
    with _node(CHV_VMM="fake") as node:
        yield node


def _overcommit(config: Path) -> None:
    """Admit hundreds of fake VMs on any machine: the memory of a fake guest is nowhere."""
    text = config.read_text()
    assert text.count("memory_overcommit = 1.0") == 1
    config.write_text(text.replace("memory_overcommit = 1.0", "memory_overcommit = 16.0"))


@contextmanager
def real_node() -> Iterator[devnode.DevNode]:
    """A running node with the VMMs that this machine has."""
    with _node() as node:
        yield node


@contextmanager
def _node(**environment: str) -> Iterator[devnode.DevNode]:
    """A running node in a sandbox of its own; removed with all that is on it."""
    directory = Path(tempfile.mkdtemp(prefix="chv-bench-"))
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    node = devnode.make(directory, sandboxed=True)
    if environment.get("CHV_VMM") == "fake":
        _overcommit(directory / "node.toml")
    try:
        anyio.run(start, node)
        yield node
    finally:
        if devnode.agent_process(node) is not None:
            delete_everything(node.socket, CLEAN_TIMEOUT_S)
        anyio.run(devnode.stop, node)
        anyio.run(devnode.remove, node)
        shutil.rmtree(directory, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
