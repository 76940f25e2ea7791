"""The bound of a NIC for which nobody says one."""

from __future__ import annotations

import pytest

from chv.nwd.bounds import connections_default


@pytest.mark.parametrize(
    ("host_max", "bound"),
    [
        ("262144", 4096),
        ("65536", 4096),
        ("32768", 2048),
        ("1024", 256),
        ("", 4096),
        ("0", 4096),
        ("many", 4096),
    ],
)
def test_a_nic_has_a_share_of_what_the_host_tracks(host_max: str, bound: int) -> None:
    assert connections_default(host_max) == bound
