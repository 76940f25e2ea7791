"""Jobs inside a storage daemon: look, go on, end. They do not survive it.

Every job of a volume is named `<word>-<short uid>`, so that whoever takes the volume's nodes away
finds them; a job keeps its nodes. All are started with auto-dismiss=false: a job that has ended
stays to be seen until it is dismissed. Errors are those of the monitor.
"""

from __future__ import annotations

from typing import Any, cast

import anyio
import msgspec

from chv.common.errors import ChvError, DeadlineExceeded, Internal, ResourceExhausted
from chv.common.ids import short_uid
from chv.stord.qsd import graph
from chv.stord.qsd.monitor import CALL_TIMEOUT_S, Monitor

RUNNING, READY, PENDING, CONCLUDED = "running", "ready", "pending", "concluded"
QUERY_PAUSE_S = 0.005
CANCEL_TIMEOUT_S = 5.0


class BlockJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job as QEMU shows it; `error` is empty unless it has failed."""

    name: str
    status: str
    done: int = 0
    total: int = 0
    error: str = ""


def job_name(word: str, volume_id: str) -> str:
    """Return the name of a volume's job."""
    return f"{word}-{short_uid(volume_id)}"


async def find_all(monitor: Monitor, *, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, BlockJob]:
    """Return every job by its name."""
    rows = cast(list[dict[str, Any]], await monitor.call("query-jobs", timeout_s=timeout_s))
    return {row["id"]: _job(row) for row in rows}


def _job(row: dict[str, Any]) -> BlockJob:
    return BlockJob(
        name=row["id"],
        status=row["status"],
        done=row["current-progress"],
        total=row["total-progress"],
        error=row.get("error", ""),
    )


async def find(monitor: Monitor, name: str) -> BlockJob | None:
    """Return one job."""
    return (await find_all(monitor)).get(name)


async def settled(monitor: Monitor, name: str, timeout_s: float, *within: str) -> BlockJob | None:
    """Return the job as soon as its status is one of `within`, or how it is at the end."""
    job = await find(monitor, name)
    with anyio.move_on_after(timeout_s):
        while job is not None and job.status not in (*within, CONCLUDED):
            await anyio.sleep(QUERY_PAUSE_S)
            job = await find(monitor, name)
    return job


async def complete(monitor: Monitor, name: str) -> None:
    """Let a ready job come to its end."""
    await monitor.call("job-complete", {"id": name})


async def finalize(monitor: Monitor, name: str) -> None:
    """Let a pending job change the graph."""
    await monitor.call("job-finalize", {"id": name})


async def dismiss(monitor: Monitor, name: str) -> None:
    """Forget a concluded job."""
    await monitor.call("job-dismiss", {"id": name})


async def cancel(monitor: Monitor, name: str) -> BlockJob | None:
    """End a job without its effect and dismiss it; return how it ended.

    One that has concluded before keeps what it did: no error then.
    """
    job = await find(monitor, name)
    if job is None:
        return None
    if job.status != CONCLUDED:
        await _ask_to_end(monitor, name)
        job = await settled(monitor, name, CANCEL_TIMEOUT_S)
    if job is None:
        return None
    if job.status != CONCLUDED:
        raise DeadlineExceeded(f"job {name} did not end within {CANCEL_TIMEOUT_S} s")
    await dismiss(monitor, name)
    return job


async def _ask_to_end(monitor: Monitor, name: str) -> None:
    """Have a job cancelled; one that came to its end before it was asked refuses that."""
    try:
        await monitor.call("job-cancel", {"id": name})
        return
    except ChvError as error:
        refusal = error
    job = await find(monitor, name)
    if job is not None and job.status != CONCLUDED:
        raise refusal


async def cancel_of(monitor: Monitor, volume_id: str) -> None:
    """End every job of a volume: its nodes are free then."""
    for name in await find_all(monitor):
        if graph.is_of(name, volume_id):
            await cancel(monitor, name)


async def commit(monitor: Monitor, volume_id: str, layers: tuple[int, int], name: str) -> None:
    """Begin to merge layer `layers[0]` into `layers[1]`, which lies somewhere below it.

    Only for the layer that is written the graph waits for `finalize`: until then nothing is
    written to it while the job is pending.
    """
    top, base = layers
    active = await is_on_top(monitor, volume_id, top)
    await monitor.call(
        "block-commit",
        {
            "job-id": name,
            "device": graph.throttle_node(volume_id),
            "top-node": graph.format_node(volume_id, top),
            "base-node": graph.format_node(volume_id, base),
            "auto-dismiss": False,
            "auto-finalize": not active,
        },
    )


async def is_on_top(monitor: Monitor, volume_id: str, number: int) -> bool:
    """Tell whether the throttle filter lies directly on this layer."""
    return graph.format_node(volume_id, number) in await children(
        monitor, graph.throttle_node(volume_id)
    )


async def set_speed(monitor: Monitor, name: str, bps: int) -> None:
    """Say how many bytes a second a job may copy; 0: as many as it can. One that ended does not."""
    failure: ChvError | None = None
    try:
        await monitor.call("block-job-set-speed", {"device": name, "speed": bps})
    except ChvError as error:
        failure = error
    if failure is not None:
        job = await find(monitor, name)
        if job is None or job.status != CONCLUDED:
            raise failure


async def size_bytes(monitor: Monitor, name: str) -> int:
    """Return how large a node is: what a guest sees of the disk."""
    answer = await monitor.call("query-named-block-nodes", {"flat": True})
    nodes = cast(list[dict[str, Any]], answer)
    return next(int(node["image"]["virtual-size"]) for node in nodes if node["node-name"] == name)


async def children(monitor: Monitor, name: str) -> list[str]:
    """Return the names of the nodes directly below one."""
    answer = cast(dict[str, Any], await monitor.call("x-debug-query-block-graph"))
    names = {node["id"]: node["name"] for node in answer["nodes"]}
    parents = {number for number, each in names.items() if each == name}
    return [names[edge["child"]] for edge in answer["edges"] if edge["parent"] in parents]


def failure(job: BlockJob, volume_id: str) -> ChvError:
    """Return our error for a job that failed."""
    text = f"{job.name}: {job.error}"
    if "No space left" in job.error or "quota" in job.error:
        return ResourceExhausted(
            f"no space for the volume's layers: {text}", resource=volume_id, hint="free space"
        )
    return Internal(f"the storage daemon's job failed: {text}", resource=volume_id)
