"""`chv console` on a terminal of its own."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tests.integration.live_node import ROOT, LiveNode, wait_for

SEEN_S_MAX = 30.0


def command(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "chv.cli", "console", name, *arguments]


def environment(node: LiveNode) -> dict[str, str]:
    pointer = node.directory / "socket"
    return os.environ | node.environment | {"CHV_SOCKET": pointer.read_text().strip()}


@dataclass
class Viewer:
    """`chv console` on a terminal of its own; the fake's line echoes what is typed."""

    process: subprocess.Popen[bytes]
    terminal: int
    slave: int
    text: bytes = b""

    def type(self, data: bytes) -> None:
        os.write(self.terminal, data)

    def sees(self, wanted: bytes) -> None:
        deadline = time.monotonic() + SEEN_S_MAX
        while wanted not in self.text:
            left = deadline - time.monotonic()
            assert left > 0, (wanted, self.text)
            if select.select([self.terminal], [], [], left)[0]:
                self.text += os.read(self.terminal, 65536)

    def forget(self) -> None:
        self.text = b""

    def ends(self) -> int:
        return self.process.wait(SEEN_S_MAX)

    def is_raw(self) -> bool:
        return not termios.tcgetattr(self.slave)[3] & termios.ECHO


@contextlib.contextmanager
def viewer(node: LiveNode, *arguments: str, name: str = "talker") -> Iterator[Viewer]:
    terminal, slave = pty.openpty()
    process = subprocess.Popen(
        command(name, *arguments), stdin=slave, stdout=slave, stderr=slave, cwd=ROOT,
        env=environment(node),
    )  # fmt: skip
    try:
        made = Viewer(process, terminal, slave)
        # Attached from then on; before, the terminal itself echoes what is typed.
        wait_for(made.is_raw, SEEN_S_MAX, "raw mode")
        yield made
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
        os.close(slave)
