"""`chv storage status|jobs|metrics`: the node's storage as a whole."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from chv.cli import connect, output
from chv.cli.tables import condition
from chv.common.pages import whole_blocking
from chv.common.wire import agent
from chv.common.wire.types import Empty


def status(arguments: argparse.Namespace) -> int:
    """Show the storage daemon, what this node can do, and volumes that need somebody."""
    with connect.client(arguments.socket) as client:
        node = client.call(agent.NODE_STATUS, Empty())
        listed = whole_blocking(
            client.call, agent.LIST, agent.ListObjects(kind="Volume"), "items", "ages_s"
        ).items
    volumes = [msgspec.json.decode(item) for item in listed]
    daemon = next((each for each in node.daemons if each.name == "stord"), None)
    if arguments.output:
        shown = {"daemon": daemon, "features": node.features, "volumes": volumes}
        output.document(shown, arguments.output)
        return 0
    if daemon is not None:
        print(f"stord {daemon.state}, pid {daemon.pid}, {daemon.restarts} restarts")
    print()
    features = [
        [each.name, "yes" if each.present else "no", each.detail or "-"] for each in node.features
    ]
    output.table(["FEATURE", "PRESENT", "DETAIL"], features)
    print()
    rows = [
        [
            item["metadata"]["namespace"],
            item["metadata"]["name"],
            (item.get("status") or {}).get("phase", "-"),
            (item.get("status") or {}).get("space", "-"),
            condition(item, "SizeApplied"),
            (item.get("status") or {}).get("progress") or "-",
            (item.get("status") or {}).get("lastError") or _not_ready(item),
        ]
        for item in volumes
    ]
    headers = ["NAMESPACE", "NAME", "PHASE", "SPACE", "SIZE-APPLIED", "PROGRESS", "LAST-ERROR"]
    output.table(headers, rows)
    return 0


def _not_ready(volume: dict[str, Any]) -> str:
    """Return why a volume is not ready; a dash where it is."""
    conditions = (volume.get("status") or {}).get("conditions") or []
    ready = next((each for each in conditions if each["type"] == "Ready"), None)
    return "-" if ready is None or ready["status"] == "True" else ready["message"] or "-"


def jobs(arguments: argparse.Namespace) -> int:
    """List what stord is at, and what has ended, newest first."""
    with connect.client(arguments.socket) as client:
        found = client.call(agent.LIST_JOBS, Empty()).jobs
    if arguments.output:
        output.document(found, arguments.output)
        return 0
    rows = [
        [
            job.job_id,
            job.kind.value,
            job.volume_id,
            job.state.value,
            f"{100 * job.done_bytes // job.total_bytes}%" if job.total_bytes else "-",
            output.age(job.started_at),
            job.error.message if job.error is not None else job.message,
        ]
        for job in found
    ]
    output.table(["ID", "KIND", "VOLUME", "STATE", "DONE", "AGE", "MESSAGE"], rows)
    return 0


def metrics(arguments: argparse.Namespace) -> int:
    """Show what is counted per VM and volume, and what nobody counts."""
    with connect.client(arguments.socket) as client:
        found = client.call(agent.GET_STORAGE_METRICS, Empty())
    if arguments.output:
        output.document(found, arguments.output)
        return 0
    output.table(
        ["VM", "READ-BYTES", "WRITTEN-BYTES", "RESIDENT-BYTES", "PID"],
        [
            [
                vm.vm_id,
                str(vm.read_bytes),
                str(vm.write_bytes),
                str(vm.resident_bytes),
                str(vm.backend_pid),
            ]
            for vm in found.vms
        ],
    )
    print()
    output.table(
        ["VOLUME", "SIZE", "ALLOCATED", "SNAPSHOTS", "LIMITED", "ERRORS", "ATTACHED"],
        [
            [
                each.volume_id,
                str(each.size_bytes),
                str(each.allocated_bytes),
                str(each.snapshots),
                "yes" if each.limited else "no",
                str(each.errors),
                "yes" if each.attached else "no",
            ]
            for each in found.volumes
        ],
    )
    for name, why in found.unsupported.items():
        print(f"\nnot counted: {name}: {why}")
    return 0
