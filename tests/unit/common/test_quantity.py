"""Quantities: every unit, bare numbers with the fix named, exact round trips."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chv.common.errors import InvalidArgument
from chv.common.quantity import (
    BYTES_MAX,
    format_bytes,
    parse_bytes,
    parse_cpus,
    parse_duration_s,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1Ki", 1024),
        ("512Mi", 512 << 20),
        ("2Gi", 2 << 30),
        ("1Ti", 1 << 40),
        ("1k", 1000),
        ("1M", 10**6),
        ("3G", 3 * 10**9),
        ("1T", 10**12),
        ("1.5Gi", 3 << 29),
        ("0.001k", 1),
        ("0Mi", 0),
    ],
)
def test_a_size_with_a_unit_is_read(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (1024, "write 1024Mi"),
        ("1024", "write 1024Mi"),
        (2147483648, "write 2Gi"),
        ("0.5", "write 0.5Mi"),
        ("2GB", "write 2Gi (powers of 1024) or 2G (powers of 1000)"),
        ("2gib", "write 2Gi (powers of 1024) or 2G (powers of 1000)"),
        ("2K", "write 2Ki (powers of 1024) or 2k (powers of 1000)"),
    ],
)
def test_a_size_with_a_missing_or_wrong_unit_names_the_fix(value: object, hint: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_bytes(value, field="spec.memory")
    assert caught.value.hint == hint
    assert caught.value.field == "spec.memory"


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Gi",
        "-1Gi",
        "+1Gi",
        " 1Gi",
        "1Gi\n",
        "1 Gi",
        "1e3Mi",
        "1,5Gi",
        "nanGi",
        "0.3Ki",
        "1X",
        "9" * 20 + "Ti",
        "4611686018427387904k",
        True,
        None,
        [],
        float("inf"),
        float("nan"),
        "\u0661Gi",
        "9" * 5000,
    ],
)
def test_what_is_not_a_size_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgument):
        parse_bytes(value)


@given(st.integers(0, BYTES_MAX))
def test_a_formatted_size_reads_back_equal(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(2 << 30, "2Gi"), (1536 << 20, "1536Mi"), (5_000_000, "5M"), (1025, "1.025k"), (0, "0k")],
)
def test_a_size_is_formatted_in_the_largest_unit_that_divides_it(
    size_bytes: int, text: str
) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize("size_bytes", [-1, BYTES_MAX + 1])
def test_a_number_that_is_no_size_is_not_formatted(size_bytes: int) -> None:
    with pytest.raises(InvalidArgument):
        format_bytes(size_bytes)


@pytest.mark.parametrize(("value", "cpus"), [("2", 2), (1, 1), ("512", 512)])
def test_whole_cpus_are_read(value: object, cpus: int) -> None:
    assert parse_cpus(value) == cpus


@pytest.mark.parametrize("value", ["0", "513", "1.5", "500m", "-1", "", "2\n", 1.0, True, None])
def test_what_is_not_a_number_of_cpus_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgument, match="whole number from 1 to 512"):
        parse_cpus(value, field="spec.cpus")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30.0), ("5m", 300.0), ("1h30m", 5400.0), ("250ms", 0.25), ("1d", 86_400.0)],
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


def test_a_bare_duration_names_the_fix() -> None:
    with pytest.raises(InvalidArgument, match="write 30s"):
        parse_duration_s(30)


@pytest.mark.parametrize("value", ["", "s", "-1s", "1s ", "1s\n", "1w", "1h x", "367d", None, True])
def test_what_is_not_a_duration_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgument):
        parse_duration_s(value)
