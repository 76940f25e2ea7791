"""Tables fit the terminal, and are a line a row everywhere else."""

from __future__ import annotations

import argparse
import errno
import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import Callable, Iterator, Sequence

import pytest

from chv.cli import output
from chv.cli.commands import doctor, node
from chv.common.wire.types import Feature
from chv.host.doctor import Check

LONG = "one rule of the host's own firewall decides on what this guest sends to the outside world"


def on_terminal(columns: int, show: Callable[[], object]) -> list[str]:
    """Return what is printed on a real terminal that is so wide."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    kept, before = os.dup(1), sys.stdout
    os.dup2(slave, 1)
    try:
        with os.fdopen(os.dup(1), "w") as sys.stdout:
            show()
    finally:
        sys.stdout = before
        os.dup2(kept, 1)
        os.close(kept)
        os.close(slave)
    found = b"".join(_until_the_end(master))
    os.close(master)
    return found.decode().splitlines()


def _until_the_end(master: int) -> Iterator[bytes]:
    while True:
        try:
            yield os.read(master, 1 << 16)
        except OSError as error:
            assert error.errno == errno.EIO, "nobody has the other end any more"
            return


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def test_the_last_column_is_broken_between_words_on_a_terminal() -> None:
    lines = on_terminal(60, lambda: output.table(("PLACE", "DETAIL"), [("tap", LONG)]))
    assert max(map(len, lines)) <= 60
    assert len(lines) > 2
    assert " ".join(line.strip() for line in lines[1:]) == f"tap     {LONG}"
    assert all(line.startswith("        ") for line in lines[2:]), "below its column"


def test_a_word_is_never_broken() -> None:
    lines = on_terminal(40, lambda: output.table(("A", "B"), [("x", "/a" * 40)]))
    assert lines[1] == f"x   {'/a' * 40}"


def test_elsewhere_a_row_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(("PLACE", "DETAIL"), [("tap", LONG)])
    assert capsys.readouterr().out.splitlines() == ["PLACE   DETAIL", f"tap     {LONG}"]


def test_a_remedy_stands_below_what_was_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [
        Check(id="root", status="ok", message="runs as root"),
        Check(id="lvm", status="info", message="no device mapper", remedy="modprobe dm_mod"),
    ]
    monkeypatch.setattr(doctor, "run_checks", lambda: checks)
    doctor.doctor(argparse.Namespace(json=False))
    assert capsys.readouterr().out.splitlines() == [
        "STATUS   CHECK   FOUND",
        "ok       root    runs as root",
        "info     lvm     no device mapper",
        "                 fix: modprobe dm_mod",
    ]


@pytest.mark.parametrize(("style", "shown"), [(None, False), ("wide", True)])
def test_what_a_kernel_said_is_for_those_who_look_closer(
    style: str | None, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "Error: Could not process rule: Operation not supported"
    features: Sequence[Feature] = [Feature(name="nft_flowtable", present=False, detail=said)]
    node._features(features, with_detail=style == "wide")
    out = capsys.readouterr().out
    assert "nft_flowtable   no" in out
    assert (said in out) == shown
