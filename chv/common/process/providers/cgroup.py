"""Workers in cgroup v2: `<hierarchy>/<instance's cgroup>/<leaf>`, a leaf per incarnation.

The leaf groups a worker with its descendants, so that SIGKILL reaches them all at once, and
limits memory, CPU time and processes where the controllers are available (on a hybrid host they
are not). Only directories below the instance's own are ever written, apart from switching these
controllers on for it. The hierarchy is found in mountinfo: pure v2, hybrid, or a container's part
of one.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import msgspec

from chv.common.errors import FailedPrecondition, InUse
from chv.common.layout import Layout
from chv.common.process import pidfd, records
from chv.common.process.launch import prepared, start_detached
from chv.common.process.providers.plain import make_record, require_dead
from chv.common.process.records import Adoption, FoundWorker, WorkerRecord
from chv.common.process.spec import Limits, SpawnSpec, check_spawn

CONTROLLERS = ("memory", "cpu", "pids")
CPU_PERIOD_US = 100_000
# EBUSY: a container's root has processes of its own; the kernel then gives none. EINVAL: not while
# real-time processes are below. EOPNOTSUPP: not where threads are spread over cgroups.
NOT_GIVEN = (
    *(errno.EBUSY, errno.EINVAL, errno.EOPNOTSUPP),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT),
)
REMOVE_WAIT_S_MAX = 5.0
REMOVE_POLL_S = 0.005
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def find_hierarchy(mountinfo: Path = Path("/proc/self/mountinfo")) -> Path | None:
    """Return the mount point of a writable cgroup v2 hierarchy."""
    for line in mountinfo.read_text().splitlines():
        front, _, back = line.partition(" - ")
        mount, mode = front.split()[4:6]
        if back.split()[0] == "cgroup2" and "rw" in mode.split(","):
            path = Path(mount)
            if os.access(path, os.W_OK) and (path / "cgroup.procs").exists():
                return path
    return None


class CgroupProvider:
    """See `Provider`."""

    name = "cgroup"

    def __init__(self, layout: Layout, hierarchy: Path) -> None:
        self.layout = layout
        self.base = hierarchy / layout.cgroup
        self._hierarchy = hierarchy
        self._starting: set[str] = set()
        self._controllers: frozenset[str] = frozenset()
        self._make_base()

    def _make_base(self) -> None:
        self.base.mkdir(exist_ok=True)
        self._controllers = frozenset(
            name for name in CONTROLLERS if _enable(name, self._hierarchy, self.base)
        )

    @property
    def controllers(self) -> frozenset[str]:
        """Return those that were switched on for the leaves, as read back."""
        return self._controllers

    async def spawn(self, spec: SpawnSpec) -> WorkerRecord:
        """Start a worker in a leaf of its own."""
        check_spawn(spec)
        with self._leaf(spec) as leaf:
            with prepared(spec, cgroup=str(leaf), dies_with_parent=False) as launch:
                started = await start_detached(spec, launch)
            return make_record(spec, started, str(leaf))

    @contextmanager
    def _leaf(self, spec: SpawnSpec) -> Iterator[Path]:
        """Make the leaf; remove it again when the start in the body fails."""
        name = _leaf_name(spec)
        leaf = self.base / name
        self._starting.add(name)
        try:
            if not self.base.exists():  # retired meanwhile
                self._make_base()
            _make_leaf(leaf, spec)
            limit(leaf, spec.limits, self._controllers)
            yield leaf
        except BaseException:
            _remove(leaf)
            raise
        finally:
            self._starting.discard(name)

    async def kill(self, record: WorkerRecord, number: int) -> bool:
        """Signal the worker; SIGKILL goes to its whole leaf."""
        sent = pidfd.send(record, number)
        leaf = self._own_leaf(record)
        if number == signal.SIGKILL and leaf is not None:
            _kill_all(leaf)
        return sent

    def adopt(self, record: WorkerRecord) -> Adoption:
        """Judge a record."""
        return records.examine(record)

    def find(self, worker_prefix: str) -> list[FoundWorker]:
        """Return live workers whose id starts with the prefix, with the paths of their leaves."""
        return [self._with_leaf(found) for found in records.scan(worker_prefix)]

    def _with_leaf(self, found: FoundWorker) -> FoundWorker:
        parent, _, name = found.cgroup.rpartition("/")
        ours = parent.rpartition("/")[2] == self.layout.cgroup
        path = str(self.base / name) if ours else ""
        return msgspec.structs.replace(found, cgroup=path)

    async def cleanup(self, record: WorkerRecord) -> None:
        """Kill descendants that a dead worker left behind and remove its leaf."""
        require_dead(record)
        leaf = self._own_leaf(record)
        if leaf is None:
            return
        _kill_all(leaf)
        with anyio.move_on_after(REMOVE_WAIT_S_MAX):
            while not _remove(leaf):  # noqa: ASYNC110  rmdir tells, no event does
                await anyio.sleep(REMOVE_POLL_S)
            return
        raise InUse(f"cgroup {leaf} still has processes", resource=record.worker_id)

    async def sweep(self) -> list[str]:
        """Remove leaves without processes, as a crash between mkdir and fork leaves them."""
        return [
            leaf.name
            for leaf in _leaves(self.base)
            if leaf.name not in self._starting and _remove(leaf)
        ]

    async def retire(self) -> None:
        """Remove the instance's own directory and the empty leaves in it."""
        with anyio.move_on_after(REMOVE_WAIT_S_MAX):
            await self.sweep()
            while not _remove(self.base):
                # What was just killed leaves its cgroup a moment later.
                await anyio.sleep(REMOVE_POLL_S)
                await self.sweep()
            return
        raise InUse(f"cgroup {self.base} still has workers")

    def _own_leaf(self, record: WorkerRecord) -> Path | None:
        """Return the leaf of a record if it lies directly below the instance's directory."""
        path = Path(record.cgroup)
        return path if record.cgroup and path.parent == self.base and path.name != ".." else None


