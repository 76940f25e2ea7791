"""Warnings of the limits that all networks of a host share."""

from __future__ import annotations

import pytest

from chv.nwd.stats import connection_warnings, neighbour_warnings


@pytest.mark.parametrize(
    ("nics", "entries", "limit", "warned"),
    [(10, 5, 1024, False), (819, 5, 1024, False), (820, 5, 1024, True), (3, 900, 1024, True)],
)
def test_neighbours_are_warned_of_near_the_limit(
    nics: int, entries: int, limit: int, warned: bool
) -> None:
    told = neighbour_warnings(nics, {"ipv4": (entries, limit), "ipv6": (0, 0)})
    assert bool(told) is warned
    assert all("net.ipv4.neigh.default.gc_thresh3" in text for text in told)


def test_a_limit_that_the_kernel_does_not_show_is_not_warned_of() -> None:
    assert neighbour_warnings(10**6, {"ipv4": (0, 0)}) == []


def test_connections_are_warned_of_near_the_limit_of_the_network() -> None:
    assert connection_warnings("network n", 799, 1000) == []
    assert connection_warnings("network n", 5, 0) == [], "a kernel that does not say"
    (text,) = connection_warnings("network n", 800, 1000)
    assert "network n has 800" in text
