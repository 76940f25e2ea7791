"""What a test may change about the double: one JSON object in the environment variable CHV_DOUBLE.

A key that is not known ends the process: a misspelt switch must not make a test pass.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Switches:
    version: str = "53.0.0"
    connect_s: float = 60.0  # how long a vhost-user back end is waited for
    nested_state: bool = True  # False: a KVM on which a snapshot fails
    guest_debug: bool = False  # built with core dumps
    slow: dict[str, float] = field(
        default_factory=dict
    )  # {"vm.pause": seconds}, one call at a time
    crash: dict[str, int] = field(default_factory=dict)  # {"vm.boot": signal} in place of an answer
    migration_s: float = 0.02  # how long a guest is under way
    kvm: bool = True  # False: no /dev/kvm that opens

    @property
    def major(self) -> int:
        return int(self.version.split(".", 1)[0])


def switches() -> Switches:
    """Read the environment; raises on what is not understood."""
    return Switches(**json.loads(os.environ.get("CHV_DOUBLE", "{}")))


def backtraces() -> bool:
    """Tell whether errors carry backtraces, as the real program's do."""
    return os.environ.get("RUST_BACKTRACE", "0") != "0"
