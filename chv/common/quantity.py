"""Quantities with units, as manifests write them: `2Gi`, `2`, `30s`, `100Mbit`.

A bare number where a unit is expected is an error that names the likely fix. Pure.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from chv.common.errors import InvalidArgument
from chv.common.names import shown

BYTES_MAX = (1 << 62) - 1
CPUS_MAX = 512
DURATION_S_MAX = 366 * 86_400.0

BYTE_UNITS = {
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}
DURATION_UNITS_S = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86_400),
}
BIT_UNITS = {"kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9}
BANDWIDTH_BPS_MIN = 64_000
BANDWIDTH_BPS_MAX = 10**12
_UNIT_HINT = "use a number with Ki, Mi, Gi, Ti, k, M, G or T, such as 2Gi"
_DURATION_HINT = "use numbers with ms, s, m, h or d, such as 30s or 1h30m"
_NUMBER = r"[0-9]{1,20}(?:\.[0-9]{1,20})?"
_BYTES = re.compile(rf"({_NUMBER})([A-Za-z]{{0,8}})\Z")
_DURATION = re.compile(rf"({_NUMBER})(ms|s|m|h|d)")
_BITS = re.compile(rf"({_NUMBER})(kbit|Mbit|Gbit)\Z")
_WHOLE = re.compile(r"[0-9]{1,20}\Z")


def parse_bytes(value: object, *, field: str = "") -> int:
    """Return the bytes that a text such as `2Gi` means."""
    return _text_bytes(value, field) if isinstance(value, str) else _bytes(value, field)


@lru_cache(maxsize=512)  # an agent reads the sizes of its objects in every pass
def _text_bytes(text: str, field: str) -> int:
    return _bytes(text, field)


def _bytes(value: object, field: str) -> int:
    match = _BYTES.match(str(value)) if _is_plain(value) else None
    if match is None:
        raise InvalidArgument(f"{shown(value)} is not a size", field=field, hint=_UNIT_HINT)
    number, unit = Fraction(match.group(1)), match.group(2)
    if unit not in BYTE_UNITS:
        hint = _bare_size_hint(number) if not unit else _unit_hint(match.group(1), unit)
        problem = "has no unit" if not unit else f"has the unknown unit {unit!r}"
        raise InvalidArgument(f"{shown(value)} {problem}", field=field, hint=hint)
    size = number * BYTE_UNITS[unit]
    if size.denominator != 1 or size > BYTES_MAX:
        limit = f"a whole number of bytes, at most {BYTES_MAX}"
        raise InvalidArgument(f"{shown(value)} is not {limit}", field=field, hint=_UNIT_HINT)
    return int(size)


def format_bytes(size_bytes: int) -> str:
    """Return the shortest exact text for a size; `parse_bytes` gives the same number back."""
    if not 0 <= size_bytes <= BYTES_MAX:
        raise InvalidArgument(f"{size_bytes} is not a size", hint=f"0 to {BYTES_MAX}")
    for unit in ("Ti", "Gi", "Mi", "Ki", "T", "G", "M", "k"):
        if size_bytes and size_bytes % BYTE_UNITS[unit] == 0:
            return f"{size_bytes // BYTE_UNITS[unit]}{unit}"
    # 1/1000 always has a short decimal form, so nothing is rounded.
    return f"{Decimal(size_bytes).scaleb(-3).normalize():f}k"


def parse_cpus(value: object, *, field: str = "") -> int:
    """Return a whole number of virtual CPUs."""
    text = str(value) if _is_plain(value) else ""
    cpus = int(text) if _WHOLE.match(text) else 0
    if not 1 <= cpus <= CPUS_MAX:
        raise InvalidArgument(
            f"{shown(value)} is not a number of virtual CPUs",
            field=field,
            hint=f"a whole number from 1 to {CPUS_MAX}",
        )
    return cpus


def parse_duration_s(value: object, *, field: str = "") -> float:
    """Return the seconds that a text such as `30s` or `1h30m` means."""
    text = str(value) if _is_plain(value) else ""
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        hint = f"write {text}s" if re.match(rf"{_NUMBER}\Z", text) else _DURATION_HINT
        raise InvalidArgument(f"{shown(value)} is not a duration", field=field, hint=hint)
    seconds = float(sum(Fraction(number) * DURATION_UNITS_S[unit] for number, unit in parts))
    if seconds > DURATION_S_MAX:
        raise InvalidArgument(f"{shown(value)} is too long", field=field, hint="at most 366d")
    return seconds


def parse_bandwidth_bps(value: object, *, field: str = "") -> int:
    """Return the bits per second that a text such as `100Mbit` means."""
    match = _BITS.match(str(value)) if _is_plain(value) else None
    if match is None:
        hint = "use a number with kbit, Mbit or Gbit, such as 100Mbit"
        raise InvalidArgument(f"{shown(value)} is not a bandwidth", field=field, hint=hint)
    bps = int(Fraction(match.group(1)) * BIT_UNITS[match.group(2)])
    if not BANDWIDTH_BPS_MIN <= bps <= BANDWIDTH_BPS_MAX:
        raise InvalidArgument(
            f"{shown(value)} is out of range", field=field, hint="64kbit to 1000Gbit"
        )
    return bps


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _bare_size_hint(number: Fraction) -> str:
    """Guess what a bare number meant: MiB when small, bytes when it is a size in bytes."""
    if number.denominator == 1 and number >= 1 << 20:
        return f"write {format_bytes(min(int(number), BYTES_MAX))}"
    return f"write {_decimal(number)}Mi"


def _unit_hint(number: str, unit: str) -> str:
    first = unit[0]
    binary = first.upper() + "i"
    if binary not in BYTE_UNITS:
        return _UNIT_HINT
    decimal = first.lower() if first in "kK" else first.upper()
    return f"write {number}{binary} (powers of 1024) or {number}{decimal} (powers of 1000)"


def _decimal(number: Fraction) -> str:
    return f"{Decimal(number.numerator) / Decimal(number.denominator):f}"
