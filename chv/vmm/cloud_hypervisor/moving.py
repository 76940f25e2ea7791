"""Snapshots, restores, and moves to another process on this host.

Cloud Hypervisor writes memory and devices only, and does not wait for the disk: that is done
here. A snapshot needs a KVM that can tell nested state; where it cannot, the refusal says so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import msgspec

from chv.common.errors import (
    ChvError,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    OutcomeUnknown,
    Unavailable,
    Unsupported,
)
from chv.common.files import atomic_write, fsync, sync_directory
from chv.vmm.cloud_hypervisor import api, backends, spec
from chv.vmm.cloud_hypervisor.machine import Machine, require
from chv.vmm.cloud_hypervisor.refusals import Refused
from chv.vmm.driver import VmmConfig, VmmState

CONFIG_FILE = "config.json"
POLL_S = 0.01
_NESTED = "NestedState"


async def snapshot(machine: Machine, directory: Path) -> None:
    """Save a paused VM to an empty directory, on the disk when it returns."""
    require("snapshot", (await machine.look()).state, VmmState.PAUSED)
    if await anyio.to_thread.run_sync(lambda: list(directory.iterdir())):
        raise FailedPrecondition(f"{directory} is not empty", field="directory")
    refused: Refused | None = None
    try:
        body = {"destination_url": f"file://{directory}"}
        await machine.api.put("vm.snapshot", body, limit_s=api.SAVE_S_MAX)
    except Refused as error:
        refused = error
    if refused is not None:
        raise _explained(refused)
    await anyio.to_thread.run_sync(_sync, directory)


def _explained(refused: Refused) -> ChvError:
    if any(_NESTED in message for message in refused.chain):
        return Unsupported(
            f"this host's KVM keeps nested state from Cloud Hypervisor: {refused.message}",
            field="spec.vmm",
            hint="snapshots of Cloud Hypervisor need another kernel; QEMU may do",
        )
    return refused


def _sync(directory: Path) -> None:
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fsync(fd, path)
        finally:
            os.close(fd)
    sync_directory(directory)


async def restore(
    machine: Machine,
    config: VmmConfig,
    fds: Mapping[str, Sequence[int]],
    *,
    version: spec.Version,
    landlock: bool,
) -> None:
    """Make the VM from a snapshot: PAUSED after it. The snapshot gets this VM's paths."""
    directory = Path(config.restore_dir)
    saved, text = await anyio.to_thread.run_sync(_saved, directory / CONFIG_FILE)
    wanted = spec.restored(saved, config, version=version, landlock=landlock)
    if wanted != saved:
        await anyio.to_thread.run_sync(_rewrite, directory / CONFIG_FILE, text, wanted)
    backends.require_listening(api.Info(config=wanted, state=""))
    body: spec.Body = {"source_url": f"file://{directory}"}
    if config.nics:
        body["net_fds"] = [
            {"id": spec.nic_device(nic.id), "num_fds": len(fds[nic.id])} for nic in config.nics
        ]
    given = [fd for nic in config.nics for fd in fds[nic.id]]
    await machine.api.put("vm.restore", body, given, limit_s=api.SAVE_S_MAX)


def _saved(path: Path) -> tuple[spec.Body, os.stat_result]:
    try:
        saved = msgspec.json.decode(path.read_bytes())
        status = path.stat()
    except FileNotFoundError as error:
        raise InvalidArgument(f"no snapshot in {path.parent}", field="restore_dir") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise DataLoss(f"{path} cannot be read: {error}", field="restore_dir") from error
    if not isinstance(saved, dict):
        raise DataLoss(f"{path} is not a configuration", field="restore_dir")
    return saved, status


def _rewrite(path: Path, like: os.stat_result, config: spec.Body) -> None:
    mode = like.st_mode & 0o777
    atomic_write(path, msgspec.json.encode(config), mode=mode, uid=like.st_uid, gid=like.st_gid)


async def receive(machine: Machine, config: VmmConfig, socket: Path) -> None:
    """Wait for a VM; the VMM answers nothing else meanwhile.

    It comes with the paths that it had, but for those in the VMM's own directory.
    """
    if config.nics:
        raise Unsupported(
            "Cloud Hypervisor cannot receive a VM whose taps come by descriptor", field="nics"
        )
    require("receive", (await machine.look()).state, VmmState.EMPTY)
    body = {"receiver_url": f"unix:{socket}"}
    await machine.api.put("vm.receive-migration", body, limit_s=api.MOVE_S_MAX)
    machine.journal.mark("made", spec.limits(config))


async def send(machine: Machine, socket: Path) -> None:
    """Hand a VM over; the VMM ends by itself, and has ended when this returns."""
    seen = await machine.look()
    if seen.present.listed("net"):
        raise Unsupported(
            "Cloud Hypervisor cannot move a VM whose taps come by descriptor",
            field="nics",
            hint="detach its NICs first",
        )
    require("send", seen.state, VmmState.RUNNING, VmmState.PAUSED)
    machine.journal.mark("sending")
    body = {"destination_url": f"unix:{socket}", "local": True}
    await machine.api.put("vm.send-migration", body, limit_s=api.MOVE_S_MAX)
    with anyio.move_on_after(api.MOVE_S_MAX):
        while not (outcome := await _outcome(machine)):  # noqa: ASYNC110
            await anyio.sleep(POLL_S)
        if outcome == "failed":
            raise FailedPrecondition("the other side did not take the VM; it goes on here")
        return
    raise OutcomeUnknown(f"no end of the move in {api.MOVE_S_MAX:g} s")


async def _outcome(machine: Machine) -> str:
    """Return finished (and the VMM has ended) or failed; empty as long as it goes on."""
    told = machine.journal.read().migration
    if told == "failed":
        return told
    ended = False
    try:
        await machine.api.ping()
    except Unavailable:
        ended = True
    if ended and machine.journal.read().migration != "finished":
        raise OutcomeUnknown("the VMM ended in the middle of the move")
    return "finished" if ended else ""
