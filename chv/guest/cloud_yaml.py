"""YAML of a cloud-config; apart, for most VMs have none and the parser takes its time to load."""

from __future__ import annotations

from typing import Any

import yaml

YAMLError = yaml.YAMLError


class Alias(yaml.YAMLError):
    """An alias was met: a few lines of them can stand for gigabytes."""


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise Alias
        return super().compose_node(parent, index)


def load(text: str) -> Any:
    """Return what the text holds; YAMLError, RecursionError."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
