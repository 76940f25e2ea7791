"""`chv fit`."""

from __future__ import annotations

import argparse

from chv.cli import connect, manifests, output
from chv.cli.fit_grammar import EXAMPLE, groups_of, parse_group
from chv.cli.sizes import about
from chv.common.errors import InvalidArgument, ResourceExhausted
from chv.common.wire.agent_inventory import (
    COUNT_MAX,
    FIT_VMS,
    FitGroup,
    FitNeed,
    FitReply,
    FitResult,
    FitVms,
)
from chv.common.wire.manifest import parse


def fit(arguments: argparse.Namespace) -> int:
    """Say how many fit; exit code 8 where not all do."""
    groups = _groups(arguments)
    with connect.client(arguments.socket) as client:
        reply = client.call(FIT_VMS, FitVms(groups=groups, namespace=arguments.namespace))
    if arguments.json:
        output.document(reply, "json")
    else:
        _show(groups, reply)
    whole = all(each.fits == each.asked for each in reply.groups)
    return 0 if whole else ResourceExhausted.exit_code


def _groups(arguments: argparse.Namespace) -> list[FitGroup]:
    if bool(arguments.vms) is bool(arguments.vm):
        raise InvalidArgument("VMs or a file with one is wanted", field="VMS", hint=EXAMPLE)
    if arguments.vms:
        return [parse_group(text) for text in arguments.vms]
    if not 1 <= arguments.count <= COUNT_MAX:
        raise InvalidArgument(
            f"{arguments.count} is not a number of VMs",
            field="--count",
            hint=f"from 1 to {COUNT_MAX}",
        )
    raws = manifests.raw(manifests.load([arguments.vm]))
    return groups_of([parse(raw) for raw in raws], arguments.count)


def _show(groups: list[FitGroup], reply: FitReply) -> None:
    for group, result in zip(groups, reply.groups, strict=True):
        kind = f"{group.cpus} vCPUs, {about(group.memory_bytes)}"
        print(f"{result.fits} of {result.asked} fit ({kind}){_binding(result)}")
        output.table(
            ["RESOURCE", "EACH", "LEFT", "FITS", "LACKING"],
            [_row(need, result.lacking.get(need.resource, 0)) for need in result.needs],
        )
        print()
    for resource, reason in reply.unlimited.items():
        print(f"no limit on {resource}: {reason}")


def _binding(result: FitResult) -> str:
    return f"; {result.binds} binds first" if result.binds else "; nothing is limited"


def _row(need: FitNeed, lacking: int) -> list[str]:
    numbers = (need.per_vm, need.left)
    each, left = (about(n) if need.is_size else str(n) for n in numbers)
    short = about(lacking) if need.is_size else str(lacking)
    return [need.resource, each, left, str(need.fits), short if lacking else "-"]
