"""The tasks of the metrics: the servers that answer scrapes, and the samples behind them."""

from __future__ import annotations

from pathlib import Path

import anyio
from anyio.abc import TaskStatus

from chv.agent.metrics import Metrics
from chv.agent.metrics_server import MetricsServer
from chv.common.config_metrics import tcp_address


async def serve_metrics(
    metrics: Metrics, path: Path, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    """Serve on the socket at `path`, and over TCP where that is configured; until cancelled."""
    address = tcp_address(metrics.config.metrics.listen)
    async with anyio.create_task_group() as tasks:
        await tasks.start(MetricsServer(metrics.text).serve, path)
        tasks.start_soon(metrics.sampler.run)
        if address is not None:  # apart: who scrapes over TCP takes no place on the socket
            tasks.start_soon(MetricsServer(metrics.text).serve_tcp, address)
        task_status.started()
