"""Programs in the foreground: exit codes, and their end when we are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chv.common.errors import NotFound
from chv.common.process.foreground import run_foreground
from tests.helpers import wait_until


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 128 + 15)]
)
def test_exit_code_is_the_shells(script: str, code: int) -> None:
    assert run_foreground(("sh", "-c", script)) == code


def test_missing_program_is_named() -> None:
    with pytest.raises(NotFound, match="no-such-program"):
        run_foreground(("no-such-program",))


def test_interrupt_reaches_the_program_and_not_us() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert run_foreground(("sh", "-c", "kill -INT $$; sleep 5")) == 128 + 2
    assert signal.getsignal(signal.SIGINT) is before


async def test_program_ends_when_we_are_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = (
        "from chv.common.process.foreground import run_foreground;"
        f"run_foreground(('sh', '-c', 'echo $$ > {note}; exec sleep 1000'))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    pid = int(await wait_until(lambda: note.exists() and note.read_text().strip()))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    await wait_until(lambda: not _lives(pid), what="the end of the program")


def _lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
