"""What a running VM was started with, against what its spec says by now. Pure.

These fields reach a guest only when a VMM starts: until then the spec is a promise, and the
status says so. All other fields are either taken up at once or refused while the VM runs.
"""

from __future__ import annotations

from chv.agent.records import WorkerRow
from chv.agent.vm.config import memory_max_bytes
from chv.common.names import shown
from chv.common.quantity import parse_bytes
from chv.common.wire.resources import CloudInitSpec, VirtualMachineSpec

MIB = 1 << 20


def pending_changes(row: WorkerRow | None, spec: VirtualMachineSpec) -> dict[str, str]:
    """Return the fields that take effect at the next start only, each with what it is about."""
    if row is None:
        return {}
    found = {}
    if row.config.cpus != spec.cpus:
        found["cpus"] = f"{row.config.cpus} run, {spec.cpus} wanted"
    if row.config.memory_bytes != parse_bytes(spec.memory, field="spec.memory"):
        found["memory"] = f"{running_memory(row)} runs, {spec.memory} wanted"
    if row.config.cpus_max != spec.max_cpus:
        found["maxCpus"] = f"{row.config.cpus_max} runs, {spec.max_cpus} wanted"
    if row.config.memory_max_bytes != memory_max_bytes(spec):
        found["maxMemory"] = (
            f"{row.config.memory_max_bytes >> 20}Mi runs, {spec.max_memory or 'none'} wanted"
        )
    started = row.spec
    if started is None:  # recorded before specs were
        return found
    if started.boot.cmdline != spec.boot.cmdline:
        was, now = shown(started.boot.cmdline), shown(spec.boot.cmdline)
        found["boot.cmdline"] = f"{was} runs, {now} wanted"
    for name in changed_parts(started.cloud_init, spec.cloud_init):
        found[f"cloudInit.{name}"] = "changed"
    return found


def changed_parts(started: CloudInitSpec, wanted: CloudInitSpec) -> list[str]:
    """Return the names of what differs; the values can be long, and are not for a status."""
    pairs = {
        "hostname": (started.hostname, wanted.hostname),
        "sshAuthorizedKeys": (started.ssh_authorized_keys, wanted.ssh_authorized_keys),
        "userData": (started.user_data, wanted.user_data),
    }
    return [name for name, (was, now) in pairs.items() if was != now]


def running_memory(row: WorkerRow) -> str:
    """Return the memory of the running VMM, as its spec had it."""
    if row.spec is not None:
        return row.spec.memory
    whole, rest = divmod(row.config.memory_bytes, MIB)
    return f"{whole}Mi" if not rest else str(row.config.memory_bytes)
