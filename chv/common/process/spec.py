"""What to start, as data: `Program` for every process, `SpawnSpec` for a detached worker.

Pure but for `resolve`, which looks the executable up in PATH. `check` raises InvalidArgument
before anything is opened or forked.
"""

from __future__ import annotations

import errno
import os
import shutil

import msgspec

from chv.common.errors import (
    ChvError,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
)
from chv.common.process import procfs, syscalls
from chv.common.process.landlock import PathAccess

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FD_TARGET_MAX = 255
ARGV_MAX = 4096
UID_MAX = 2**32 - 2


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A program and the whole context it starts in; nothing else is inherited.

    `environment` comes on top of PATH, LANG=C.UTF-8 and HOME=/. `fds` maps the number in the new
    process to a descriptor of ours. `executable` overrides argv[0] as the file to run. For uid 0
    an empty `keep_capabilities` means: all that the spawner has; for others: none.
    `empty_netns`: a network namespace of its own with nothing in it. `landlock`: the only paths
    that it may open, where the kernel can hold it to that (`landlock.abi`); empty: not restricted.
    `own_devices`: character devices that are root's alone, of which the program gets nodes of its
    own group, in a mount namespace of its own; the host's nodes stay as they are.
    """

    argv: tuple[str, ...]
    executable: str = ""
    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()
    environment: dict[str, str] = {}
    cwd: str = "/"
    umask: int = 0o077
    log_path: str = ""
    fds: dict[int, int] = {}
    netns: str = ""
    no_new_privs: bool = True
    keep_capabilities: tuple[str, ...] = ()
    oom_score_adj: int = 0
    empty_netns: bool = False
    landlock: tuple[PathAccess, ...] = ()
    own_devices: tuple[str, ...] = ()


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of a worker's cgroup; 0: none. They take effect where the provider has the controller.

    `cpus_max`: the CPU time of so many CPUs. `cpu_weight`: its share where CPU time is short.
    """

    memory_max_bytes: int = 0
    cpus_max: int = 0
    cpu_weight: int = 0
    pids_max: int = 0


class SpawnSpec(Program, frozen=True, kw_only=True):
    """A worker that outlives us. One argv element must carry `worker_id`, standing alone in it.

    A program with no option that could hold the id takes it as argv[0], with `executable` set;
    not so a script, whose interpreter replaces argv[0]. No wrappers that exec something else:
    the record holds the executable as it is right after the start. The leaf in `cgroup` gets the
    nonce of the worker id appended, so a leaf never serves two incarnations.
    """

    worker_id: str
    cgroup: str = ""
    limits: Limits = Limits()


def check_spawn(spec: SpawnSpec) -> None:
    """Refuse a worker that could not be found again."""
    if not procfs.is_worker_id(spec.worker_id):
        raise InvalidArgument(
            f"{spec.worker_id!r} is not a worker id",
            field="worker_id",
            hint="chv:<instance>:<kind>:<short>:<nonce>",
        )
    if procfs.worker_ids(spec.argv) != [spec.worker_id]:
        raise InvalidArgument(
            f"the argv of {program_name(spec)} does not carry {spec.worker_id} exactly once",
            field="argv",
        )
    if "/" in spec.cgroup or spec.cgroup.startswith("."):
        raise InvalidArgument(f"{spec.cgroup!r} is not a cgroup leaf name", field="cgroup")
    check(spec)


def check(program: Program) -> None:
    """Refuse what the kernel would misread or what would weaken the new process."""
    if not program.argv or len(program.argv) > ARGV_MAX:
        raise InvalidArgument(f"argv has {len(program.argv)} elements", field="argv")
    texts = (*program.argv, *program.environment, *program.environment.values())
    if any("\0" in text for text in texts):
        raise InvalidArgument("a NUL byte in argv or environment", field="argv")
    if any("=" in name or not name for name in program.environment):
        raise InvalidArgument("an empty name or one with '='", field="environment")
    if any(not 0 <= target <= FD_TARGET_MAX for target in program.fds):
        raise InvalidArgument(f"descriptor numbers go from 0 to {FD_TARGET_MAX}", field="fds")
    _check_identity(program)


