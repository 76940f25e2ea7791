"""`chv history`, `chv diff`, `chv rollback`."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from chv.cli import connect, operations, output
from chv.cli.commands.objects import kind_of
from chv.common.errors import InvalidArgument
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire import agent_history as wire

EXIT_DIFFERENT = 1


def target(text: str) -> tuple[str, str, int]:
    """Return kind, name and generation of KIND/NAME[@N]; 0 where none is named."""
    head, at, number = text.partition("@")
    kind, _, name = head.partition("/")
    if not name or (at and not (number.isascii() and number.isdigit() and int(number))):
        raise InvalidArgument(
            f"{text!r} is not KIND/NAME or KIND/NAME@GENERATION", hint="for instance vm/web@3"
        )
    return kind_of(kind), name, int(number or 0)


def history(arguments: argparse.Namespace) -> int:
    """List who made each generation, or show one of them as a manifest."""
    kind, name, generation = target(arguments.object)
    with connect.client(arguments.socket) as client:
        if generation:
            found = _generation(client, arguments, (kind, name, generation), arguments.uid)
            output.document(msgspec.json.decode(found.object), arguments.output or "yaml")
            return 0
        request = wire.ListGenerations(
            kind=kind, name=name, namespace=arguments.namespace, uid=arguments.uid
        )
        reply = client.call(wire.LIST_GENERATIONS, request)
    if arguments.output:
        output.document(reply, arguments.output)
    else:
        _table(arguments.object, reply)
    return 0


def _table(title: str, reply: wire.GenerationsReply) -> None:
    rows = [
        [
            str(entry.generation),
            output.age(entry.at),
            entry.requester or "-",
            entry.verb or "-",
            ",".join(entry.changed) or "-",
            entry.reason,
        ]
        for entry in reply.generations
    ]
    output.table(["GENERATION", "AGE", "REQUESTER", "VERB", "CHANGED", "REASON"], rows)
    if reply.deleted:
        output.note(f"{title} is deleted")
    if reply.others:
        output.note(f"others of this name: {', '.join(reply.others)} (--uid)")


def diff(arguments: argparse.Namespace) -> int:
    """Compare two generations; 1 where they differ."""
    first = target(arguments.first)
    second = target(arguments.second or arguments.first.partition("@")[0])
    with connect.client(arguments.socket) as client:
        before = _generation(client, arguments, first)
        after = _generation(client, arguments, second)
    old, new = (_comparable(msgspec.json.decode(each.object)) for each in (before, after))
    if arguments.output:
        output.document(_changes(old, new), arguments.output)
    else:
        _print_unified(arguments, (before, old), (after, new))
    return EXIT_DIFFERENT if old != new else 0


def _generation(
    client: BlockingClient,
    arguments: argparse.Namespace,
    wanted: tuple[str, str, int],
    uid: str = "",
) -> wire.GenerationReply:
    kind, name, generation = wanted
    request = wire.GetGeneration(
        kind=kind, name=name, namespace=arguments.namespace, uid=uid, generation=generation
    )
    return client.call(wire.GET_GENERATION, request)


def _comparable(manifest: dict[str, Any]) -> dict[str, Any]:
    labels = manifest["metadata"].get("labels", {})
    return {"labels": dict(sorted(labels.items())), "spec": manifest["spec"]}


def _print_unified(
    arguments: argparse.Namespace,
    before: tuple[wire.GenerationReply, dict[str, Any]],
    after: tuple[wire.GenerationReply, dict[str, Any]],
) -> None:
    import difflib

    import yaml

    texts, titles = [], []
    names = (arguments.first, arguments.second or arguments.first)
    for name, (reply, document) in zip(names, (before, after), strict=True):
        text = yaml.safe_dump(document, sort_keys=False, default_flow_style=False)
        texts.append(text.splitlines())
        who = f"{reply.generation.at} {reply.generation.requester}".strip()
        titles.append(f"{name.partition('@')[0]}@{reply.generation.generation}\t{who}")
    old, new = texts
    for line in difflib.unified_diff(old, new, titles[0], titles[1], lineterm=""):
        print(line)


def _changes(old: Any, new: Any, path: str = "") -> list[dict[str, Any]]:
    """Return each field that differs; null is what is not there."""
    if old == new:
        return []
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [{"field": path, "from": old, "to": new}]
    found: list[dict[str, Any]] = []
    for name in dict.fromkeys((*old, *new)):
        inner = f"{path}.{name}" if path else name
        found += _changes(old.get(name), new.get(name), inner)
    return found


def rollback(arguments: argparse.Namespace) -> int:
    """Apply an earlier generation as a new one and, unless told otherwise, wait for it."""
    timeout_s = operations.seconds(arguments.timeout)
    kind, name, generation = target(arguments.object)
    if generation:
        raise InvalidArgument(f"{arguments.object!r} is KIND/NAME", hint=f"--to {generation}")
    request = wire.Rollback(
        kind=kind,
        name=name,
        namespace=arguments.namespace,
        to=arguments.to,
        requester=connect.requester(),
        reason=arguments.reason,
        dry_run=arguments.dry_run,
    )
    with connect.client(arguments.socket) as client:
        reply = client.call(wire.ROLLBACK, request)
        if arguments.output:
            output.document(reply.results, arguments.output)
        for result in reply.results:
            if not arguments.output:
                dry = " (dry run)" if arguments.dry_run else ""
                label = operations.label(result.kind, result.name, result.namespace)
                print(f"{label} {result.action}, generation {result.generation}{dry}")
            if result.operation_id and not arguments.no_wait:
                operations.announce(operations.wait(client, result.operation_id, timeout_s))
    return 0
