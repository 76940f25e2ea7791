"""Whether a recorded worker still runs; one that is about to end gets a moment to do so."""

from __future__ import annotations

import anyio

from chv.common.errors import Unavailable
from chv.common.process import AdoptVerdict, Provider, WorkerRecord, wait_gone

EXIT_WAIT_S = 1.0


async def is_alive(provider: Provider, worker: WorkerRecord, vm_id: str, what: str) -> bool:
    """Judge the record; Unavailable where that is not possible."""
    adoption = provider.adopt(worker)
    if adoption.verdict is AdoptVerdict.UNKNOWN:
        with anyio.move_on_after(EXIT_WAIT_S):
            await wait_gone(worker)
        adoption = provider.adopt(worker)
    if adoption.verdict is AdoptVerdict.UNKNOWN:
        raise Unavailable(
            f"cannot tell whether {what} still runs: {adoption.reason}", resource=vm_id
        )
    return adoption.verdict is AdoptVerdict.ALIVE
