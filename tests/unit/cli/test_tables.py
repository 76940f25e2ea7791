"""What `chv describe` prints."""

from __future__ import annotations

import pytest

from chv.cli import tables


def test_describe_shows_labels_and_annotations(capsys: pytest.CaptureFixture[str]) -> None:
    metadata = {
        "name": "a",
        "namespace": "default",
        "labels": {"tier": "front", "app": "x"},
        "annotations": {"note": "y"},
    }
    tables.describe({"kind": "Network", "metadata": metadata}, [])
    printed = capsys.readouterr().out
    assert "  labels app=x, tier=front\n" in printed
    assert "  annotations note=y\n" in printed
