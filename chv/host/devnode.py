"""A node for development: `chv up` and `chv down`, without systemd.

What the node is stands in `<dir>/node.toml` (its configuration, instance included) and
`<dir>/socket` (the agent's socket, where the CLI looks). Everything else is where Layout says.
`up` is idempotent and also the way back after a crash; `down` ends the daemons alone. What changes
the node holds a lock on its directory, so that two at once end up with one node.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import msgspec

from chv.common import config as configuration
from chv.common.config import Config
from chv.common.errors import (
    ChvError,
    Conflict,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    Unavailable,
)
from chv.common.files import FileLock, atomic_write, ensure_dir
from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import (
    FoundWorker,
    SpawnSpec,
    choose_provider,
    scan,
    terminate,
)
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire.agent import NODE_STATUS, NodeStatusReply
from chv.common.wire.types import Empty
from chv.host.sandbox import NETNS_ROOT, Sandbox, remove_netns

NODE_UID = "00000000-0000-4000-8000-000000000000"
KIND = "agent"
POLL_S = 0.05
STOP_GRACE_S = 10.0
LOCK_TIMEOUT_S = 60.0
READY = "TenantReady"
HELD = ("Draining", "Maintenance")  # as an operator has left it: it gets no further by itself
# What a background agent gets of ours: settings for tests, and the way to Debian's mirror.
PASSED_ENVIRONMENT = (
    *("CHV_VMM", "CHV_CLOUD_HYPERVISOR", "CHV_FAKE"),
    *("CHV_FAILPOINTS", "CHV_FAILPOINTS_LOG", "CHV_TEST_BUILD", "CHV_BOOT_ID"),
    *("http_proxy", "https_proxy", "no_proxy", "APT_CONFIG"),
)


@dataclass(frozen=True)
class DevNode:
    """One development node, found through its directory."""

    directory: Path
    config: Config
    layout: Layout
    sandbox: Sandbox | None

    @property
    def config_path(self) -> Path:
        """The node's TOML file."""
        return self.directory / "node.toml"

    @property
    def socket(self) -> Path:
        """The agent's socket."""
        return self.layout.socket("agent")


def exists(directory: Path) -> bool:
    """Whether a node was made in this directory."""
    return (directory / "node.toml").exists()


def find(directory: Path) -> DevNode:
    """Return the node of a directory; NotFound where there is none."""
    directory = directory.absolute()
    if not exists(directory):
        raise NotFound(f"no node in {directory}", hint="`chv up` makes one")
    config = configuration.load(directory / "node.toml")
    layout = configuration.resolve_layout(config)
    sandboxed = (directory / "sandbox").exists()
    return DevNode(directory, config, layout, Sandbox(layout.instance) if sandboxed else None)


def make(directory: Path, *, sandboxed: bool) -> DevNode:
    """Return the node of a directory, made where there is none."""
    with _alone(directory):
        if not exists(directory):
            return _made(directory.absolute(), sandboxed=sandboxed)
        node = find(directory)
        if (node.sandbox is not None) is not sandboxed:
            was = "sandbox" if node.sandbox else "host"
            raise FailedPrecondition(
                f"the node in {node.directory} was made with --network {was}",
                hint="`chv down --purge` removes it",
            )
        return node


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the lock on a node's directory, made where it is missing; wait for its turn."""
    fd = _lock(directory)
    try:
        yield
    finally:
        os.close(fd)


@asynccontextmanager
async def _alone_async(directory: Path) -> AsyncIterator[None]:
    fd = await anyio.to_thread.run_sync(_lock, directory)
    try:
        yield
    finally:
        os.close(fd)


def _lock(directory: Path) -> int:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while (fd := _try_lock(directory)) is None:
        if time.monotonic() > deadline:
            raise Conflict(
                f"{directory} is locked by another `chv up` or `chv down`",
                hint="see what keeps it, or end it",
            )
        time.sleep(POLL_S)
    return fd


def _try_lock(directory: Path) -> int | None:
    ensure_dir(directory, mode=0o755, uid=-1, gid=-1)
    # The directory itself: there is no lock file to leave behind.
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), directory.stat()):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass  # held, or removed by the one that held it
    os.close(fd)
    return None


def _made(directory: Path, *, sandboxed: bool) -> DevNode:
    config = Config()
    instance = _free_instance(config)
    named = msgspec.structs.replace(config.node, instance=instance)
    host_netns = Sandbox(instance).host_path if sandboxed else ""
    network = msgspec.structs.replace(config.network, host_netns=host_netns)
    config = msgspec.structs.replace(config, node=named, network=network)
    if sandboxed:
        atomic_write(directory / "sandbox", b"", mode=0o644)
    _point_at(directory, configuration.resolve_layout(config))
    # Last: the file whose presence says that the node exists.
    atomic_write(directory / "node.toml", configuration.dump(config).encode(), mode=0o644)
    return find(directory)


def _point_at(directory: Path, layout: Layout) -> None:
    """Write where the CLI finds the agent."""
    atomic_write(directory / "socket", f"{layout.socket(KIND)}\n".encode(), mode=0o644)


def _free_instance(config: Config) -> str:
    """Return an id that no other node below the same directories has, uid block included."""
    ids = Ids()
    while True:
        instance = ids.instance()
        named = msgspec.structs.replace(config.node, instance=instance)
        try:
            layout = configuration.resolve_layout(msgspec.structs.replace(config, node=named))
        except Conflict:
            continue
        if not layout.state.exists() and not layout.run.exists():
            return instance


