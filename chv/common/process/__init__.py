"""Everything that forks, signals or waits for a process; no other package does.

Workers outlive us: `choose_provider(layout).spawn(SpawnSpec(...))`, then records, `verify`,
`wait_gone`, `terminate` (the protocol is in `records`). Daemons die with us: `spawn_child`. Helper
commands: `run`. Fails with the typed errors of `chv.common.errors`, and never half: after an
error of a start no process and no cgroup of it is left.
"""

from chv.common.process.child import Child, spawn_child
from chv.common.process.command import CommandFailed, Completed, run
from chv.common.process.landlock import Access, PathAccess
from chv.common.process.landlock import abi as landlock_abi
from chv.common.process.pidfd import send, terminate, wait_gone
from chv.common.process.providers import (
    CgroupProvider,
    PlainProvider,
    Provider,
    choose_provider,
)
from chv.common.process.records import (
    Adoption,
    AdoptVerdict,
    FoundWorker,
    WorkerRecord,
    examine,
    scan,
    verify,
)
from chv.common.process.spec import Limits, Program, SpawnSpec

__all__ = [
    "Access",
    "AdoptVerdict",
    "Adoption",
    "CgroupProvider",
    "Child",
    "CommandFailed",
    "Completed",
    "FoundWorker",
    "Limits",
    "PathAccess",
    "PlainProvider",
    "Program",
    "Provider",
    "SpawnSpec",
    "WorkerRecord",
    "choose_provider",
    "examine",
    "landlock_abi",
    "run",
    "scan",
    "send",
    "spawn_child",
    "terminate",
    "verify",
    "wait_gone",
]
