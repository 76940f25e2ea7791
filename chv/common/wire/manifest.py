"""Manifests: YAML text to JSON objects, JSON objects to checked resources, and back.

`load_documents` reads text for the CLI; `parse` and `check` are what the agent believes in. An
error is an InvalidArgument that names the field, the value and the fix. `status` and
`managedFields` of an input are ignored; any other unknown field is refused. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from chv.common.errors import InvalidArgument, Unsupported
from chv.common.names import (
    check_label_key,
    check_label_value,
    check_name,
    check_namespace,
    shown,
)
from chv.common.wire.manifest_rules import check
from chv.common.wire.resources import KINDS, Resource
from chv.common.wire.types import API_VERSION
from chv.common.wording import reworded, words_of

TEXT_BYTES_MAX = 900_000  # below the limit of a frame
DOCUMENTS_MAX = 200
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
FREE_TEXT = ("spec.cloudInit.userData", "metadata.annotations")
NAMESPACE = "default"
_QUANTITIES = ("spec.memory", "spec.maxMemory", "spec.size")


def load_documents(text: str) -> list[dict[str, Any]]:
    """Return the objects of a YAML (or JSON) text, one or several documents."""
    from chv.common.wire.manifest_yaml import documents  # YAML is dear to import

    if len(text.encode()) > TEXT_BYTES_MAX:
        raise InvalidArgument(f"the text is longer than {TEXT_BYTES_MAX} bytes")
    found: list[dict[str, Any]] = []
    for document in documents(text):
        if document is None:
            continue
        items = document.get("items") if _is_list(document) else [document]
        for item in items if isinstance(items, list) else [items]:
            if not isinstance(item, dict):
                raise InvalidArgument(
                    f"{shown(item)} is not an object", hint="start with apiVersion and kind"
                )
            found.append(item)
    if len(found) > DOCUMENTS_MAX:
        raise InvalidArgument(f"more than {DOCUMENTS_MAX} objects in one text")
    return found


def parse(document: Mapping[str, Any] | bytes | msgspec.Raw) -> Resource:
    """Return the resource that a JSON object describes, checked as far as it goes by itself."""
    tree = _tree(document)
    _check_head(tree)
    tree = {**tree, "status": None}
    metadata = dict(tree["metadata"])
    metadata.pop("managedFields", None)
    metadata.setdefault("namespace", NAMESPACE)
    tree["metadata"] = metadata
    _refuse_control_characters(tree, tree["spec"], "spec")
    _refuse_control_characters(tree, metadata, "metadata")
    kind = KINDS[tree["kind"]]
    try:
        resource = msgspec.convert(tree, type=kind, strict=True)
    except msgspec.ValidationError as error:
        raise _friendly(tree, str(error)) from error
    try:
        check(resource)
    except InvalidArgument as error:
        error.resource = error.resource or _title(tree)
        raise
    return resource


def encode(resource: Resource) -> bytes:
    """Return the resource as JSON, without what is empty."""
    return msgspec.json.encode(resource)


def _is_list(document: object) -> bool:
    return isinstance(document, dict) and document.get("kind") == "List"


def _tree(document: Mapping[str, Any] | bytes | msgspec.Raw) -> dict[str, Any]:
    if isinstance(document, Mapping):
        return dict(document)
    try:
        tree = msgspec.json.decode(document)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise InvalidArgument(f"not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise InvalidArgument(f"{shown(tree)} is not an object")
    return tree


def _check_head(tree: dict[str, Any]) -> None:
    """Check what every object has, first: everything later names the object by it."""
    if tree.get("apiVersion") != API_VERSION:
        raise InvalidArgument(
            f"{shown(tree.get('apiVersion'))} is not a version that is spoken here",
            field="apiVersion",
            hint=f"write {API_VERSION}",
        )
    kind = tree.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        kinds = ", ".join(KINDS)
        raise InvalidArgument(f"{shown(kind)} is not a kind", field="kind", hint=f"one of {kinds}")
    metadata = tree.get("metadata")
    if not isinstance(metadata, dict):
        raise InvalidArgument("there is no metadata", field="metadata", hint="metadata: {name: …}")
    check_name(metadata.get("name"))
    if "namespace" in metadata:
        check_namespace(metadata["namespace"])
    for table in ("labels", "annotations"):
        if isinstance(metadata.get(table), dict):
            for key in metadata[table]:
                check_label_key(key, field=f"metadata.{table}")
    if isinstance(metadata.get("labels"), dict):
        for key, value in metadata["labels"].items():
            check_label_value(value, field=f"metadata.labels.{key}")
    if metadata.get("finalizers"):
        raise Unsupported(
            "nobody on a single node would ever take a finalizer away",
            resource=_title(tree),
            field="metadata.finalizers",
            hint="leave it out",
        )
    if "spec" not in tree:
        raise InvalidArgument("there is no spec", resource=_title(tree), field="spec")


def _refuse_control_characters(tree: dict[str, Any], value: object, path: str) -> None:
    """Patterns let a trailing newline through; nothing but free text has a use for one."""
    if path in FREE_TEXT:
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_control_characters(tree, inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _refuse_control_characters(tree, inner, f"{path}[{index}]")
    elif isinstance(value, str) and not value.isprintable():
        raise InvalidArgument(
            f"{shown(value)} has characters that cannot be printed",
            resource=_title(tree),
            field=path,
        )


def _title(tree: Mapping[str, Any]) -> str:
    metadata = tree["metadata"]
    return f"{tree['kind']} {metadata.get('namespace', 'default')}/{metadata['name']}"


# --- msgspec's words into ours


def _friendly(tree: dict[str, Any], text: str) -> InvalidArgument:
    match = _PATH.search(text)
    path = match.group("path") if match is not None else ""
    words = text[: match.start()] if match is not None else text
    unknown = re.match(r"Object contains unknown field `(?P<name>[^`]*)`", words)
    if unknown is not None:
        return _unknown_field(tree, path, unknown.group("name"))
    missing = re.match(r"Object missing required field `(?P<name>[^`]*)`", words)
    if missing is not None:
        name = missing.group("name")
        return InvalidArgument(
            f"{name!r} is missing", resource=_title(tree), field=_join(path, name)
        )
    value = _value_at(tree, path)
    schema = _schema_at(KINDS[tree["kind"]], path)
    choices = schema.get("enum", ())
    if choices and isinstance(value, str):
        return InvalidArgument(
            f"{shown(value)} is none of {', '.join(choices)}", resource=_title(tree), field=path
        )
    if "pattern" in schema and isinstance(value, str) and "matching regex" in words:
        return InvalidArgument(
            f"{shown(value)} is not written as it should be",
            resource=_title(tree),
            field=path,
            hint=schema.get("description") or words_of(schema["pattern"]),
        )
    return InvalidArgument(
        f"{shown(value)}: {_lowered(reworded(words))}",
        resource=_title(tree),
        field=path,
        hint=_hint(path, value) or _as_text(schema, value),
    )


def _unknown_field(tree: dict[str, Any], path: str, name: str) -> InvalidArgument:
    import difflib

    known = _known_fields(KINDS[tree["kind"]], path)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
    return InvalidArgument(
        f"{name!r} is not a field", resource=_title(tree), field=_join(path, name), hint=hint
    )


def _known_fields(kind: type[Resource], path: str) -> list[str]:
    """Return the fields of the struct at `path`."""
    names = _schema_at(kind, path).get("properties", {})
    return [name for name in names if name not in ("status", "managedFields")]


def _schema_at(kind: type[Resource], path: str) -> dict[str, Any]:
    """Return the JSON schema of what is at `path`; empty where there is none."""
    schema = msgspec.json.schema(kind)
    node = _resolved(schema, schema)
    for part in _parts(path):
        properties = node.get("properties", {})
        node = properties.get(part, {}) if isinstance(part, str) else node.get("items", {})
        node = _resolved(schema, node)
    return node


def _resolved(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    for option in node.get("anyOf", ()):
        if "$ref" in option:
            node = option
    if "$ref" in node:
        found: dict[str, Any] = schema["$defs"][node["$ref"].rpartition("/")[2]]
        return found
    return node


def _parts(path: str) -> list[str | int]:
    return [
        int(part) if part.isdigit() else part
        for part in re.findall(r"[^.\[\]]+", path)
        if part != "..."
    ]


def _value_at(tree: Any, path: str) -> object:
    value = tree
    for part in _parts(path):
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _hint(path: str, value: object) -> str:
    bare = isinstance(value, int | float) and not isinstance(value, bool)
    if path in _QUANTITIES and bare:
        unit = "Gi" if path == "spec.size" else "Mi"
        return f"write {value}{unit}, with its unit"
    if path in ("spec.shutdownTimeout", "spec.startDelay") and bare:
        return f"write {value}s, with its unit"
    if bare and path.startswith("metadata."):
        return f'write "{value}", in quotes'
    return ""


def _as_text(schema: Mapping[str, Any], value: object) -> str:
    """Say how a number is written where a text belongs."""
    if schema.get("type") != "string" or isinstance(value, bool) or not isinstance(value, int):
        return ""
    if "description" in schema and not re.match(schema.get("pattern", ""), str(value)):
        return str(schema["description"])
    return f'write "{value}", in quotes'


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _lowered(words: str) -> str:
    return words[:1].lower() + words[1:]
