"""The monitor client against a storage daemon that dies while it connects."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream
from qemu.qmp import QMPClient

from chv.common.errors import Unavailable
from chv.stord.qsd.monitor import open_monitor
from chv.vmm.qemu.qmp import Monitor


async def hang_up(stream: SocketStream) -> None:
    await stream.aclose()


async def test_a_daemon_that_dies_while_it_greets_leaves_no_line_of_the_library(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(client: QMPClient) -> None:
        """The library meets a reset while it cleans up, which it logs with a traceback."""
        await tidy(client)
        raise ConnectionResetError("reset by peer")

    tidy = QMPClient.disconnect
    path = tmp_path / "qmp.sock"
    listener = await anyio.create_unix_listener(path)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, hang_up)
        with monkeypatch.context() as patch:
            patch.setattr(QMPClient, "disconnect", fails)
            with pytest.raises(Unavailable, match="went away"):
                async with open_monitor(path, os.getuid()):
                    pass
        with pytest.raises(Unavailable):
            await Monitor(path).ask("query-status")
        tasks.cancel_scope.cancel()
    assert not caplog.records


async def test_an_event_for_the_client_before_is_not_the_end(tmp_path: Path) -> None:
    greeting: dict[str, Any] = {"QMP": {"version": {}, "capabilities": []}}
    stale = {"event": "JOB_STATUS_CHANGE", "data": {}, "timestamp": {"seconds": 1}}
    clients = 0

    async def serve(stream: SocketStream) -> None:
        nonlocal clients
        clients += 1
        words = [greeting, stale] if clients == 1 else [greeting]
        async with stream:
            await stream.send(b"".join(json.dumps(each).encode() + b"\n" for each in words))
            with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while True:
                    asked = json.loads(await stream.receive())
                    answer = {"return": {}, "id": asked["id"]} if "id" in asked else {"return": {}}
                    await stream.send(json.dumps(answer).encode() + b"\n")

    path = tmp_path / "qmp.sock"
    listener = await anyio.create_unix_listener(path)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        async with open_monitor(path, os.getuid()) as monitor:
            await monitor.ping()
        tasks.cancel_scope.cancel()
    assert clients == 2
