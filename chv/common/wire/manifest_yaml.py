"""YAML as manifests need it: only what JSON can say, and no surprises.

YAML 1.1 reads `no` as false, `12:30:45` as a number and `2026-01-01` as a date; here they are
text. Duplicate keys, anchors and tags are refused. Fails with InvalidArgument and the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from chv.common.errors import InvalidArgument
from chv.common.names import shown

DEPTH_MAX = 32


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of JSON."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise _wrong("anchors and aliases are not read here", mark)
        self.depth += 1
        if self.depth > DEPTH_MAX:
            raise InvalidArgument(f"nested deeper than {DEPTH_MAX}")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _scalar(tag: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))


_scalar("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF")
_scalar("int", r"^[-+]?(?:0|[1-9][0-9]*)$", "-+0123456789")
_scalar("float", r"^[-+]?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?$", "-+0123456789")
_scalar("null", r"^(?:~|null|Null|NULL|)$", "~nN\0")
_Loader.yaml_implicit_resolvers.setdefault("", []).append(
    ("tag:yaml.org,2002:null", re.compile(r"^$"))
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise _wrong(f"the key {shown(key)} is not text", key_node.start_mark)
        if key in found:
            raise _wrong(f"the key {shown(key)} is there twice", key_node.start_mark)
        found[key] = loader.construct_object(value_node, deep=True)
    return found


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def documents(text: str) -> Iterator[Any]:
    """Return each document of the text as plain data."""
    try:
        yield from yaml.load_all(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        problem = " ".join(filter(None, (error.context, error.problem)))
        raise _wrong(f"not YAML: {problem}", error.problem_mark) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"not YAML: {error}") from error


def _wrong(message: str, mark: yaml.Mark | None) -> InvalidArgument:
    where = f"line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return InvalidArgument(message, field=where)
