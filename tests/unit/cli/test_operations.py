"""How operations and objects are named to people."""

from __future__ import annotations

import pytest

from chv.cli.operations import label


@pytest.mark.parametrize(
    ("namespace", "named"),
    [("default", "Network/lan"), ("other", "Network/other/lan")],
)
def test_an_object_of_another_tenant_is_told_apart(namespace: str, named: str) -> None:
    assert label("Network", "lan", namespace) == named
