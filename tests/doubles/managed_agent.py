"""The agent's engine with a control plane by RPC and a store on disk, in a process to be killed.

`python -m tests.doubles.managed_agent PLANE_SOCKET DATABASE [hold]`: over a simulated machine that
ends with the process. `hold`: no answer to a report of an outcome ever reaches the agent.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import anyio

from chv.agent.engine import Engine
from chv.agent.store_sqlite import open_store
from chv.common.wire.upstream import Report
from tests.doubles.control_plane import RpcUpstream
from tests.sim.chaos import Chaos
from tests.sim.world import Machine


class Holding(RpcUpstream):
    """Outcomes arrive; that they did is never known."""

    async def report(self, reports: tuple[Report, ...]) -> None:
        await super().report(reports)
        if any(report.operation is not None for report in reports):
            await anyio.sleep_forever()


async def _run(socket: Path, database: Path, *, hold: bool) -> None:
    machine = Machine(1, Chaos(random.Random(1), delays_s=(0.0,)))
    machine.chaos.quiet = True
    upstream = Holding(socket) if hold else RpcUpstream(socket)
    machine.upstream = lambda chaos: upstream
    async with open_store(database) as store:
        engine = Engine(store, machine.world())
        await engine.load()
        await engine.recover()
        await engine.run()


if __name__ == "__main__":
    anyio.run(lambda: _run(Path(sys.argv[1]), Path(sys.argv[2]), hold="hold" in sys.argv))
