"""Snapshots of a paused VM in a directory, and VMs that start from one; dumps for a debugger.

Every file is made by us, new, never through a link, and handed to QEMU open. A snapshot is whole
and on the disk, or its files are gone again.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec

from chv.common.errors import FailedPrecondition, InvalidArgument
from chv.common.files import fsync, sync_directory
from chv.vmm.driver import VmmConfig, VmmState
from chv.vmm.qemu import layout, machine, stream
from chv.vmm.qemu.qmp import Monitor

STATE_FILE = "state"
DUMP = "chv-dump"
DUMP_S_MAX = 600.0
POLL_S = 0.02
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


async def snapshot(monitor: Monitor, directory: Path) -> None:
    """Save a paused VM to an empty directory."""
    if await anyio.to_thread.run_sync(lambda: list(directory.iterdir())):
        raise FailedPrecondition(f"{directory} is not empty", field="directory")
    word = await machine.status(monitor)
    machine.require("snapshot", machine.state_of(word), VmmState.PAUSED)
    if word == machine.SAVED:
        raise FailedPrecondition(
            "QEMU saves a VM once in a pause: the VM has not run since the last time",
            hint="resume it and pause it again",
        )
    record = await layout.observe(monitor)
    async with _new_file(directory / STATE_FILE) as fd:
        await stream.write(monitor, fd, two_way=False)
    async with _new_file(directory / layout.LAYOUT_FILE) as fd:
        os.write(fd, msgspec.json.encode(record))


@asynccontextmanager
async def _new_file(path: Path) -> AsyncIterator[int]:
    """Make a file and see it to the disk; whatever fails, it is gone."""
    try:
        fd = os.open(path, _NEW, 0o600)
    except FileExistsError as error:
        raise FailedPrecondition(f"{path} exists already", field="path") from error
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", field="path") from error
    whole = False
    try:
        yield fd
        await anyio.to_thread.run_sync(fsync, fd, path)
        await anyio.to_thread.run_sync(sync_directory, path.parent)
        whole = True
    finally:
        os.close(fd)
        if not whole:
            path.unlink(missing_ok=True)


async def restore(
    monitor: Monitor,
    config: VmmConfig,
    nic_fds: Mapping[str, Sequence[int]],
    version: tuple[int, int],
) -> None:
    """Fill a QEMU that waits with a snapshot: PAUSED after it."""
    directory = Path(config.restore_dir)
    if (await stream.progress(monitor))[0] in ("none", ""):
        saved = await anyio.to_thread.run_sync(layout.read, directory)
        await layout.rebuild(monitor, config, saved, nic_fds, version)
        with layout.opened(directory / STATE_FILE) as fd:
            await stream.read(monitor, fd)
    await stream.taken_up(monitor)
    machine.require("restore", await machine.state(monitor), VmmState.PAUSED)


async def core_dump(monitor: Monitor, path: Path) -> None:
    """Write an ELF core to a file that does not exist yet; the guest stands meanwhile."""
    allowed = (VmmState.RUNNING, VmmState.PAUSED, VmmState.PANICKED)
    machine.require("core dump", await machine.state(monitor), *allowed)
    async with _new_file(path) as fd:
        await monitor.give(DUMP, fd)
        arguments = {"paging": False, "protocol": f"fd:{DUMP}", "detach": True}
        await monitor.tell("dump-guest-memory", arguments)
        with anyio.fail_after(DUMP_S_MAX):
            while (status := await _dump_status(monitor)) == "active":  # noqa: ASYNC110
                await anyio.sleep(POLL_S)
        if status != "completed":
            raise FailedPrecondition(f"the dump {status}", field="path")


async def _dump_status(monitor: Monitor) -> str:
    answer = await monitor.ask("query-dump", limit_s=stream.ANSWER_S_MAX)
    return str(answer["status"])
