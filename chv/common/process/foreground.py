"""A program in the foreground of a terminal: `chv ssh`, `chv up --foreground`.

It shares our terminal, environment and process group; Ctrl-C reaches it and is left to it. When
we are killed it gets SIGTERM; SIGHUP would be ignored where `nohup` has started us.
"""

from __future__ import annotations

import signal
import subprocess

from chv.common.errors import NotFound
from chv.common.process import syscalls


def run_foreground(argv: tuple[str, ...], *, environment: dict[str, str] | None = None) -> int:
    """Run to the end; return the exit code, 128 + N for a death by signal N as shells do."""
    # The program decides what an interrupt means; we only wait for it.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(argv, env=environment, preexec_fn=_restore)
        code = process.wait()
    except FileNotFoundError as error:
        raise NotFound(f"program {argv[0]!r} is not in PATH") from error
    finally:
        signal.signal(signal.SIGINT, before)
    return 128 - code if code < 0 else code


def _restore() -> None:
    """In the new process: undo our ignoring of SIGINT, and end when the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    syscalls.set_parent_death_signal(signal.SIGTERM)