async def start(node: DevNode) -> int:
    """Start the agent in the background unless it runs; return its pid."""
    async with _alone_async(node.directory):
        if running := agent_process(node):
            return running.pid
        await _prepare(node)
        return await _spawn(node)


async def _spawn(node: DevNode) -> int:
    worker_id = node.layout.worker_id(KIND, NODE_UID, Ids().nonce())
    environment = {key: os.environ[key] for key in PASSED_ENVIRONMENT if key in os.environ}
    record = await choose_provider(node.layout).spawn(
        SpawnSpec(
            worker_id=worker_id,
            argv=(*agent_argv(node), "--worker-id", worker_id),
            environment=environment,
            log_path=str(node.layout.logs / "agent.log"),
            no_new_privs=False,
            umask=0o022,
        )
    )
    return record.pid


async def prepare(node: DevNode) -> None:
    """Make what the agent needs before it starts: its sandbox and its log directory."""
    async with _alone_async(node.directory):
        await _prepare(node)


async def _prepare(node: DevNode) -> None:
    _point_at(node.directory, node.layout)
    ensure_dir(node.layout.state_root, mode=0o711)
    ensure_dir(node.layout.state, mode=0o711)
    ensure_dir(node.layout.logs, mode=0o700)
    if node.sandbox:
        await node.sandbox.ensure()


def agent_argv(node: DevNode) -> tuple[str, ...]:
    """Return the agent's command line."""
    return (sys.executable, "-m", "chv.agent", "--config", str(node.config_path))


def agent_process(node: DevNode) -> FoundWorker | None:
    """Return the running agent of this node, if `start` started it."""
    found = scan(node.layout.worker_id(KIND, NODE_UID, ""))
    return found[0] if found else None


def status(node: DevNode) -> NodeStatusReply:
    """Ask the agent for the node's status."""
    with BlockingClient(node.socket) as client:
        return client.call(NODE_STATUS, Empty(), timeout_s=2.0)


async def await_ready(
    node: DevNode, timeout_s: float, on_state: Callable[[str], None] = lambda state: None
) -> NodeStatusReply:
    """Return once the node is TenantReady, or drained; says what is missing on its way there."""
    last = "no answer"
    with anyio.move_on_after(timeout_s):
        while True:
            try:
                seen = await anyio.to_thread.run_sync(status, node)
            except ChvError as error:
                if agent_process(node) is None:
                    raise Unavailable(
                        f"the agent ended: {_last_log_line(node)}",
                        hint=f"see {node.layout.logs / 'agent.log'}",
                    ) from error
                last = error.message
            else:
                last = seen.state
                on_state(seen.state)
                if seen.state in (READY, *HELD):
                    return seen
                if seen.state == "Failed":
                    why = seen.transitions[-1] if seen.transitions else ""
                    raise FailedPrecondition(f"the node is Failed: {why}")
            await anyio.sleep(POLL_S)
    raise DeadlineExceeded(
        f"the node is not ready after {timeout_s:g} s: {last}",
        hint=f"see `chv node status` and {node.layout.logs}",
    )


def _last_log_line(node: DevNode) -> str:
    try:
        lines = (node.layout.logs / "agent.log").read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return "it has logged nothing"
    return lines[-1][:500] if lines else "it has logged nothing"


async def stop(node: DevNode) -> bool:
    """Stop the agent, and with it stord and nwd; VMs go on. False when none ran."""
    async with _alone_async(node.directory):
        running = agent_process(node)
        if running is None:
            return False
        await terminate(running.record(), grace_s=STOP_GRACE_S)
        await _await_locks_free(node)
        return True


async def _await_locks_free(node: DevNode) -> None:
    """Return when the daemons' locks are free, which proves that the last of them has ended."""
    with anyio.fail_after(STOP_GRACE_S):
        for daemon in ("agent", "stord", "nwd"):
            # A lock has no event to wait for.
            while not _is_free(node.layout.lock(daemon)):  # noqa: ASYNC110
                await anyio.sleep(POLL_S)


def _is_free(path: Path) -> bool:
    if not path.exists():
        return True
    try:
        with FileLock.acquire(path):
            return True
    except Conflict:
        return False


async def remove(node: DevNode) -> list[str]:
    """Remove every trace of a stopped node without objects; return what had to be killed.

    The agent has deleted the objects before; a worker that is still there is one that it could
    not end, and it ends here.
    """
    killed = []
    provider = choose_provider(node.layout)
    for worker in scan(node.layout.worker_prefix):
        await terminate(worker.record(), grace_s=2.0)
        await provider.cleanup(worker.record())
        if f":{KIND}:" not in worker.worker_id and ":console:" not in worker.worker_id:
            killed.append(worker.worker_id)
    await provider.retire()
    for netns in sorted(NETNS_ROOT.glob(f"{node.layout.netns_prefix}*")):
        await remove_netns(netns.name)
    if node.sandbox:
        await node.sandbox.remove()
    for path in (node.layout.run, node.layout.state):
        await anyio.to_thread.run_sync(_remove_tree, path)
    for name in ("socket", "sandbox", "node.toml"):
        (node.directory / name).unlink(missing_ok=True)
    for directory in (node.directory, node.layout.run_root):
        _remove_if_empty(directory)
    return killed


def _remove_tree(path: Path) -> None:
    """Remove a directory; already gone is fine."""
    with suppress(FileNotFoundError):
        shutil.rmtree(path)


def _remove_if_empty(directory: Path) -> None:
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()
