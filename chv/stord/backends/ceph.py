"""Ceph's own tools, and what a storage daemon must have to reach a cluster as a client.

`rbd` makes, enlarges and removes images: QEMU cannot remove one. It runs as root, with the node's
configuration and key; it reads no byte of an image. A storage daemon gets a copy of both in a
directory of its own on tmpfs, gone after a boot. Errors: Unavailable, NotFound, Unsupported.
"""

from __future__ import annotations

import ipaddress
import re
import shutil
import socket
from pathlib import Path

import msgspec

from chv.common.errors import (
    ChvError,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
)
from chv.common.files import atomic_write, ensure_dir, resolve_inside
from chv.common.process import CommandFailed, run
from chv.common.wire.stord import RbdPlace

PACKAGE = "ceph-common"
CONFIGURATIONS = Path("/etc/ceph")
DEFAULT_USER = "admin"
# exclusive-lock lets one client write at a time, object-map makes removal quick.
FEATURES = "layering,exclusive-lock,object-map,fast-diff"
TIMEOUT_S = 8.0
REMOVE_TIMEOUT_S = 25.0
# Longer than this a client does not wait for monitors that do not answer.
MOUNT_TIMEOUT_S = 4
CONF_BYTES_MAX = 1 << 20
NO_SUCH = 2  # exit codes of rbd are errno
_KEY = re.compile(r"[A-Za-z0-9+/=]{16,256}\Z")
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9._/-]+\Z")


class Image(msgspec.Struct, frozen=True):
    """What `rbd info` says."""

    size: int
    features: list[str] = []


class _Watcher(msgspec.Struct, frozen=True):
    address: str


class _Status(msgspec.Struct, frozen=True):
    watchers: list[_Watcher] = []


class _PoolStats(msgspec.Struct, frozen=True):
    max_avail: int = 0
    stored: int = 0


class _Pool(msgspec.Struct, frozen=True):
    name: str
    stats: _PoolStats = _PoolStats()


class _Usage(msgspec.Struct, frozen=True):
    pools: list[_Pool] = []


def configuration(place: RbdPlace) -> Path:
    """Return the cluster's configuration file, which lies in /etc/ceph."""
    field = "backend.rbd.conf"
    given = Path(place.conf)
    inside = CONFIGURATIONS in given.parents and ".." not in given.parts
    if not inside or not _PLAIN_PATH.match(place.conf):
        raise InvalidArgument(f"{place.conf!r} is no file of {str(CONFIGURATIONS)!r}", field=field)
    path = resolve_inside(CONFIGURATIONS, str(given.relative_to(CONFIGURATIONS)))
    if not path.is_file():
        raise NotFound(f"there is no {place.conf!r}", field=field, hint="copy it from the cluster")
    return path


async def info(place: RbdPlace, image: str) -> Image | None:
    """Return what the cluster says of an image; None: there is none."""
    try:
        text = await _rbd(place, "info", "--format", "json", image)
    except NotFound:
        return None
    return msgspec.json.decode(text, type=Image)


async def make(place: RbdPlace, image: str, size_bytes: int) -> None:
    """Make an image."""
    await _rbd(place, "create", "--size", f"{size_bytes}B", "--image-feature", FEATURES, image)


async def resize(place: RbdPlace, image: str, size_bytes: int) -> None:
    """Enlarge an image; rbd refuses to make one smaller."""
    await _rbd(place, "resize", "--no-progress", "--size", f"{size_bytes}B", image)


async def remove(place: RbdPlace, image: str) -> None:
    """Remove an image; fine when there is none."""
    try:
        await _rbd(place, "rm", "--no-progress", image, timeout_s=REMOVE_TIMEOUT_S)
    except NotFound:
        return


async def watchers(place: RbdPlace, image: str) -> list[str]:
    """Return the addresses of the clients that have the image open for writing."""
    text = await _rbd(place, "status", "--format", "json", image)
    return [_host(each.address) for each in msgspec.json.decode(text, type=_Status).watchers]


async def usage(place: RbdPlace) -> tuple[int, int] | None:
    """Return what the pool has left and has altogether; None: no manager daemon counts."""
    command = ["ceph", *_client(place), "df", "--format", "json"]
    text = await _run(place, command, TIMEOUT_S)
    for pool in msgspec.json.decode(text, type=_Usage).pools:
        if pool.name == place.pool and pool.stats.max_avail:
            return pool.stats.max_avail, pool.stats.max_avail + pool.stats.stored
    return None


