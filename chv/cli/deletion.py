"""Deleting several objects that need each other, in whatever order works.

Kinds alone do not say the order: a clone needs a snapshot, which needs a volume. What is refused
IN_USE is tried again after the others; a round without any progress ends with the refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from chv.common.errors import InUse

T = TypeVar("T")


def in_rounds(targets: Sequence[T], delete: Callable[[T], None]) -> None:
    """Delete all targets."""
    pending = list(targets)
    while pending:
        refusals = [(target, error) for target in pending if (error := _refused(target, delete))]
        if len(refusals) == len(pending):
            raise refusals[0][1]
        pending = [target for target, _ in refusals]


def _refused(target: T, delete: Callable[[T], None]) -> InUse | None:
    try:
        delete(target)
    except InUse as error:
        return error
    return None
