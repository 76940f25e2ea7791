"""The fields of the resources as rows for people, read off the structs. Pure.

`python -m chv.common.wire.fields` prints docs/manifests.md; a test keeps the file true.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from chv.common.wire.resources import APPLY_ORDER, KINDS

HEAD = """# Manifests

Made from the schema by `python -m chv.common.wire.fields`; do not edit.

`apiVersion` is `compute.chv.dev/v1alpha1`, `metadata.name` is a DNS label, `metadata.namespace`
(default `default`) is the tenant. An unknown field is an error. `status` in a file is ignored.
Quantities are Kubernetes': `512Mi`, `2Gi`; a bare number where a unit belongs is an error.
"""


@dataclass(frozen=True)
class FieldRow:
    """One field: `path` in the manifest, its type in words, its default (`required` if none)."""

    path: str
    type: str
    default: str


def rows(struct: type[msgspec.Struct], prefix: str) -> Iterator[FieldRow]:
    """Yield every field below a struct, depth first."""
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    for field in info.fields:
        path = f"{prefix}.{field.encode_name}"
        inner, words = _describe(field.type)
        yield FieldRow(path + ("[]" if words.startswith("list") else ""), words, _default(field))
        if inner is not None:
            yield from rows(inner, path + ("[]" if words.startswith("list") else ""))


def _default(field: msgspec.inspect.Field) -> str:
    if field.required:
        return "required"
    value = field.default
    if value is msgspec.NODEFAULT:
        made = field.default_factory() if callable(field.default_factory) else None
        value = None if isinstance(made, msgspec.Struct) else made
    if isinstance(value, msgspec.Struct) or value in (None, "", [], {}):
        return ""
    return f"`{msgspec.json.encode(value).decode().strip(chr(34))}`"


def _describe(kind: Any) -> tuple[type[msgspec.Struct] | None, str]:
    """Return (struct to descend into, the type in words)."""
    types = msgspec.inspect
    if isinstance(kind, types.Metadata):
        inner, words = _describe(kind.type)
        note = (kind.extra_json_schema or {}).get("description", "")
        return inner, f"{words} ({note})" if note else words
    if isinstance(kind, types.StructType):
        return kind.cls, "object"
    if isinstance(kind, types.EnumType):
        return None, " or ".join(f"`{member.value}`" for member in kind.cls)
    if isinstance(kind, types.ListType):
        inner, words = _describe(kind.item_type)
        return inner, f"list of {words}"
    if isinstance(kind, types.UnionType):
        named = [entry for entry in kind.types if not isinstance(entry, types.NoneType)]
        return _describe(named[0])
    if isinstance(kind, types.IntType):
        return None, f"integer{_range(kind)}"
    if isinstance(kind, types.StrType):
        pattern = (kind.pattern or "").replace("\\Z", "$")
        return None, f"string matching `{pattern}`" if pattern else "string"
    return None, type(kind).__name__.removesuffix("Type").lower()


def _range(kind: msgspec.inspect.IntType) -> str:
    return f" {kind.ge}..{kind.le}" if kind.ge is not None and kind.le is not None else ""


def document() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for name in APPLY_ORDER:
        spec = next(field for field in msgspec.structs.fields(KINDS[name]) if field.name == "spec")
        doc = inspect.cleandoc(spec.type.__doc__ or "")
        parts.append(f"## {name}\n\n{doc}\n\n| Field | Type | Default |\n|---|---|---|")
        table = [
            f"| `{row.path}` | {row.type.replace('|', chr(92) + '|')} | {row.default} |"
            for row in rows(spec.type, "spec")
        ]
        parts[-1] += "\n" + "\n".join(table) + "\n"
    return "\n".join(parts)


if __name__ == "__main__":
    import sys

    sys.stdout.write(document())
