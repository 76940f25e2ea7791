"""What the process tests share: a provider of an instance of its own, cleaned up for certain."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import (
    CgroupProvider,
    PlainProvider,
    Provider,
    SpawnSpec,
    WorkerRecord,
    wait_gone,
)
from chv.common.process.providers import find_hierarchy

SLEEP = "/usr/bin/sleep"


def new_layout() -> Layout:
    return Layout(Ids().instance())


@asynccontextmanager
async def open_provider(kind: str) -> AsyncIterator[Provider]:
    layout = new_layout()
    hierarchy = find_hierarchy()
    provider: Provider = PlainProvider(layout)
    if kind == "cgroup" and hierarchy is not None:
        provider = CgroupProvider(layout, hierarchy)
    try:
        yield provider
    finally:
        with anyio.fail_after(10, shield=True):
            await end_all(provider)


async def end_all(provider: Provider) -> None:
    for found in provider.find(provider.layout.worker_prefix):
        await provider.kill(found.record(), signal.SIGKILL)
        await wait_gone(found.record())
        await provider.cleanup(found.record())
    await provider.retire()


def worker_id(layout: Layout) -> str:
    ids = Ids()
    return layout.worker_id("test", ids.uid(), ids.nonce())


def sleeper(layout: Layout, **context: object) -> SpawnSpec:
    identifier = worker_id(layout)
    arguments = {"argv": (identifier, "1000"), "executable": SLEEP, "worker_id": identifier}
    return SpawnSpec(**(arguments | context))  # type: ignore[arg-type]


def python_worker(layout: Layout, code: str, **context: object) -> SpawnSpec:
    identifier = worker_id(layout)
    argv = ("/usr/bin/python3", "-IS", "-c", code, identifier)
    return SpawnSpec(**({"argv": argv, "worker_id": identifier} | context))  # type: ignore[arg-type]


def status_of(record: WorkerRecord) -> dict[str, str]:
    lines = Path(f"/proc/{record.pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def environment_of(record: WorkerRecord) -> dict[str, str]:
    pairs = Path(f"/proc/{record.pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if pair)


def descriptors_of(pid: int) -> dict[int, str]:
    return {
        int(entry.name): os.readlink(entry)  # noqa: PTH115
        for entry in Path(f"/proc/{pid}/fd").iterdir()
        if os.path.lexists(entry)
    }


def children_of(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
