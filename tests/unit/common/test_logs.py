"""Logs: one JSON object a line whatever comes in, no secrets, never an error for the caller."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chv.common import logs
from chv.common.errors import NotFound
from chv.common.secret import Secret


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("chv")
    handlers, level, our_level = root.handlers, root.level, ours.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    ours.setLevel(our_level)
    logging.captureWarnings(False)


@pytest.fixture
def stream() -> io.StringIO:
    stream = io.StringIO()
    logs.setup("agent", "info", stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_json_line_with_its_fields(stream: io.StringIO) -> None:
    logs.get("chv.agent.vm").info("vm.started", vm_id="v1", duration_ms=3.5, steps=["a", "b"])
    [line] = lines(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line.pop("pid") == os.getpid()
    assert line == {
        "level": "info",
        "daemon": "agent",
        "logger": "chv.agent.vm",
        "event": "vm.started",
        "vm_id": "v1",
        "duration_ms": 3.5,
        "steps": ["a", "b"],
    }


def test_a_percent_sign_in_an_event_is_not_interpolated(stream: io.StringIO) -> None:
    logs.get("x").info("100%s %d", fields=1)
    assert lines(stream)[0]["event"] == "100%s %d"


def test_levels_below_the_configured_one_are_not_written() -> None:
    for level, count in (("debug", 4), ("info", 3), ("warning", 2), ("error", 1)):
        stream = io.StringIO()
        logs.setup("agent", level, stream)
        log = logs.get("chv.x")
        for write in (log.debug, log.info, log.warning, log.error):
            write("e")
        assert len(lines(stream)) == count


def test_bound_fields_are_in_every_later_event(stream: io.StringIO) -> None:
    log = logs.get("chv.x").bind(vm_id="v1", step="a")
    log.info("one")
    log.bind(generation=3).info("two", step="b")
    assert [line.get("step") for line in lines(stream)] == ["a", "b"]
    assert lines(stream)[1]["generation"] == 3
    assert all(line["vm_id"] == "v1" for line in lines(stream))


def test_a_field_cannot_replace_one_of_the_line(stream: io.StringIO) -> None:
    logs.get("chv.x").info("real", level="fake", time="never", daemon="other")
    [line] = lines(stream)
    assert (line["event"], line["level"], line["daemon"]) == ("real", "info", "agent")
    assert (line["level_"], line["time_"]) == ("fake", "never")


def test_an_injected_newline_stays_in_its_line(stream: io.StringIO) -> None:
    logs.get("chv.x").info("e", name='x"\n{"level":"error"}')
    assert len(stream.getvalue().splitlines()) == 1
    assert lines(stream)[0]["name"] == 'x"\n{"level":"error"}'


def test_a_secret_is_hidden_at_any_depth(stream: io.StringIO) -> None:
    class Holder(msgspec.Struct):
        inner: Any

    canary = "hunter2-canary"
    secret = Secret(canary)
    logs.get("chv.x").info("e", a=secret, b=[{"c": secret}], d=Holder(secret), e={secret.reveal: 1})
    assert canary not in stream.getvalue()
    assert lines(stream)[0]["a"] == "***"
    assert lines(stream)[0]["d"] == {"inner": "***"}


def test_our_errors_keep_their_code(stream: io.StringIO) -> None:
    logs.get("chv.x").warning("e", error=NotFound("no such VM", field="name"))
    error = lines(stream)[0]["error"]
    assert (error["code"], error["field"]) == ("NOT_FOUND", "name")


def test_an_exception_brings_its_traceback(stream: io.StringIO) -> None:
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError as error:
        logs.get("chv.x").exception("bug", error, vm_id="v1")
    [line] = lines(stream)
    assert line["level"] == "error"
    assert line["error"] == {"type": "ZeroDivisionError", "message": "by zero"}
    assert "test_an_exception_brings" in line["traceback"]


def test_records_of_libraries_are_json_too(stream: io.StringIO) -> None:
    logging.getLogger("asyncio").warning("slow: %s", "callback", extra={"uid": 5})
    logging.getLogger("asyncio").info("too quiet to be written")
    try:
        raise KeyError("k")
    except KeyError:
        logging.getLogger("asyncio").exception("failed")
    slow, failed = lines(stream)
    assert (slow["event"], slow["uid"], slow["logger"]) == ("slow: callback", 5, "asyncio")
    assert failed["error"]["type"] == "KeyError"
    assert "traceback" in failed


def test_warnings_are_json_too(stream: io.StringIO) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old thing", ResourceWarning, stacklevel=1)
    assert "old thing" in lines(stream)[0]["event"]


def test_a_huge_field_is_cut_and_a_huge_line_is_replaced(stream: io.StringIO) -> None:
    logs.get("chv.x").info("cut", text="x" * 100_000)
    logs.get("chv.x").info("replaced", items=["y" * 1000] * 1000)
    cut, replaced = lines(stream)
    assert len(cut["text"]) == logs.TEXT_CHARACTERS_MAX + 3
    assert replaced["event"] == "replaced"
    assert replaced["truncated_bytes"] > 1_000_000


def test_what_has_no_json_form_is_shown_by_its_repr(stream: io.StringIO) -> None:
    loop: list[object] = []
    loop.append(loop)
    logs.get("chv.x").info("e", path=Path("/x"), odd=object, bad="\udcff", loop=loop, n=2**70)
    [line] = lines(stream)
    assert "/x" in line["path"]
    assert "object" in line["odd"]
    assert line["bad"] == "\\udcff"


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text() | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_value_makes_one_valid_line(value: object) -> None:
    stream = io.StringIO()
    logs.setup("agent", "info", stream)
    logs.get("chv.x").info("e", value=value)
    assert stream.getvalue().endswith("\n")
    assert len(stream.getvalue().split("\n")) == 2
    json.loads(stream.getvalue())


class _FullDisk(io.StringIO):
    full = True

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_full_disk_loses_lines_and_says_how_many() -> None:
    stream = _FullDisk()
    logs.setup("agent", "info", stream)
    log = logs.get("chv.x")
    log.info("lost")
    log.info("lost")
    stream.full = False
    log.info("back")
    log.info("normal")
    back, normal = lines(stream)
    assert back["dropped"] == 2
    assert "dropped" not in normal


def test_set_up_twice_writes_once(stream: io.StringIO) -> None:
    logs.setup("agent", "info", stream)
    logs.get("chv.x").info("e")
    assert len(lines(stream)) == 1
