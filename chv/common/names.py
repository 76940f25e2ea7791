"""Names that come from outside, and the rule of each: checked before they reach anything.

A checked name is safe in nft, dnsmasq, cloud-init, kernel command lines, argv and paths. Every
check returns the value and raises InvalidArgument with the value (shortened, quoted) and the
rule. The patterns end in `\\Z`, since `$` would let a trailing newline through; `schema_pattern`
gives the form that JSON Schema and CRDs understand. Pure.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

from chv.common.errors import InvalidArgument

SHOWN_CHARACTERS_MAX = 40
NAME_LENGTH_MAX = 63
HOSTNAME_LENGTH_MAX = 253
INTERFACE_LENGTH_MAX = 15
PARSED_MAX = 8192  # texts that are parsed once

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_QUALIFIED = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"

NAME_PATTERN = rf"^{_LABEL}\Z"
NAMESPACE_PATTERN = NAME_PATTERN
HOSTNAME_PATTERN = rf"^{_SUBDOMAIN}\Z"
LABEL_KEY_PATTERN = rf"^({_SUBDOMAIN}/)?{_QUALIFIED}\Z"
LABEL_VALUE_PATTERN = rf"^({_QUALIFIED})?\Z"
MAC_PATTERN = r"^[0-9a-f]{2}(:[0-9a-f]{2}){5}\Z"
INTERFACE_PATTERN = r"^[a-z0-9][-a-z0-9_.]{0,14}\Z"
UID_PATTERN = r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z"
SHA256_PATTERN = r"^[0-9a-f]{64}\Z"

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_RULE_NAME = "1 to 63 of a-z, 0-9 and '-', neither first nor last a '-'"


def shown(value: object) -> str:
    """Return a value as it may stand in a message: quoted, escaped, at most 40 characters."""
    if isinstance(value, str) and len(value) > SHOWN_CHARACTERS_MAX:
        return f"{value[:SHOWN_CHARACTERS_MAX]!r}... ({len(value)} characters)"
    text = repr(value)
    return (
        text if len(text) <= 2 * SHOWN_CHARACTERS_MAX else text[: 2 * SHOWN_CHARACTERS_MAX] + "..."
    )


def schema_pattern(pattern: str) -> str:
    """Return a pattern of this module as JSON Schema writes it."""
    return pattern.replace(r"\Z", "$")


def check_name(value: object, *, field: str = "metadata.name") -> str:
    """Check the name of an object: a DNS-1123 label."""
    return _matching(value, NAME_PATTERN, field, f"a name is {_RULE_NAME}")


def check_namespace(value: object, *, field: str = "metadata.namespace") -> str:
    """Check a namespace, which is the tenant: a DNS-1123 label."""
    return _matching(value, NAMESPACE_PATTERN, field, f"a namespace is {_RULE_NAME}")


def check_hostname(value: object, *, field: str = "hostname") -> str:
    """Check a host name: DNS-1123 labels joined by dots, 253 characters at most."""
    rule = f"labels ({_RULE_NAME}) joined by dots, at most {HOSTNAME_LENGTH_MAX} characters"
    if isinstance(value, str) and len(value) > HOSTNAME_LENGTH_MAX:
        raise InvalidArgument(f"{shown(value)} is too long", field=field, hint=rule)
    return _matching(value, HOSTNAME_PATTERN, field, rule)


def check_label_key(value: object, *, field: str = "metadata.labels") -> str:
    """Check the key of a label or annotation: an optional DNS prefix and `/`, then a name."""
    rule = "an optional DNS prefix and '/', then 1 to 63 of A-Z, a-z, 0-9, '-', '_' and '.'"
    key = _matching(value, LABEL_KEY_PATTERN, field, rule)
    if len(key.rpartition("/")[0]) > HOSTNAME_LENGTH_MAX:
        raise InvalidArgument(f"the prefix of {shown(key)} is too long", field=field, hint=rule)
    return key


def check_label_value(value: object, *, field: str = "metadata.labels") -> str:
    """Check the value of a label."""
    rule = "empty, or 1 to 63 of A-Z, a-z, 0-9, '-', '_' and '.', first and last alphanumeric"
    return _matching(value, LABEL_VALUE_PATTERN, field, rule)


def check_mac(value: object, *, field: str = "mac") -> str:
    """Check the MAC address of a NIC: unicast, lower case."""
    rule = "six lower-case hexadecimal pairs joined by ':', such as 52:54:00:12:34:56"
    mac = _matching(value, MAC_PATTERN, field, rule)
    if int(mac[:2], 16) & 1 or mac == "00:00:00:00:00:00":
        raise InvalidArgument(
            f"{shown(mac)} is not a unicast address", field=field, hint="the first pair is even"
        )
    return mac


def check_interface(value: object, *, field: str = "interface") -> str:
    """Check the name of a network interface."""
    rule = f"1 to {INTERFACE_LENGTH_MAX} of a-z, 0-9, '-', '_' and '.', first a letter or digit"
    return _matching(value, INTERFACE_PATTERN, field, rule)


def check_uid(value: object, *, field: str = "metadata.uid") -> str:
    """Check the uid of an object: a UUID in lower case."""
    return _matching(value, UID_PATTERN, field, "a UUID in lower case")


def check_sha256(value: object, *, field: str = "sha256") -> str:
    """Check the text form of a SHA-256 digest."""
    return _matching(value, SHA256_PATTERN, field, "64 lower-case hexadecimal digits")


def check_cidr(value: object, *, field: str = "cidr") -> Network:
    """Check a subnet with a prefix length and without host bits."""
    rule = "a subnet such as 10.0.0.0/24"
    if not isinstance(value, str) or "/" not in value or "%" in value:
        raise InvalidArgument(f"{shown(value)} is not a subnet", field=field, hint=rule)
    try:
        loose = _interface(value)
    except ValueError as error:
        raise InvalidArgument(f"{shown(value)} is not a subnet", field=field, hint=rule) from error
    if str(loose.network) != value:
        raise InvalidArgument(
            f"{shown(value)} is not written as a subnet",
            field=field,
            hint=f"write {loose.network}",
        )
    return loose.network


def check_address(value: object, *, field: str = "address") -> Address:
    """Check an IPv4 or IPv6 address without a zone."""
    rule = "an address such as 10.0.0.5"
    if not isinstance(value, str) or "%" in value:
        raise InvalidArgument(f"{shown(value)} is not an address", field=field, hint=rule)
    try:
        return _address(value)
    except ValueError as error:
        raise InvalidArgument(
            f"{shown(value)} is not an address", field=field, hint=rule
        ) from error


@lru_cache(PARSED_MAX)  # rules of a group are looked at several times in one change
def _interface(text: str) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface:
    return ipaddress.ip_interface(text)


@lru_cache(PARSED_MAX)
def _address(text: str) -> Address:
    return ipaddress.ip_address(text)


def _matching(value: object, pattern: str, field: str, rule: str) -> str:
    if not isinstance(value, str) or re.match(pattern, value) is None:
        raise InvalidArgument(f"{shown(value)} is not allowed here", field=field, hint=rule)
    return value
