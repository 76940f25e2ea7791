"""A test run that was killed leaves nothing for long: the next one removes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.stord_helpers import needs_qsd
from tests.leftovers import scratch, sweep

KILLED_RUN = """
import anyio, os, signal
from tests.integration.stord_helpers import IDS, open_node

async def main():
    async with open_node() as node:
        volume, vm = IDS.uid(), IDS.uid()
        await node.open(volume)
        await node.attach(volume, vm)
        print(node.layout.run_root.parent, node.layout.instance, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main)
"""


@pytest.mark.root
@needs_qsd
def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    said = tmp_path / "said"
    # Not a pipe: what the run leaves behind holds its end open.
    with said.open("w") as output:
        done = subprocess.run([sys.executable, "-c", KILLED_RUN], stdout=output, check=False)
    assert done.returncode == -signal.SIGKILL
    directory, instance = said.read_text().split()
    assert Path(directory).is_dir()
    assert users_of(instance)

    assert directory in sweep()

    assert not Path(directory).exists()
    assert users_of(instance) == []


def test_what_a_running_run_has_is_left_alone() -> None:
    directory = scratch()
    try:
        assert str(directory) not in sweep()
        assert directory.is_dir()
    finally:
        directory.rmdir()


def users_of(instance: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if instance.encode() in command and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found
