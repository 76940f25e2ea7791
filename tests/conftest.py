"""Fixtures that every test may use."""

from __future__ import annotations

import pytest

from tests.leftovers import sweep


def pytest_sessionstart(session: pytest.Session) -> None:
    """Clear away what a killed run has left; the workers of a run leave that to its head."""
    if not hasattr(session.config, "workerinput"):
        for directory in sweep():
            print(f"removed what a killed run had left: {directory}")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Asyncio alone: aiosqlite and qemu.qmp do not run on another backend."""
    return "asyncio"