def _leaf_name(spec: SpawnSpec) -> str:
    """Return `<leaf>-<nonce>`, `<kind>-<short>-<nonce>` where the caller named no leaf."""
    _, _, kind, short, nonce = spec.worker_id.split(":")
    return f"{spec.cgroup or f'{kind}-{short}'}-{nonce}"


def _make_leaf(leaf: Path, spec: SpawnSpec) -> None:
    leaf.mkdir(exist_ok=True)
    if (leaf / "cgroup.procs").read_text():
        raise InUse(f"cgroup {leaf} has processes already", resource=spec.worker_id)


def limit(leaf: Path, limits: Limits, controllers: frozenset[str]) -> None:
    """Set what the controllers can limit and read each back: the kernel may take another value."""
    for file, text in _settings(limits):
        if file.partition(".")[0] not in controllers or not (leaf / file).exists():
            continue  # not switched on, or not built into this kernel
        (leaf / file).write_text(text)
        effective = (leaf / file).read_text().strip()
        if effective != text:
            raise FailedPrecondition(f"{file} is {effective} after writing {text}", field=file)


def _settings(limits: Limits) -> Iterator[tuple[str, str]]:
    """Yield file and text of each limit that is wanted."""
    if limits.memory_max_bytes:
        # The kernel rounds down to a page. At the limit the whole leaf ends, not a part of it.
        yield "memory.max", str(limits.memory_max_bytes // PAGE_BYTES * PAGE_BYTES)
        yield "memory.oom.group", "1"
    if limits.cpu_weight:
        yield "cpu.weight", str(limits.cpu_weight)
    if limits.cpus_max:
        yield "cpu.max", f"{limits.cpus_max * CPU_PERIOD_US} {CPU_PERIOD_US}"
    if limits.pids_max:
        yield "pids.max", str(limits.pids_max)


def _enable(controller: str, hierarchy: Path, base: Path) -> bool:
    """Switch a controller on for the leaves, where the hierarchy has it."""
    if controller not in (hierarchy / "cgroup.controllers").read_text().split():
        return False
    for directory in (hierarchy, base):
        try:
            (directory / "cgroup.subtree_control").write_text(f"+{controller}")
        except OSError as error:
            if error.errno in NOT_GIVEN:
                return False
            raise
    return controller in (base / "cgroup.subtree_control").read_text().split()


def _kill_all(leaf: Path) -> None:
    try:
        (leaf / "cgroup.kill").write_text("1")
    except FileNotFoundError:
        if leaf.exists():  # before Linux 5.14 there is no cgroup.kill
            _kill_one_by_one(leaf)


def _kill_one_by_one(leaf: Path) -> None:
    """SIGKILL every process in the leaf; the caller repeats until the leaf is empty."""
    for line in (leaf / "cgroup.procs").read_text().split():
        fd = pidfd.open_pid(int(line))
        if fd is None:
            continue
        try:
            # Listed again after the pidfd was opened: not a recycled number.
            if line in (leaf / "cgroup.procs").read_text().split():
                pidfd.send_to(fd, signal.SIGKILL)
        finally:
            os.close(fd)


def _leaves(base: Path) -> list[Path]:
    if not base.exists():
        return []
    return sorted(entry for entry in base.iterdir() if entry.is_dir())


def _remove(directory: Path) -> bool:
    """Remove a cgroup; False while it has processes or children, True when it is gone."""
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.ENOTEMPTY):
            return False
        raise
    return True
