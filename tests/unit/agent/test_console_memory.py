"""The holder's memory: one process for every node, so what it imports is bounded."""

from __future__ import annotations

import subprocess
import sys

# Each of them is a MiB or more, and the holder has no use for it.
HEAVY = frozenset({
    "_hashlib", "_ssl", "aiohttp", "aiosqlite", "argparse", "bz2", "ctypes", "hashlib", "lzma",
    "pyroute2", "qemu", "secrets", "shutil", "sqlite3", "tempfile", "tomllib", "yaml",
    "chv.agent.engine", "chv.common.config", "chv.common.process", "chv.common.wire.agent",
})  # fmt: skip

LOOK = """
import sys
from chv.agent.console import without_tls
import chv.agent.console.__main__
without_tls.import_event_loop()
import anyio, chv.agent.console.holder
async def work():
    async with anyio.create_task_group():
        await anyio.sleep(0)
anyio.run(work)
try:
    import ssl
except ImportError:
    print(*(name for name, module in sys.modules.items() if module is not None))
"""


def test_the_holder_imports_nothing_that_it_can_do_without() -> None:
    done = subprocess.run(
        (sys.executable, "-I", "-c", LOOK), capture_output=True, check=True, text=True, timeout=60
    )
    loaded = set(done.stdout.split())
    assert "asyncio" in loaded
    assert "chv.agent.console.holder" in loaded
    assert not loaded & HEAVY
