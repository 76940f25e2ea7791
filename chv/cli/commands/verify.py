"""`chv verify`: boots the probe guest on the real VMM, storage and network, and says what holds."""

from __future__ import annotations

import argparse
import signal
import sys

import anyio
import msgspec

from chv.cli import connect, manifests
from chv.common.errors import InvalidArgument, Unavailable
from chv.host.verify import Check, Report
from chv.host.verify_host import verify_host
from chv.host.verify_node import Asked, Subject, verify_node

EXIT_FAILED = 6
EXIT_INTERRUPTED = 130


def verify(arguments: argparse.Namespace) -> int:
    """Verify, and print each check as it comes; exit code 0 only where all of them hold."""
    subject = _subject(arguments)
    report = anyio.run(_until_signal, arguments, subject)
    if report is None:
        print("chv: interrupted; what was made is removed", file=sys.stderr)
        return EXIT_INTERRUPTED
    if arguments.json:
        print(msgspec.json.encode(report).decode())
    else:
        bad = [check.id for check in report.checks if not check.ok]
        words = f"failed: {', '.join(bad)}" if bad else f"all {len(report.checks)} checks hold"
        print(f"{report.vmm or 'no VMM'}: {words}")
    return 0 if report.ok else EXIT_FAILED


def _subject(arguments: argparse.Namespace) -> Subject:
    if arguments.file:
        if arguments.kind:
            raise InvalidArgument("either -f FILE or a kind and a name, not both", field="-f")
        return Subject("file", documents=tuple(manifests.load(arguments.file)))
    kind = arguments.kind or "node"
    if (kind == "node") is not (arguments.name is None):
        wanted = "no name" if kind == "node" else "a name"
        raise InvalidArgument(f"`chv verify {kind}` takes {wanted}", field="NAME")
    return Subject(kind, arguments.name or "", arguments.namespace)


async def _verified(arguments: argparse.Namespace, subject: Subject, asked: Asked) -> Report:
    try:
        socket = connect.find_socket(arguments.socket)
    except Unavailable:
        if subject.kind != "node":
            raise
        with asked.scope:
            return await verify_host(asked.vmm, asked.on_check)
        return Report(ok=False, vmm="", checks=[])  # interrupted
    return await verify_node(socket, subject, asked)


async def _until_signal(arguments: argparse.Namespace, subject: Subject) -> Report | None:
    """Return the report; None where SIGINT or SIGTERM ended the run, cleaned up."""
    on_check = _no_print if arguments.json else _print
    asked = Asked(arguments.vmm, connect.requester(), on_check)
    report: Report | None = None
    failure: Exception | None = None

    async def watch() -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                asked.scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            report = await _verified(arguments, subject, asked)
        except Exception as error:  # noqa: BLE001  raised below: here it would become a group
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return None if asked.scope.cancel_called else report


def _no_print(check: Check) -> None:
    del check


def _print(check: Check) -> None:
    print(f"{'ok' if check.ok else 'FAILED':7}{check.id:16}{check.ms:8.0f} ms  {check.message}")
    sys.stdout.flush()