def _check_identity(program: Program) -> None:
    numbers = (program.uid, program.gid, *program.groups)
    if any(not 0 <= number <= UID_MAX for number in numbers):
        raise InvalidArgument(f"{numbers} are not uid, gid and groups", field="uid")
    if program.uid and (program.gid == 0 or 0 in program.groups):
        raise InvalidArgument(
            f"uid {program.uid} would keep group 0", field="gid", hint="give it a gid of its own"
        )
    unknown = set(program.keep_capabilities) - set(syscalls.CAPABILITIES)
    if unknown:
        raise InvalidArgument(f"{sorted(unknown)} are no capabilities", field="keep_capabilities")
    if program.netns and program.empty_netns:
        raise InvalidArgument("one namespace or an empty one, not both", field="empty_netns")
    if program.landlock and not program.no_new_privs:
        raise InvalidArgument("Landlock needs no_new_privs", field="landlock")
    if program.netns and not program.netns.startswith("/"):
        raise InvalidArgument(f"{program.netns!r} is not an absolute path", field="netns")


def program_name(program: Program) -> str:
    """Return the name to show: no directory, no arguments, for those may be private."""
    source = program.executable or (program.argv[0] if program.argv else "")
    return source.rpartition("/")[2]


def search_path() -> str:
    """Return the PATH that programs are looked up in and get."""
    return os.environ.get("PATH") or DEFAULT_PATH


def whole_environment(program: Program) -> dict[str, str]:
    """Return the environment of the new process."""
    base = {"PATH": search_path(), "LANG": "C.UTF-8", "HOME": "/"}
    return base | program.environment


def resolve(program: Program) -> str:
    """Return the absolute path of the executable; NotFound names the one that is missing."""
    name = program.executable or program.argv[0]
    path = program.environment.get("PATH", search_path())
    if "/" in name:
        if not name.startswith("/"):
            raise InvalidArgument(f"{name!r} is a relative path", field="executable")
        return name
    found = shutil.which(name, path=path)
    if found is None or not found.startswith("/"):
        raise NotFound(f"program {name!r} is not in PATH", hint=f"searched {path}")
    return found


_STAGES: dict[str, tuple[type[ChvError], str]] = {
    "netns": (FailedPrecondition, "the network namespace cannot be entered"),
    "landlock": (FailedPrecondition, "the allowed paths cannot be enforced"),
    "devices": (FailedPrecondition, "no device nodes of its own can be made"),
    "cgroup": (FailedPrecondition, "the cgroup cannot be joined"),
    "directory": (FailedPrecondition, "the working directory cannot be entered"),
}
_ERRNOS: dict[int, type[ChvError]] = {
    errno.ENOENT: NotFound,
    errno.EACCES: PermissionDenied,
    errno.EPERM: PermissionDenied,
    errno.ENOEXEC: FailedPrecondition,
    errno.E2BIG: InvalidArgument,
    errno.EINVAL: InvalidArgument,
    errno.ENOMEM: ResourceExhausted,
    errno.EAGAIN: ResourceExhausted,
    errno.EMFILE: ResourceExhausted,
    errno.ENFILE: ResourceExhausted,
    errno.ENOSPC: ResourceExhausted,
}


def start_error(program: Program, stage: str, number: int) -> ChvError:
    """Return the typed error of a start that failed at `stage` with errno `number`."""
    by_stage, detail = _STAGES.get(stage, (Internal, f"failed at {stage}"))
    error = _ERRNOS.get(number, by_stage) if stage in ("exec", "fork", "open") else by_stage
    if stage not in _STAGES and number in (errno.EPERM, errno.EACCES):
        error = PermissionDenied
    text = os.strerror(number) if number else "unexpected failure"
    name = program.executable or program.argv[0]
    return error(f"cannot start {name!r}: {detail}: {text}")
