"""What the VMM counts, and a dump of the guest's memory.

A disk that has not been read or written yet reports all-ones as its lowest and highest latency
and a tenth of that as the average: what was never measured is left out. A vhost-user disk is
counted by its back end, not here.
"""

from __future__ import annotations

from pathlib import Path

from chv.common.errors import FailedPrecondition
from chv.vmm.cloud_hypervisor import api, spec
from chv.vmm.cloud_hypervisor.machine import Machine, require
from chv.vmm.driver import Counters, VmmState

UNSIGNED_MAX = 2**64 - 1
NEVER = frozenset({UNSIGNED_MAX, UNSIGNED_MAX // 10, UNSIGNED_MAX // 10_000})


async def counters(machine: Machine) -> Counters:
    """Return the counters of disks and NICs by their own ids."""
    allowed = (VmmState.RUNNING, VmmState.PAUSED, VmmState.PANICKED)
    require("counters", (await machine.look()).state, *allowed)
    return known(await machine.api.counters())


def known(counted: Counters) -> Counters:
    """Return what was really counted, without the VMM's own devices."""
    result: Counters = {}
    for device, values in counted.items():
        for prefix in (spec.DISK_PREFIX, spec.NIC_PREFIX):
            if device.startswith(prefix):
                result[device.removeprefix(prefix)] = _measured(values)
    return result


def _measured(values: dict[str, int]) -> dict[str, int]:
    return {
        name: value & UNSIGNED_MAX
        for name, value in values.items()
        if value & UNSIGNED_MAX not in NEVER and not _unmeasured(name, values)
    }


def _unmeasured(name: str, values: dict[str, int]) -> bool:
    kind, latency, _ = name.partition("_latency_")
    return bool(latency) and values.get(f"{kind}_ops") == 0


async def core_dump(machine: Machine, path: Path) -> None:
    """Write an ELF core to a file that does not exist yet."""
    allowed = (VmmState.RUNNING, VmmState.PAUSED, VmmState.PANICKED)
    require("core dump", (await machine.look()).state, *allowed)
    if path.exists():
        raise FailedPrecondition(f"{path} exists already", field="path")
    body = {"destination_url": f"file://{path}"}
    await machine.api.put("vm.coredump", body, limit_s=api.SAVE_S_MAX)
