"""`@simulated`: an async test that runs in virtual time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from chv.common import virtual_time


def simulated(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run the test on a virtual loop; hours pass in milliseconds."""

    def run(**arguments: Any) -> None:
        virtual_time.run(functools.partial(test, **arguments))

    functools.update_wrapper(run, test)
    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    delattr(run, "__wrapped__")  # it must not look like a coroutine function
    return run
