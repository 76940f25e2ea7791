"""The order of deletion is found by trying."""

from __future__ import annotations

import pytest

from chv.cli.deletion import in_rounds
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
