"""The three files of a snapshot, and the errors about the directory that they are in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.doubles.cloud_hypervisor.refusal import Refusal, os_error

FILES = ("config.json", "state.json", "memory-ranges")
SENT = "Failed to send migratable component snapshot"
RECEIVED = "Failed to receive migratable component snapshot"


def directory(url: str, outermost: str) -> Path:
    """Return the directory that a URL names."""
    if not url.startswith("file://"):
        raise Refusal(outermost, SENT, f"Could not extract path from URL: {url}")
    path = Path(url.removeprefix("file://"))
    if not path.is_dir():
        raise Refusal(outermost, SENT, f'Destination is not a directory: "{path}"')
    return path


def write(url: str, config: dict[str, Any], state: dict[str, Any]) -> None:
    """Write the files, none of which may be there."""
    outermost = "Cannot send VM snapshot"
    target = directory(url, outermost)
    what = {"config.json": "VM config", "state.json": "VM state", "memory-ranges": "memory"}
    texts = {"config.json": json.dumps(config), "state.json": json.dumps(state)}
    for name in FILES:
        try:
            fd = os.open(target / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            message = f"Error creating {what[name]} snapshot file"
            raise Refusal(outermost, SENT, message, os_error(error)) from error
        try:
            os.write(fd, texts.get(name, "").encode())
            if name == "memory-ranges":
                os.ftruncate(fd, config["memory"]["size"])
        finally:
            os.close(fd)


def read(url: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return configuration and state."""
    source = directory(url, "Cannot restore VM")
    return _read(source / "config.json", "config"), _read(source / "state.json", "state")


def _read(path: Path, what: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except OSError as error:
        message = f'Error opening VM {what} snapshot file "{path}"'
        raise Refusal("Cannot restore VM", RECEIVED, message, os_error(error)) from error
    except ValueError as error:
        message = f"Error deserialising VM {what} snapshot"
        raise Refusal("Cannot restore VM", RECEIVED, message, str(error)) from error
    return found
