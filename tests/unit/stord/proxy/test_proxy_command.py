"""The proxy's program: one file that everybody may run, whatever CHV itself was started from."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from chv.stord.proxy import command

NOBODY = 65534


def run(
    program: Path, user: int | None = None, group: int | None = None
) -> subprocess.CompletedProcess[str]:
    argv = command.argv("chv:tester:proxy:disk:1", Path("/live"), program)
    return subprocess.run(
        argv[:-1], capture_output=True, text=True, check=False, cwd="/", env={}, user=user,
        group=group,
    )  # fmt: skip


def test_the_program_is_the_same_file_until_its_code_changes(tmp_path: Path) -> None:
    first = command.install(tmp_path)
    made = first.stat()
    assert command.install(tmp_path) == first
    assert first.stat() == made
    assert made.st_mode & 0o777 == 0o444


def test_the_program_runs_without_the_sources(tmp_path: Path) -> None:
    done = run(command.install(tmp_path))
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        ["usage: WORKER_ID LISTENER_FD BACKEND_PATH"],
    )
    assert (
        str(Path(command.__file__).parents[3]).encode()
        not in command.install(tmp_path).read_bytes()
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_uid_runs_the_program() -> None:
    if not command.is_runnable():
        pytest.skip(f"other users cannot run {command.interpreter()}")
    with tempfile.TemporaryDirectory(dir="/run") as name:
        directory = Path(name)
        directory.chmod(0o711)
        done = run(command.install(directory), user=NOBODY, group=NOBODY)
    assert (done.returncode, done.stderr.startswith("usage:")) == (2, True), done.stderr
