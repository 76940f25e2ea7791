"""What a pattern of a field allows, in words: nobody who wrote a file should have to read a regex.

The wire types say their patterns once, as patterns; here each has its words, by the pattern itself.
One without any is told of as written wrongly, and never shown. Pure.
"""

from __future__ import annotations

import re
from typing import Final

_CHOICE = re.compile(r"\^\((?P<words>[A-Za-z0-9]+(\|[A-Za-z0-9]+)*)\)(?P<optional>\?)?\\Z")
_LITERAL = re.compile(r"\^(?P<word>[A-Za-z0-9./]+)\\Z")
_TOLD = re.compile(
    r"Expected `str` matching regex (?P<literal>'.*?'|\".*?\")(?= - at `|$)", re.DOTALL
)
NAME = "lower-case letters, digits and hyphens, not at either end"
WORDS: Final = {
    r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?\Z": NAME,
    r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?)?\Z": NAME,
    r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?\Z": "letters a-z, digits, hyphens and dots: shop.example",
    r"^[a-z0-9_]([a-z0-9._-]*[a-z0-9])?\Z": "letters a-z, digits, _ - and dots: db.shop.example",
    r"^([0-9a-f]{2}(:[0-9a-f]{2}){5})?\Z": "six pairs of lower-case hex digits: 02:00:00:12:34:56",
    r"^[0-9a-f]{2}(:[0-9a-f]{2}){5}\Z": "six pairs of lower-case hex digits: 02:00:00:12:34:56",
    r"^([0-9a-f:.]{2,45})?\Z": "an IPv6 address: fd00:7::5",
    r"^(\d{1,3}(\.\d{1,3}){3})?\Z": "an IPv4 address: 203.0.113.5",
    r"^\d{1,3}(\.\d{1,3}){3}\Z": "an IPv4 address: 203.0.113.5",
    r"^[0-9a-f:.]{2,45}\Z": "an IP address: 203.0.113.5 or fd00:7::5",
    r"^([0-9a-f:.]{2,45}/\d{1,3})?\Z": "an IPv6 subnet with its length: fd00:7::/64",
    r"^\d{1,3}(\.\d{1,3}){3}/\d{1,2}\Z": "an IPv4 subnet with its length: 10.7.0.0/24",
    r"^(/[^\x00\n]*)?\Z": "a path from the root: /dev/sdb",
    r"^/[\x21-\x7e]*\Z": "a path of a URL, without blanks: /healthz",
    r"^([A-Za-z0-9_][A-Za-z0-9_.+-]*)?\Z": "letters, digits and _ . + -, none of . + - first",
    r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*\Z": "letters, digits and _ . + -, none of . + - first",
    r"^([A-Za-z0-9][A-Za-z0-9.:-]*)?\Z": "a host name or an IP address",
    r"^[A-Za-z0-9][A-Za-z0-9.:-]*\Z": "a host name or an IP address",
    r"^[\x20-\x7e]*\Z": "printable ASCII characters",
    r"^((iqn|eui|naa)\.[A-Za-z0-9.:_-]{1,219})?\Z": "an iSCSI name: iqn.2024-01.example:disk",
    r"^([0-9]{1,6}(ms|s))?\Z": "a duration: 500ms or 5s",
    r"^[0-9]{1,6}(ms|s|m|h)\Z": "a duration: 500ms, 30s, 5m, 2h",
    r"^([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}(\.[0-9]{1,6})?Z)?\Z": (
        "a time in UTC: 2026-01-31T12:00:00Z"
    ),
    r"^(https?://[^/@?#\x00-\x20]+([/?][\x21-\x7e]*)?)?\Z": "a URL without user or fragment:"
    " https://images.example/disk.qcow2",
    r"^https?://[\x21-\x7e]+\Z": "a URL: https://images.example/disk.qcow2",
    r"^[0-9a-f]{64}\Z": "64 lower-case hex digits, as sha256sum prints them",
    r"^([0-9a-f]{64})?\Z": "64 lower-case hex digits, as sha256sum prints them",
    r"^[A-Za-z0-9+/]*={0,2}\Z": "base64 text",
    r"^(vm|daemon)/[a-z0-9-]{1,63}\Z": "vm/NAME or daemon/NAME",
    r"^[a-z0-9-]{1,63}/[a-z0-9-]{1,63}\Z": "NAMESPACE/NAME",
}


def words_of(pattern: str) -> str:
    """Return what a pattern allows; empty where nobody has said it."""
    choice = _CHOICE.fullmatch(pattern)
    if choice is not None:
        words = choice["words"].split("|")
        return f"one of {', '.join(words)}" if len(words) > 1 else words[0]
    literal = _LITERAL.fullmatch(pattern)
    return literal["word"] if literal is not None else WORDS.get(pattern, "")


def reworded(text: str) -> str:
    """Return a decoder's complaint with words in the place of a pattern."""
    return _TOLD.sub(_in_words, text)


def _in_words(match: re.Match[str]) -> str:
    import ast  # only for a refusal

    words = words_of(str(ast.literal_eval(match["literal"])))
    return f"expected {words}" if words else "it is not written as it should be"
