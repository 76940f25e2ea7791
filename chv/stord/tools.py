"""qemu-img on detached volumes, under the tools uid: no tool run by root ever parses an image.

The files are given to `layout.tools_uid` for the length of a call: `owns` by owner, `reads` by an
ACL entry where others may not read. Each grant is written down first, so that `sweep` at start
takes back what a kill left. Keys go by memfd. Every end is typed: ResourceExhausted (space), InUse
(locked), PermissionDenied (key, directory), DataLoss (the image), NotFound, Internal.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from chv.common import logs
from chv.common.errors import (
    ChvError,
    DataLoss,
    FailedPrecondition,
    InUse,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
)
from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import CommandFailed, Completed, run
from chv.common.secret import Secret
from chv.stord.confinement import Touched, is_remote, tool_rules
from chv.stord.grants import Grants
from chv.stord.keys import Key, is_wrong_key, wrong_key
from chv.stord.qsd import graph

log = logs.get(__name__)
BINARY = "qemu-img"
KEY_ID = "k"
FIRST_KEY_FD = 3
GIVE_BACK_TIMEOUT_S = 30.0
OnProgress = Callable[[float], None]  # percent
_PERCENT = re.compile(rb"\(([0-9]{1,3}(?:\.[0-9]+)?)/100%\)")
# QEMU times its key derivation before it writes anything, and on a busy machine finds now and
# then that no CPU time has passed (seen in 1 of 60 creations).
_UNTIMED = b"Unable to get accurate CPU usage"
KEY_TRIES_MAX = 5
_NO_SPACE = ("No space left", "Disk quota exceeded")
_CORRUPT = (
    "Image is corrupt",
    "Image is not in",
    "not in qcow2 format",
    "Input/output error",
    "Invalid argument",
    "is too small",
    "marked corrupt",
    "Bad file format",
    "No encryption in image header",
    "not a valid LUKS",
    "Volume is not in LUKS format",
)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What a call may touch, and whose it is, for the errors.

    `keys`: secret objects by their id. `volume_id` names the volume in errors.
    """

    owns: tuple[Path, ...] = ()
    reads: tuple[Path, ...] = ()
    keys: dict[str, Secret] = {}
    volume_id: str = ""
    accept: tuple[int, ...] = (0,)  # exit codes that are an answer
    timeout_s: float = math.inf


