"""Manifest files: what is refused names the file and the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from chv.cli import manifests
from chv.common.errors import InvalidArgument, NotFound
from chv.common.wire.manifest import parse

EXAMPLES = Path(__file__).parents[3] / "examples"


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "manifest.yaml"
    path.write_text(text)
    return str(path)


def test_documents_keep_their_order_and_empty_ones_go(tmp_path: Path) -> None:
    found = manifests.load([write(tmp_path, "---\na: 1\n---\n---\nb: 2\n")])
    assert found == [{"a": 1}, {"b": 2}]


def test_lists_are_unpacked(tmp_path: Path) -> None:
    found = manifests.load([write(tmp_path, "kind: List\nitems: [{a: 1}, {b: 2}]\n")])
    assert found == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_every_example_loads(example: str) -> None:
    documents = manifests.load([str(EXAMPLES / example)])
    assert [parse(document).kind for document in documents] == [
        document["kind"] for document in documents
    ]
    assert len(documents) >= 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not YAML"),
        ("- 1\n", "is not an object"),
        ("a: 1\na: 2\n", "there twice"),
        ("metadata:\n  name: a\n  name: b\n", "there twice"),
        ("", "no object"),
        ("--- !!python/object:os.system {}\n", "not YAML"),
    ],
)
def test_bad_text_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        manifests.load([write(tmp_path, text)])


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        manifests.load([str(tmp_path / "nowhere.yaml")])


def test_huge_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="longer"):
        manifests.load([write(tmp_path, "a: " + "x" * 900_000)])


def test_too_many_objects_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "OBJECTS_MAX", 2)
    with pytest.raises(InvalidArgument, match="3 objects"):
        manifests.load([write(tmp_path, "---\na: 1\n---\na: 2\n---\na: 3\n")])
