"""The field reference is read off the schema, and the page in docs is that."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from chv.common.wire.fields import document, rows
from chv.common.wire.resources import VirtualMachineSpec, VolumeSpec
from chv.common.wire.types import Name

PAGE = Path(__file__).parents[4] / "docs" / "manifests.md"


def test_page_in_docs_is_up_to_date() -> None:
    assert PAGE.read_text() == document()


def test_nested_fields_and_list_items_are_listed_with_their_paths() -> None:
    paths = {row.path for row in rows(VirtualMachineSpec, "spec")}
    assert {"spec.boot.cmdline", "spec.disks[]", "spec.disks[].volume"} <= paths


def test_required_fields_and_defaults_are_told() -> None:
    found = {row.path: row for row in rows(VolumeSpec, "spec")}
    assert found["spec.size"].default == "required"
    assert found["spec.class"].default == "`file`"
    assert "`raw` or `qcow2`" in found["spec.format"].type


@pytest.mark.parametrize("text", ["a\n", "a b", "A", "-a", "a/b", "", "a" * 64])
def test_bad_names_do_not_pass_the_type(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(text, Name)
