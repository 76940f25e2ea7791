"""Fixtures that every test may use."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Asyncio alone: aiosqlite, pyroute2 and qemu.qmp do not run on another backend."""
    return "asyncio"
