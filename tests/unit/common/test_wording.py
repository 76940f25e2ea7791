"""Every pattern that a user's text can fail is told of in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import pytest

from chv.common.errors import InvalidArgument
from chv.common.wire import agent, agent_watch
from chv.common.wire.manifest import parse
from chv.common.wire.resources import KINDS
from chv.common.wording import WORDS, reworded, words_of

FORWARDED = {r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z", r"^[A-Za-z0-9._:-]+\Z"}  # our own ids


def patterns(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("pattern"), str) and "description" not in node:
            yield node["pattern"]
        for inner in node.values():
            yield from patterns(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from patterns(inner)


def messages() -> list[type[msgspec.Struct]]:
    return [
        each
        for module in (agent, agent_watch)
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, msgspec.Struct)
    ]


def test_each_pattern_of_manifests_and_of_the_agents_messages_has_words() -> None:
    found = {p for kind in KINDS.values() for p in patterns(msgspec.json.schema(kind))}
    found |= {p for each in messages() for p in patterns(msgspec.json.schema(each))}
    assert {p for p in found - FORWARDED if not words_of(p)} == set()


@pytest.mark.parametrize("pattern", WORDS)
def test_examples_in_words_are_taken(pattern: str) -> None:
    _, is_shown, examples = WORDS[pattern].rpartition(": ")
    for example in re.split(", | or ", examples) if is_shown else ():
        assert re.search(pattern, example), example


def test_choices_are_listed() -> None:
    assert words_of(r"^(tcp|udp|icmp)\Z") == "one of tcp, udp, icmp"
    assert words_of(r"^(tiny)?\Z") == "tiny"


@pytest.mark.parametrize("pattern", [r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?\Z", r"^a'b\Z", r'^a"b\Z'])
def test_a_decoders_complaint_shows_no_pattern(pattern: str) -> None:
    wanted = Annotated[str, msgspec.Meta(pattern=pattern)]
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"a": ["_"]}, dict[str, list[wanted]])
    text = reworded(str(caught.value))
    assert "regex" not in text
    assert "\\Z" not in text
    assert text.endswith("- at `$[...][0]`")


def test_a_manifest_is_refused_in_words() -> None:
    document = {
        "apiVersion": "compute.chv.dev/v1alpha1",
        "kind": "VirtualMachine",
        "metadata": {"name": "web"},
        "spec": {"interfaces": [{"name": "Eth_0", "network": "net"}]},
    }
    with pytest.raises(InvalidArgument) as caught:
        parse(document)
    error = caught.value
    assert error.field == "spec.interfaces[0].name"
    assert "lower-case letters" in error.hint
    assert "regex" not in f"{error.message} {error.hint}"
