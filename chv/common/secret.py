"""A value that must not be seen: every text form of it is `***`, and it does not serialize.

`reveal()` is the one way out, so that a search for it finds every place that handles secrets.
"""

from __future__ import annotations

import hmac
from typing import NoReturn

HIDDEN = "***"


class Secret:
    """Holds text or bytes; compares in constant time, does not hash, pickle or print."""

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("_value",)

    def __init__(self, value: str | bytes) -> None:
        self._value = value.encode() if isinstance(value, str) else bytes(value)

    def reveal(self) -> bytes:
        """Return the value; the caller answers for where it goes."""
        return self._value

    def __repr__(self) -> str:
        return HIDDEN

    def __format__(self, spec: str) -> str:
        return format(HIDDEN, spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret cannot be serialized")
