"""Names from outside: what each rule lets through, and that nothing else passes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chv.common import names
from chv.common.errors import InvalidArgument

NASTY = [
    "",
    "\n",
    "a\n",
    "a b",
    "a/b",
    "../a",
    "a\0b",
    "-a",
    "a;b",
    "a}",
    "a'b",
    'a"b',
    "é",
    "a$(b)",
]
CHECKS: list[Callable[[object], object]] = [
    names.check_name,
    names.check_namespace,
    names.check_hostname,
    names.check_mac,
    names.check_interface,
    names.check_uid,
    names.check_sha256,
    names.check_cidr,
    names.check_address,
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("value", [*NASTY, "x" * 300, None, 5, b"a", ["a"]])
def test_no_check_lets_a_dangerous_value_through(
    check: Callable[[object], object], value: object
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check(value)
    assert caught.value.field
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [*(text for text in NASTY if text), "x" * 300, None, 5])
def test_label_checks_refuse_what_is_dangerous(value: object) -> None:
    if value != "a/b":
        with pytest.raises(InvalidArgument):
            names.check_label_key(value)
    with pytest.raises(InvalidArgument):
        names.check_label_value(value)


@pytest.mark.parametrize("name", ["a", "web-1", "0", "x" * 63])
def test_a_dns_label_is_a_name(name: str) -> None:
    assert names.check_name(name) == name
    assert names.check_namespace(name) == name


@pytest.mark.parametrize("name", ["x" * 64, "Web", "a.b", "a_b", "a-"])
def test_what_is_not_a_dns_label_is_no_name(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"metadata\.name"):
        names.check_name(name)


@pytest.mark.parametrize("name", ["a", "a.b-c.d", ".".join(["x" * 63] * 3)])
def test_labels_with_dots_are_a_hostname(name: str) -> None:
    assert names.check_hostname(name) == name


@pytest.mark.parametrize("name", ["a..b", ".a", "a.", ".".join(["x" * 63] * 4)])
def test_what_is_not_labels_with_dots_is_no_hostname(name: str) -> None:
    with pytest.raises(InvalidArgument):
        names.check_hostname(name)


@pytest.mark.parametrize("key", ["app", "chv.dev/role", "A_b.C-d", "a/" + "x" * 63])
def test_a_label_key_may_have_a_dns_prefix(key: str) -> None:
    assert names.check_label_key(key) == key


@pytest.mark.parametrize("key", ["/a", "a/", "a/b/c", "A/b", "a/" + "x" * 64, "_a"])
def test_what_is_not_a_label_key_is_refused(key: str) -> None:
    with pytest.raises(InvalidArgument):
        names.check_label_key(key)


def test_the_prefix_of_a_label_key_has_a_limit() -> None:
    prefix = ".".join(["x" * 63] * 4)
    with pytest.raises(InvalidArgument, match="prefix"):
        names.check_label_key(f"{prefix}/a")


def test_a_label_value_may_be_empty() -> None:
    assert names.check_label_value("") == ""


@pytest.mark.parametrize(
    "mac",
    [
        "52:54:00:12:34:5G",
        "52-54-00-12-34-56",
        "52:54:00:12:34",
        "5A:54:00:12:34:56",
        "01:00:5e:00:00:01",
        "ff:ff:ff:ff:ff:ff",
        "00:00:00:00:00:00",
    ],
)
def test_what_is_not_a_unicast_mac_in_lower_case_is_refused(mac: str) -> None:
    with pytest.raises(InvalidArgument):
        names.check_mac(mac)


def test_a_unicast_mac_passes() -> None:
    assert names.check_mac("52:54:00:12:34:56") == "52:54:00:12:34:56"


@pytest.mark.parametrize("name", [".", "..", "x" * 16, "a:b", "eth0/"])
def test_what_the_kernel_or_a_shell_would_misread_is_no_interface(name: str) -> None:
    with pytest.raises(InvalidArgument):
        names.check_interface(name)


def test_an_interface_name_passes() -> None:
    assert names.check_interface("chv-ab12.3") == "chv-ab12.3"


def test_a_subnet_with_host_bits_names_the_subnet() -> None:
    with pytest.raises(InvalidArgument, match=r"write 10\.0\.0\.0/24"):
        names.check_cidr("10.0.0.1/24")


@pytest.mark.parametrize(
    "text", ["10.0.0.0", "10.0.0.0/33", "10.0.0.0/-1", "fe80::%eth0/64", "a/8"]
)
def test_what_is_not_a_subnet_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        names.check_cidr(text)


@pytest.mark.parametrize("text", ["10.0.0.0/24", "0.0.0.0/0", "fd00::/8"])
def test_a_subnet_passes(text: str) -> None:
    assert str(names.check_cidr(text)) == text


@pytest.mark.parametrize("text", ["10.0.0.256", "010.0.0.1", "fe80::1%eth0", "fe80::1%\n", "1"])
def test_what_is_not_an_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        names.check_address(text)


def test_an_address_passes() -> None:
    assert str(names.check_address("10.0.0.5")) == "10.0.0.5"


@given(st.text(max_size=80))
def test_a_checked_name_is_only_safe_characters(text: str) -> None:
    try:
        name = names.check_name(text)
    except InvalidArgument:
        return
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert 1 <= len(name) <= 63


@given(st.from_regex(names.LABEL_KEY_PATTERN.replace("^", r"\A")))
def test_everything_a_pattern_describes_passes_its_check(key: str) -> None:
    if len(key.rpartition("/")[0]) <= names.HOSTNAME_LENGTH_MAX:
        assert names.check_label_key(key) == key


def test_schema_patterns_end_as_json_schema_writes_it() -> None:
    pattern = names.schema_pattern(names.NAME_PATTERN)
    assert pattern.endswith("$")
    assert "\\Z" not in pattern
    assert re.search(pattern, "web-1")


@given(st.text(max_size=200) | st.binary() | st.lists(st.integers()))
def test_a_shown_value_is_one_short_line(value: object) -> None:
    text = names.shown(value)
    assert text.isprintable()
    assert len(text) <= 12 * names.SHOWN_CHARACTERS_MAX
