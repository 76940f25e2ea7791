"""Identifiers: uids, instance ids, operation ids, short names. The only home of randomness.

A `Ids` object is passed to whoever needs new identifiers, so that a simulation can replay them.
"""

from __future__ import annotations

import os
import random
import re
import uuid
from functools import lru_cache

INSTANCE_LENGTH = 6
SHORT_UID_LENGTH = 10
INSTANCE_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"
INSTANCE_PATTERN = re.compile(r"^[a-z0-9]{6}\Z")


class Ids:
    """New identifiers. `seed` makes them reproducible; without it they are unguessable."""

    def __init__(self, seed: int | None = None) -> None:
        self._random: random.Random = (
            random.SystemRandom() if seed is None else random.Random(seed)  # noqa: S311
        )

    def uid(self) -> str:
        """Return a random UUID (version 4) in text form."""
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))

    def instance(self) -> str:
        """Return a node instance id: 6 characters of a-z and 2-9 without look-alikes."""
        return "".join(self._random.choice(INSTANCE_ALPHABET) for _ in range(INSTANCE_LENGTH))

    def operation(self) -> str:
        """Return an operation id, `op-` and 12 hexadecimal digits."""
        return f"op-{self._random.getrandbits(48):012x}"

    def nonce(self) -> str:
        """Return 8 hexadecimal digits that tell two incarnations of a thing apart."""
        return f"{self._random.getrandbits(32):08x}"

    def jitter(self, low: float, high: float) -> float:
        """Return a number between `low` and `high`, for back-off."""
        return self._random.uniform(low, high)


def passphrase() -> str:
    """Return 32 random bytes as text, for an encryption key; never reproducible."""
    return os.urandom(32).hex()  # `secrets` would bring OpenSSL into every process


def short_uid(uid: str) -> str:
    """Return the first 10 hexadecimal digits of a UUID, for names with a tight length limit."""
    return uid.replace("-", "")[:SHORT_UID_LENGTH]


@lru_cache(maxsize=512)  # NICs are named by it in every pass
def derived_uid(parent_uid: str, name: str) -> str:
    """Return the uid of a part of an object: the same for the same parent and name, for ever."""
    return str(uuid.uuid5(uuid.UUID(parent_uid), name))
