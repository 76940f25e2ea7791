"""Manifest files to JSON documents. What an object may contain is the agent's to judge."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from chv.common.errors import InvalidArgument, NotFound
from chv.common.wire.agent import OBJECTS_MAX
from chv.common.wire.manifest import TEXT_BYTES_MAX, load_documents


def load(files: list[str]) -> list[dict[str, Any]]:
    """Return the documents of all files in order; raises InvalidArgument or NotFound."""
    documents: list[dict[str, Any]] = []
    for file in files:
        documents += _load_one(file)
    if not documents:
        raise InvalidArgument(f"no object in {', '.join(files)}", field="-f")
    if len(documents) > OBJECTS_MAX:
        raise InvalidArgument(
            f"{len(documents)} objects, at most {OBJECTS_MAX} at once",
            field="-f",
            hint="apply them in several files",
        )
    return documents


def raw(documents: list[dict[str, Any]]) -> list[msgspec.Raw]:
    """Return the documents as the API takes them."""
    return [msgspec.Raw(msgspec.json.encode(document)) for document in documents]


def _load_one(file: str) -> list[dict[str, Any]]:
    try:
        return load_documents(_read(file))
    except InvalidArgument as error:
        error.resource = error.resource or file
        raise


def _read(file: str) -> str:
    try:
        data = sys.stdin.buffer.read(TEXT_BYTES_MAX + 1) if file == "-" else _read_file(file)
        return data.decode()
    except FileNotFoundError as error:
        raise NotFound(f"no file {file!r}", field="-f") from error
    except OSError as error:
        raise InvalidArgument(f"cannot read {file!r}: {error.strerror}", field="-f") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{file!r} is not UTF-8", field="-f") from error


def _read_file(file: str) -> bytes:
    with Path(file).open("rb") as stream:
        return stream.read(TEXT_BYTES_MAX + 1)
