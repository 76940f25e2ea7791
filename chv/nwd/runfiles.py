"""The files of a network in /run: what dnsmasq reads, and what we know about the last pass.

They are gone after a reboot and made again from records, so nothing is synced to disk; a file is
still always the old or the new one. Blocking: call in a thread.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from itertools import count
from pathlib import Path
from uuid import UUID

import msgspec

from chv.common.files import (
    ensure_dir,
    no_space_is_exhausted,
    remove_temporaries,
    temporary_beside,
)
from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.nwd import dnsmasq
from chv.nwd.nft.ruleset import Applied

RULES, TOLD = "rules.json", "told"
_MODE, _DIRECTORY_MODE = 0o640, 0o750
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Names of halves: never those that a process before this one has left.
_NUMBERS = count(UUID(Ids().uid()).int)
_READ = (dnsmasq.HOSTS, dnsmasq.NAMES)
# How the files of a network looked when they were written, and their digest.
_WRITTEN: dict[Path, tuple[tuple[tuple[int, ...], ...], str]] = {}


def base(layout: Layout) -> Path:
    """Return the directory above those of the networks."""
    return layout.run / "net"


def prepare_base(layout: Layout) -> Path:
    """Make the directory above those of the networks."""
    directory = base(layout)
    ensure_dir(directory, mode=0o711)
    return directory


def prepare(layout: Layout, network_id: str) -> Path:
    """Make the directory of a network."""
    directory = layout.network_run(network_id)
    if not _is_right(directory, layout.dns_uid):
        prepare_base(layout)
        ensure_dir(directory, mode=_DIRECTORY_MODE, gid=layout.dns_uid)
    return directory


def _is_right(directory: Path, gid: int) -> bool:
    """One look that is right nearly always: each attach needs the directory several times."""
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return False
    owner, mode = (status.st_uid, status.st_gid), stat.S_IFDIR | _DIRECTORY_MODE
    return status.st_mode == mode and owner == (0, gid)


def replace(path: Path, text: str, gid: int) -> os.stat_result:
    """Write a file at once; without a sync, for it does not outlive this boot anyway."""
    # Three or four of an attach: paths are plain texts here, and what was renamed is not removed.
    temporary = f"{path.parent}/.chv-{next(_NUMBERS):032x}.tmp"
    with no_space_is_exhausted(path):
        fd = os.open(temporary, _NEW, _MODE)
        try:
            os.fchown(fd, 0, gid)
            os.fchmod(fd, _MODE)
            os.write(fd, text.encode())
            os.rename(temporary, path)  # noqa: PTH104
            return os.fstat(fd)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)


def read(path: Path) -> str:
    """Return the text of a file, empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def files_digest(directory: Path) -> str:
    """Return the digest of the files that dnsmasq reads, as they are now."""
    if not directory.is_dir() or not all((directory / name).is_file() for name in _READ):
        return ""
    return dnsmasq.files_digest({name: read(directory / name) for name in _READ})


def files_digest_again(directory: Path) -> str:
    """Return the same, unread where the files look as they did when we wrote them.

    Good enough between two passes that read them.
    """
    known = _WRITTEN.get(directory)
    if known is not None:
        with contextlib.suppress(FileNotFoundError):
            if known[0] == tuple(_mark((directory / name).lstat()) for name in _READ):
                return known[1]
    return files_digest(directory)


def _mark(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def write_files(layout: Layout, network_id: str, files: dict[str, str], digest: str) -> None:
    """Write the files that dnsmasq reads, of this digest."""
    directory = prepare(layout, network_id)
    written = {name: replace(directory / name, files[name], layout.dns_uid) for name in files}
    marks = tuple(_mark(written[name]) for name in _READ)
    _WRITTEN[directory] = (marks, digest)


def empty_leases(layout: Layout, network_id: str) -> None:
    """Make a file without leases that dnsmasq may write to."""
    path = layout.network_run(network_id) / dnsmasq.LEASES
    with temporary_beside(path, mode=_MODE, uid=layout.dns_uid, gid=layout.dns_uid) as (_, half):
        half.replace(path)


def told(directory: Path, worker_id: str) -> str:
    """Return the digest of what this incarnation of dnsmasq has read."""
    words = read(directory / TOLD).split()
    return words[1] if len(words) == 2 and words[0] == worker_id else ""


def note_told(layout: Layout, network_id: str, worker_id: str, digest: str) -> None:
    """Remember it; only after dnsmasq was told."""
    path = layout.network_run(network_id) / TOLD
    replace(path, f"{worker_id} {digest}\n", layout.dns_uid)


def applied_rules(directory: Path, name: str = RULES) -> Applied | None:
    """Return what we know of the rules that stand; None where unknown."""
    text = read(directory / name)
    try:
        return msgspec.json.decode(text, type=Applied) if text else None
    except msgspec.MsgspecError:
        return None


def note_rules(directory: Path, applied: Applied, name: str = RULES) -> None:
    """Remember it; only after the rules were loaded."""
    replace(directory / name, msgspec.json.encode(applied).decode(), 0)


def tidy(directory: Path, keep: str) -> None:
    """Remove configurations of earlier dnsmasq processes and halves of writes."""
    remove_temporaries(directory)
    for path in directory.glob("*.conf"):
        if path.name != keep:
            path.unlink(missing_ok=True)


def remove(directory: Path) -> None:
    """Remove the directory of a network."""
    _WRITTEN.pop(directory, None)
    if directory.is_dir() and not directory.is_symlink():
        shutil.rmtree(directory)
