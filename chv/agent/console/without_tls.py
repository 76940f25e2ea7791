"""The event loop without TLS: OpenSSL is a quarter of what the holder would take in memory.

asyncio does without `ssl`; anyio names its classes at import and uses none of them on a Unix
socket. Afterwards an import of `ssl` fails, so that nothing can go on with the stand-in.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


class _StandIn(ModuleType):
    """Has every name, each an exception class that nobody raises."""

    def __getattr__(self, name: str) -> type[Exception]:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


def import_event_loop() -> None:
    """Import asyncio and anyio with `ssl` absent; for a process that has imported neither."""
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
    modules["ssl"] = None
    importlib.import_module("asyncio")
    modules["ssl"] = _StandIn("ssl")
    importlib.import_module("anyio._backends._asyncio")
    modules["ssl"] = None
