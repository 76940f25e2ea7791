"""An answer that is an error: a status, and messages from the outermost to the root cause."""

from __future__ import annotations

import os

BACKTRACE = "\n\nStack backtrace:\n   0: <unknown>\n   1: start_thread\n   2: __clone3"


class Refusal(Exception):
    """What a verb raises. `messages` come after those of the API and of the action."""

    def __init__(self, *messages: str, status: int = 500) -> None:
        super().__init__(*messages)
        self.messages = messages
        self.status = status


class Malformed(Exception):
    """A body that cannot be read."""


def not_created() -> Refusal:
    return Refusal("VM is not created", status=404)


def not_running() -> Refusal:
    return Refusal("VM is not running")


def already_created() -> Refusal:
    return Refusal("VM is already created")


def migrating() -> Refusal:
    return Refusal("VM is currently migrating and can't be modified")


def invalid(message: str) -> Refusal:
    return Refusal("Failed to validate config", message)


def device_error(*messages: str) -> Refusal:
    return Refusal("Error from device manager", *messages)


def os_error(error: OSError) -> str:
    """Return an error of the system in the words of the real program's language."""
    return f"{os.strerror(error.errno or 0)} (os error {error.errno})"
