"""The user's cloud-config and ours, merged."""

from __future__ import annotations

from typing import Any

import pytest

from chv.common.errors import InvalidArgument
from chv.guest.user_data import USER_DATA_BYTES_MAX, merge_user_data

OURS: dict[str, Any] = {
    "disable_root": False,
    "ssh_authorized_keys": ["ours"],
    "ssh_keys": {"a": 1},
}


def test_without_user_data_ours_stays() -> None:
    assert merge_user_data(OURS, "") == merge_user_data(OURS, "#cloud-config\n") == OURS


def test_lists_are_appended_and_other_keys_are_the_users() -> None:
    text = "#cloud-config\nssh_authorized_keys: [theirs]\ndisable_root: true\nruncmd: [ls]\n"
    merged = merge_user_data(OURS, text)
    assert merged["ssh_authorized_keys"] == ["ours", "theirs"]
    assert merged["disable_root"] is True
    assert merged["runcmd"] == ["ls"]
    assert OURS["ssh_authorized_keys"] == ["ours"]


@pytest.mark.parametrize("key", ["ssh_keys", "ssh_deletekeys"])
def test_the_pinned_host_key_cannot_be_replaced(key: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        merge_user_data(OURS, f"{key}: {{}}")
    assert caught.value.field == "spec.cloudInit.userData"
    assert key in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        "#!/bin/sh\nreboot\n",
        "Content-Type: multipart/mixed\n",
        "#include http://other.invalid/\n",
        "- a list\n",
        "just text",
        "1: number key",
        "a: [unclosed",
        "a: &x [1]\nb: *x\n",
        "a: 2024-01-01\n",
        "a: !!python/object:os.system {}\n",
        "ssh_authorized_keys: text\n",
        "a: " + "[" * 5000,
        "a: " + "x" * USER_DATA_BYTES_MAX,
    ],
)
def test_what_cannot_be_merged_is_refused_with_the_field(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        merge_user_data(OURS, text)
    assert caught.value.field == "spec.cloudInit.userData"
