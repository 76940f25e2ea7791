"""How old what is shown of an object is."""

from __future__ import annotations

from typing import Any

import pytest

from chv.cli import ages


def item(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"phase": "Running"}}


def test_each_object_gets_its_age_where_it_was_seen() -> None:
    items = [item("a"), item("b"), {"metadata": {"name": "c"}}]
    ages.put(items, [0.24, -1.0, 3.0])
    assert items[0]["status"]["observedAgeSeconds"] == 0.2
    assert "observedAgeSeconds" not in items[1]["status"]
    assert "status" not in items[2]


def test_only_what_was_not_seen_lately_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    ages.note([item("a"), item("b"), item("c")], [1.0, 75.4, -1.0])
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "not seen lately: b (75s ago), c (not since the agent came)\n"
    ages.note([item("a")], [59.0])
    assert capsys.readouterr().err == ""


def test_of_many_only_the_first_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    ages.note([item(f"vm{n}") for n in range(12)], [100.0] * 12)
    assert capsys.readouterr().err.endswith("vm9 (100s ago) and 2 more\n")
