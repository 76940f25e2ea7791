"""The order of deletion is found by trying."""

from __future__ import annotations

from pathlib import Path

import pytest

from chv.cli.commands import objects
from chv.cli.deletion import in_rounds
from chv.cli.parser import build_parser
from chv.common.errors import InUse

NEEDS = {"clone": [], "snapshot": ["clone"], "volume": ["snapshot", "clone"]}


def test_what_is_in_use_goes_after_those_that_use_it() -> None:
    gone: list[str] = []

    def delete(name: str) -> None:
        if any(user not in gone for user in NEEDS[name]):
            raise InUse(name)
        gone.append(name)

    in_rounds(["volume", "snapshot", "clone"], delete)
    assert gone == ["clone", "snapshot", "volume"]


def test_a_round_without_progress_ends_with_the_refusal() -> None:
    tries = []

    def delete(name: str) -> None:
        tries.append(name)
        raise InUse(name)

    with pytest.raises(InUse, match="one"):
        in_rounds(["one", "two"], delete)
    assert tries == ["one", "two"]


def test_what_two_files_name_is_deleted_once(tmp_path: Path) -> None:
    image = "apiVersion: compute.chv.dev/v1alpha1\nkind: Image\nmetadata: {name: tiny}\n"
    files = []
    for number in (1, 2):
        files += ["-f", str(tmp_path / f"{number}.yaml")]
        (tmp_path / f"{number}.yaml").write_text(image)
    targets = objects._targets(build_parser().parse_args(["delete", *files]))
    assert targets == [("Image", "default", "tiny")]