class Fresh(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a target that is not a file: it has zeros, or gets some behind the copy."""

    zeros: bool = False
    padding_bytes: int = 0


class Tools:
    """Runs qemu-img. `grants` is shared by all calls of this daemon."""

    def __init__(self, layout: Layout, ids: Ids | None = None) -> None:
        self._layout = layout
        self._uid = layout.tools_uid
        self._grants = Grants(layout.state / "grants", layout.tools_uid, ids or Ids())

    def sweep(self) -> list[str]:
        """Take back what calls cut short by a kill still hold; at start only. Blocks."""
        return self._grants.sweep()

    async def qemu_img(  # noqa: PLR0913  what one command needs is its signature
        self,
        argv: Sequence[str],
        *,
        owns: Sequence[Path] = (),
        reads: Sequence[Path] = (),
        key: Secret | None = None,
        on_progress: OnProgress | None = None,
        timeout_s: float | None = None,
        volume_id: str = "",
    ) -> Completed:
        """Run `qemu-img ARGV`; `{key}` in it stands for the path of a file with the key."""
        call = Call(
            owns=tuple(owns),
            reads=tuple(reads),
            keys={} if key is None else {KEY_ID: key},
            volume_id=volume_id,
            timeout_s=math.inf if timeout_s is None else timeout_s,
        )
        return await self.run(argv, call, on_progress, declare_keys=False)

    async def run(
        self,
        argv: Sequence[str],
        call: Call,
        on_progress: OnProgress | None = None,
        *,
        declare_keys: bool = True,
    ) -> Completed:
        """Run `qemu-img ARGV`; every key of the call becomes a secret object of its id."""
        async with self.lend(call.owns, call.reads):
            with ExitStack() as stack:
                fds = {
                    FIRST_KEY_FD + index: stack.enter_context(_key_file(secret, self._uid))
                    for index, secret in enumerate(call.keys.values())
                }
                objects = _secret_options(call.keys) if declare_keys else []
                command = [BINARY, argv[0], *objects, *map(_with_key, argv[1:])]
                return await self._run(command, call, fds, on_progress)

    @asynccontextmanager
    async def lend(self, owns: Sequence[Path], reads: Sequence[Path]) -> AsyncIterator[None]:
        """Give the files to the tools uid for the length of the block."""
        token = await anyio.to_thread.run_sync(self._grants.give, owns, reads)
        try:
            yield
        finally:
            with anyio.move_on_after(GIVE_BACK_TIMEOUT_S, shield=True):
                await anyio.to_thread.run_sync(self._grants.take_back, token)

    async def _run(
        self,
        command: list[str],
        call: Call,
        fds: dict[int, int],
        on_progress: OnProgress | None,
    ) -> Completed:
        remote = is_remote(" ".join(command))
        touched = Touched(owns=call.owns, reads=call.reads, remote=remote)
        for _ in range(KEY_TRIES_MAX):
            completed = await run(
                command,
                timeout_s=call.timeout_s,
                check=False,
                uid=self._uid,
                gid=self._uid,
                fds=fds,
                empty_netns=not remote,
                landlock=tool_rules(self._layout, BINARY, touched),
                on_stdout=None if on_progress is None else _percents(on_progress),
            )
            if completed.returncode == 0 or _UNTIMED not in completed.stderr:
                break
        if completed.returncode not in call.accept:
            raise _translated(completed, call)
        return completed

    async def convert(
        self,
        source: graph.Node,
        target: graph.Node,
        call: Call,
        on_progress: OnProgress | None = None,
        *,
        fresh: Fresh | None = None,
    ) -> None:
        """Copy what a guest would read of `source` into `target`, which exists.

        Both as the storage daemon would open them. The target must be new: where that means
        zeros, none are written.
        """
        fresh = fresh or Fresh()
        target_format = str(target["driver"])
        argv = ["convert", "-n", "-p", "-W", "-t", "none", "-T", "none", "-O", target_format]
        if not _takes_direct(call.owns):
            argv[argv.index("-t") + 1] = "writeback"
        if not _takes_direct(call.reads or call.owns):
            argv[argv.index("-T") + 1] = "writeback"
        if fresh.zeros or _reads_zeros(target):
            argv.append("--target-is-zero")
        sources = [json_image(source)]
        if fresh.padding_bytes:
            zeros = {"driver": "null-co", "size": fresh.padding_bytes, "read-zeroes": True}
            sources.append(json_image(zeros))
        await self.run([*argv, *sources, json_image(target)], call, on_progress)


def json_image(node: graph.Node) -> str:
    """Return the text by which qemu-img opens a block node: format and files are declared."""
    return f"json:{msgspec.json.encode(_plain(node)).decode()}"


def _plain(value: object) -> object:
    """Leave out what only a storage daemon has a use for: names and its cache and I/O choices."""
    if not isinstance(value, dict):
        return value
    return {
        name: _plain(item)
        for name, item in value.items()
        if name not in ("node-name", "cache", "aio", "read-only", "discard")
    }


def _reads_zeros(new: graph.Node) -> bool:
    """Tell whether a new volume reads as zeros: not a device, not a key over unwritten bytes."""
    file = new.get("file")
    on_file = isinstance(file, dict) and file.get("driver") == "file"
    return new["driver"] == "qcow2" or (new["driver"] == "raw" and on_file)


def _takes_direct(paths: Sequence[Path]) -> bool:
    """Tell whether all of the files can be opened past the page cache."""
    for path in paths:
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError:
            return False
    return bool(paths)


def _secret_options(keys: Mapping[str, Secret]) -> list[str]:
    options: list[str] = []
    for index, name in enumerate(keys):
        path = f"/proc/self/fd/{FIRST_KEY_FD + index}"
        options += ["--object", f"secret,id={name},format=raw,file={path}"]
    return options


def _with_key(text: str) -> str:
    path = f"/proc/self/fd/{FIRST_KEY_FD}"
    return text.replace("/proc/self/fd/{key}", path).replace("{key}", path)


@contextmanager
def _key_file(secret: Secret, uid: int) -> Iterator[int]:
    """Yield a descriptor of memory that only `uid` may open, and nobody change."""
    fd = os.memfd_create("key", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, secret.reveal())
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        os.fchmod(fd, 0o400)
        os.fchown(fd, uid, uid)
        yield fd
    finally:
        os.close(fd)


def _percents(on_progress: OnProgress) -> Callable[[bytes], None]:
    """Return what finds the last percentage in the pieces of an output."""
    rest = b""

    def told(part: bytes) -> None:
        nonlocal rest
        text = rest + part
        found = _PERCENT.findall(text)
        rest = text[-32:] if not found else text[text.rfind(b")") + 1 :][-32:]
        if found:
            on_progress(min(float(found[-1]), 100.0))

    return told


def _translated(completed: Completed, call: Call) -> ChvError:
    """Return the typed error of a command that failed."""
    text = completed.stderr.decode(errors="replace")
    failed = CommandFailed(BINARY, completed)
    about = call.volume_id
    named = [str(path) for path in (*call.owns, *call.reads) if str(path) in text]
    where = named[0] if named else ", ".join(map(str, call.owns or call.reads)) or "a server's disk"
    if is_wrong_key(text):
        return _key_error(call)
    if any(sign in text for sign in _NO_SPACE):
        return ResourceExhausted(
            f"no space for {(_fullest(call.owns) or where)!r}",
            resource=about,
            hint="free space there, then again",
        )
    if "Failed to get" in text and " lock" in text:
        return InUse(f"another process has {where!r} open: {failed.message}", resource=about)
    if "Permission denied" in text:
        return PermissionDenied(
            f"the tools uid may not open {where!r}: {failed.message}", resource=about
        )
    if "No such file or directory" in text:
        return NotFound(f"{where!r}: {failed.message}", resource=about)
    if any(sign in text for sign in _CORRUPT):
        return DataLoss(
            f"{where!r} cannot be read: {failed.message}",
            resource=about,
            hint="chv volume check, repair, or restore a backup",
        )
    return failed


def _fullest(paths: Sequence[Path]) -> str:
    """Return which of the files lies where the least space is left; '' for none."""
    there = [path for path in paths if path.exists()]
    return str(min(there, key=_free_bytes)) if there else ""


def _free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _key_error(call: Call) -> ChvError:
    names = [key.name for key in call.keys.values() if isinstance(key, Key)]
    return wrong_key(" or ".join(names) or "that was given", call.volume_id or "this")


def check_reachable(path: Path) -> Path:
    """Return `path`; FailedPrecondition where a directory above keeps unprivileged uids out."""
    for directory in path.parents:
        try:
            mode = directory.stat().st_mode
        except FileNotFoundError as error:
            raise NotFound(f"directory {str(directory)!r} does not exist") from error
        if not mode & 0o001:
            raise FailedPrecondition(
                f"the storage uids cannot pass through {str(directory)!r}",
                hint=f"chmod o+x {directory}",
            )
    return path
