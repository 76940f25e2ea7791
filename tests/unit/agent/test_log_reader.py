"""Reading logs: the end, then what is appended, across a rotation."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

from chv.agent import log_reader
from chv.common.errors import NotFound


async def test_tail_is_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"{number}\n" for number in range(100)))
    text, _ = await log_reader.read(path, 3, "daemon/test")
    assert text == "97\n98\n99\n"
    assert (await log_reader.read(path, 0, "daemon/test"))[0] == ""


async def test_bytes_that_are_not_text_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xff\xfe\n")
    assert (await log_reader.read(path, 1, "vm/a"))[0] == "��\n"


async def test_nothing_written_yet_names_the_target(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="vm/a"):
        await log_reader.read(tmp_path / "none", 1, "vm/a")


async def test_follow_yields_what_is_appended_and_what_a_rotation_brings(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\n")
    _, start = await log_reader.read(path, 1, "vm/a")
    seen: list[str] = []
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_collect, path, start, seen)
            with path.open("a") as stream:
                stream.write("appended\n")
            await _until(seen, "appended\n")
            path.rename(tmp_path / "log.1")
            path.write_text("rotated\n")
            await _until(seen, "rotated\n")
            tasks.cancel_scope.cancel()
    assert "".join(seen) == "appended\nrotated\n"


async def test_follow_reads_the_rest_of_a_file_that_was_rotated_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\n")
    _, start = await log_reader.read(path, 1, "vm/a")
    with path.open("a") as stream:
        stream.write("unread\n")
    path.rename(tmp_path / "log.1")
    path.write_text("rotated\n")
    assert await _first(path, start, "rotated\n") == "unread\nrotated\n"


async def test_follow_says_that_lines_were_rotated_away(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\n")
    _, start = await log_reader.read(path, 1, "vm/a")
    path.rename(tmp_path / "gone")
    (tmp_path / "log.1").write_text("of another\n")
    path.write_text("rotated\n")
    assert await _first(path, start, "rotated\n") == f"{log_reader.MISSING}rotated\n"


async def _first(path: Path, start: os.stat_result, last: str) -> str:
    seen: list[str] = []
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_collect, path, start, seen)
            await _until(seen, last)
            tasks.cancel_scope.cancel()
    return "".join(seen)


async def test_since_begins_at_the_time_even_in_the_rotated_file(tmp_path: Path) -> None:
    (tmp_path / "log.1").write_text(
        "2026-01-01T10:00:00.000Z a\n2026-01-01T11:00:00.000Z b\nno time\n"
    )
    path = tmp_path / "log"
    path.write_text('{"time":"2026-01-01T12:00:00.000Z","event":"c"}\n')
    since = log_reader.moment("2026-01-01T10:30:00Z")
    text, _ = await log_reader.read(path, 100, "vm/a", since)
    assert text.startswith("2026-01-01T11:00:00.000Z b\nno time\n{")
    assert text.count("\n") == 3
    assert (await log_reader.read(path, 1, "vm/a", since))[0].endswith('"c"}\n')
    late = log_reader.moment("2027-01-01T00:00:00Z")
    assert (await log_reader.read(path, 100, "vm/a", late))[0] == ""


async def test_tail_reads_into_the_rotated_file(tmp_path: Path) -> None:
    (tmp_path / "log.1").write_text("one\ntwo\n")
    path = tmp_path / "log"
    path.write_text("three\n")
    assert (await log_reader.read(path, 2, "vm/a"))[0] == "two\nthree\n"


async def _collect(path: Path, start: os.stat_result, seen: list[str]) -> None:
    async for chunk in log_reader.follow(path, start):
        seen.append(chunk)


async def _until(seen: list[str], text: str) -> None:
    while text not in "".join(seen):  # noqa: ASYNC110  the reader polls a file as well
        await anyio.sleep(0.01)
