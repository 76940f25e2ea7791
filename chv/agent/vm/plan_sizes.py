"""What of CPUs and memory is changed under a running guest. Pure.

Within the maxima that the VMM was started with: any number of CPUs, and more memory in whole
steps. The rest is left to the next start, and `pending` says so.
"""

from __future__ import annotations

from chv.agent.vm.model import DesiredVm, ObservedWorker
from chv.agent.vm.steps import SetCpusStep, SetMemoryStep, Step
from chv.common.wire.manifest_rules import MEMORY_STEP_BYTES
from chv.vmm.driver import VmmState


def resize(desired: DesiredVm, worker: ObservedWorker) -> list[Step]:
    """Return what brings a running VM to the sizes that are wanted, as far as it can go."""
    if worker.state is not VmmState.RUNNING or not worker.booted:
        return []
    steps: list[Step] = []
    if desired.cpus != worker.cpus and desired.cpus <= worker.cpus_max:
        steps.append(SetCpusStep(desired.cpus))
    if can_grow(worker.memory_bytes, desired.memory_bytes, worker.memory_max_bytes):
        steps.append(SetMemoryStep(desired.memory_bytes))
    return steps


def can_grow(from_bytes: int, to_bytes: int, max_bytes: int) -> bool:
    """Tell whether memory can grow so without a restart."""
    more_bytes = to_bytes - from_bytes
    return more_bytes > 0 and to_bytes <= max_bytes and more_bytes % MEMORY_STEP_BYTES == 0