async def _rbd(place: RbdPlace, *argv: str, timeout_s: float = 0) -> bytes:
    command = ["rbd", *_client(place), "--pool", place.pool, *argv]
    return await _run(place, command, timeout_s or TIMEOUT_S)


def _client(place: RbdPlace) -> list[str]:
    return ["--conf", place.conf, "--id", place.user or DEFAULT_USER]


async def _run(place: RbdPlace, argv: list[str], timeout_s: float) -> bytes:
    if shutil.which(argv[0]) is None:
        raise Unsupported(
            f"{argv[0]} is missing", field="backend.class_name", hint=f"apt-get install {PACKAGE}"
        )
    name = f"rbd cluster of {place.conf}"
    failed: CommandFailed
    try:
        return (await run(argv, timeout_s=timeout_s)).stdout
    except DeadlineExceeded as error:
        raise Unavailable(f"{name} did not answer within {timeout_s:g} s") from error
    except CommandFailed as error:
        failed = error
    if b"couldn't connect" in failed.stderr:
        await _key(place)  # rbd does not say that it has no key
    raise _translated(name, failed) from failed


def _translated(name: str, failed: CommandFailed) -> ChvError:
    text = failed.stderr.decode(errors="replace")
    if failed.returncode == NO_SUCH and "No such file" in text:
        return NotFound(f"{name}: {failed.message}")
    if "Operation not permitted" in text or "Permission denied" in text:
        return PermissionDenied(f"{name} refuses the client: {failed.message}")
    if "error connecting" in text or "couldn't connect" in text:
        return Unavailable(f"{name} cannot be reached: {failed.message}")
    if "watchers" in text:
        return FailedPrecondition(f"{name}: a client still has the image open", hint="30 s at most")
    return Unavailable(f"{name}: {failed.message}")


def _host(address: str) -> str:
    """Return the host of `v1:10.0.0.2:0/123` or `[::1]:0/123`."""
    return address.rpartition("/")[0].rpartition(":")[0].removeprefix("v1:").strip("[]")


def is_ours(host: str) -> bool:
    """Tell whether an address is one of this node."""
    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


async def lend(place: RbdPlace, directory: Path, uid: int) -> None:
    """Make the directory with which `uid` is this client: configuration and key, 0400."""
    user = f"client.{place.user or DEFAULT_USER}"
    key = await _key(place)
    keyring = directory / "keyring"
    ours = (
        f"\n[{user}]\nkeyring = {keyring}\nlog file =\nadmin socket =\n"
        f"client mount timeout = {MOUNT_TIMEOUT_S}\n"
    )
    text = configuration(place).read_bytes()[:CONF_BYTES_MAX]
    ensure_dir(directory.parent, mode=0o711)
    ensure_dir(directory, mode=0o700, uid=uid, gid=uid)
    for path, data in (
        (directory / "conf", text + ours.encode()),
        (keyring, f"[{user}]\n\tkey = {key}\n".encode()),
    ):
        atomic_write(path, data, mode=0o400, uid=uid, gid=uid)


async def _key(place: RbdPlace) -> str:
    """Return the client's key, from the first of its keyrings that has one."""
    user = f"client.{place.user or DEFAULT_USER}"
    lookup = ["ceph-conf", "--conf", place.conf, "--name", user, "--show-config-value", "keyring"]
    candidates = (await run(lookup, timeout_s=TIMEOUT_S)).stdout.decode().strip().split(",")
    for path in (candidate.strip() for candidate in candidates):
        if not Path(path).is_file():
            continue
        found = await run(
            ["ceph-authtool", "--print-key", "--name", user, path],
            timeout_s=TIMEOUT_S,
            check=False,
        )
        if found.returncode == 0 and _KEY.match(key := found.stdout.decode().strip()):
            return key
    raise PermissionDenied(
        f"this node has no key of {user}",
        field="backend.rbd.user",
        hint=f"ceph auth get {user} -o {candidates[0].strip()}",
    )


def take_back(directory: Path) -> None:
    """Remove what `lend` made; fine when there is nothing. Blocks."""
    if directory.exists():
        shutil.rmtree(directory)
