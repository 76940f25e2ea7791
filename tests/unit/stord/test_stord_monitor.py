"""The monitor client against a storage daemon that dies while it connects."""

from __future__ import annotations

import os
from pathlib import Path

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
