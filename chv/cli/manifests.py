"""Manifest files to JSON documents. What an object may contain is the agent's to judge."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from chv.common.errors import InvalidArgument, NotFound
from chv.common.wire.agent import OBJECTS_MAX

MANIFEST_BYTES_MAX = 4 * 1024 * 1024


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
    text = _read(file)
    import yaml

    try:
        parsed = list(yaml.load_all(text, Loader=_unique_loader()))
    except yaml.YAMLError as error:
        raise InvalidArgument(f"{file} is not YAML: {error}", field="-f") from error
    documents: list[dict[str, Any]] = []
    for document in parsed:
        if document is None:
            continue
        if not isinstance(document, dict):
            raise InvalidArgument(
                f"{file}: a manifest is a mapping, not {type(document).__name__}", field="-f"
            )
        is_list = document.get("kind") == "List" and isinstance(document.get("items"), list)
        documents += document["items"] if is_list else [document]
    return documents


def _read(file: str) -> str:
    try:
        data = sys.stdin.buffer.read(MANIFEST_BYTES_MAX + 1) if file == "-" else _read_file(file)
        if len(data) > MANIFEST_BYTES_MAX:
            raise InvalidArgument(f"{file} is larger than {MANIFEST_BYTES_MAX} bytes", field="-f")
        return data.decode()
    except FileNotFoundError as error:
        raise NotFound(f"no file {file!r}", field="-f") from error
    except OSError as error:
        raise InvalidArgument(f"cannot read {file!r}: {error.strerror}", field="-f") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{file!r} is not UTF-8", field="-f") from error


def _read_file(file: str) -> bytes:
    with Path(file).open("rb") as stream:
        return stream.read(MANIFEST_BYTES_MAX + 1)


def _unique_loader() -> Any:
    """Return a safe loader that refuses a key given twice: YAML would keep the last, silently."""
    import yaml

    class UniqueLoader(yaml.SafeLoader):
        pass

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = loader.construct_object(key_node, deep=True)
            if key in seen:
                raise InvalidArgument(
                    f"key {key!r} is given twice (line {key_node.start_mark.line + 1})",
                    field=str(key),
                )
            seen.add(key)
        result: dict[Any, Any] = loader.construct_mapping(node, deep=True)
        return result

    UniqueLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return UniqueLoader
