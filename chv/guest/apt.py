"""Asks apt which packages the tiny guest needs and keeps them in a cache directory.

Names are never listed here: libraries differ between Debian releases, so they follow from the
dependencies of a few root packages. Once resolved, the answer and the packages stay in the cache
and apt and the network are not needed again. Every use checks the sha256 that apt's signed index
gave. apt's own refusal becomes Unavailable or FailedPrecondition with what to do.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio.to_thread
import msgspec

from chv.common.errors import DataLoss, FailedPrecondition, Unavailable
from chv.common.files import atomic_write, sha256_file
from chv.common.process import run

ROOTS = ("linux-image-cloud-amd64", "busybox-static", "dropbear-bin", "openssh-sftp-server")
DOWNLOAD_PREFIX = ".download-"
RESOLUTION = "resolution.json"
QUERY_TIMEOUT_S = 60.0
DOWNLOAD_TIMEOUT_S = 600.0
# By itself apt waits two minutes for each mirror address that does not answer, again and again.
IMPATIENT = (
    *("-o", "Acquire::http::Timeout=15"),
    *("-o", "Acquire::https::Timeout=15"),
    *("-o", "Acquire::Retries=1"),
)
APT_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "APT_CONFIG")
APT_USER = "_apt"
ONLY_DEPENDS = (
    "--no-recommends", "--no-suggests", "--no-conflicts", "--no-breaks", "--no-replaces",
    "--no-enhances",
)  # fmt: skip
NAME = re.compile(r"^([a-z0-9][a-z0-9.+-]*)")
# One package on older Debians; newer ones split it, and the image itself only depends on the rest.
VERSIONED_KERNEL = re.compile(r"^linux-(?:image|binary|modules|base)-[0-9]")
LIBRARY_SECTIONS = ("libs", "oldlibs")
Progress = Callable[[str], None]


class Package(msgspec.Struct, frozen=True):
    """One package at one version, as apt's index describes it."""

    name: str
    version: str
    sha256: str
    size_bytes: int
    depends: list[str]

    @property
    def file_name(self) -> str:
        """Return the name that `apt-get download` gives it, which is safe in a path."""
        return f"{self.name}_{self.version.replace(':', '%3a')}_amd64.deb"


class Resolution(msgspec.Struct, frozen=True):
    """What a cache directory holds, and for which roots it was resolved."""

    roots: list[str]
    packages: list[Package]


def parse_index(text: str) -> dict[str, dict[str, str]]:
    """Return the stanzas of `apt-cache show` by package name, first one of a name wins."""
    found: dict[str, dict[str, str]] = {}
    for stanza in text.split("\n\n"):
        fields: dict[str, str] = {}
        for line in stanza.splitlines():
            key, colon, value = line.partition(":")
            if colon and not line.startswith(" "):
                fields[key] = value.strip()
        if "Package" in fields and "SHA256" in fields:
            found.setdefault(fields["Package"], fields)
    return found


def dependencies(fields: dict[str, str]) -> list[str]:
    """Return the names a stanza depends on, the first of each set of alternatives."""
    text = ", ".join(fields.get(key, "") for key in ("Pre-Depends", "Depends"))
    return [match[1] for part in text.split(",") if (match := NAME.match(part.strip()))]


def select(roots: Sequence[str], index: dict[str, dict[str, str]]) -> list[Package]:
    """Return `roots` with the libraries and the kernel that they depend on."""
    chosen: dict[str, Package] = {}
    pending = list(roots)
    while pending:
        name = pending.pop()
        if name in chosen:
            continue
        fields = index.get(name)
        if fields is None:
            raise FailedPrecondition(
                f"apt knows no package {name}",
                hint="run `apt-get update`; Debian's main section is needed",
            )
        names = dependencies(fields)
        chosen[name] = Package(
            name=name,
            version=fields["Version"],
            sha256=fields["SHA256"],
            size_bytes=int(fields.get("Size", "0")),
            depends=names,
        )
        pending.extend(other for other in names if _is_content(other, index.get(other, {})))
    return sorted(chosen.values(), key=lambda package: package.name)


def _is_content(name: str, fields: dict[str, str]) -> bool:
    section = fields.get("Section", "").rpartition("/")[2]
    return section in LIBRARY_SECTIONS or VERSIONED_KERNEL.match(name) is not None


async def packages(cache: Path, progress: Progress) -> dict[str, Path]:
    """Return every package's file by name; resolve and download what the cache lacks."""
    cache.mkdir(parents=True, exist_ok=True)
    for debris in cache.glob(f"{DOWNLOAD_PREFIX}*"):
        shutil.rmtree(debris, ignore_errors=True)
    known = await anyio.to_thread.run_sync(_from_cache, cache)
    if known is None:
        progress("asking apt which packages the guest needs")
        resolution = Resolution(roots=list(ROOTS), packages=await resolve(ROOTS))
        missing = [
            package
            for package in resolution.packages
            if not await anyio.to_thread.run_sync(_intact, cache, package)
        ]
        if missing:
            await _download(missing, cache, progress)
        atomic_write(cache / RESOLUTION, msgspec.json.encode(resolution), mode=0o644)
        known = resolution
    return {package.name: cache / package.file_name for package in known.packages}


async def resolve(roots: Sequence[str]) -> list[Package]:
    """Ask apt's index for `roots` and all that they may need."""
    text = await _apt(["apt-cache", "depends", "--recurse", *ONLY_DEPENDS, *roots])
    names = {line for line in text.splitlines() if NAME.fullmatch(line)} | set(roots)
    index = await _apt(["apt-cache", "show", "--no-all-versions", *sorted(names)])
    return select(roots, parse_index(index))


async def _apt(argv: list[str]) -> str:
    # Exit status 100 says that some name is only virtual; `select` misses what matters.
    done = await run(argv, timeout_s=QUERY_TIMEOUT_S, check=False, environment=_apt_environment())
    if done.returncode not in (0, 100):
        raise Unavailable(f"{argv[0]} failed: {_last_line(done.stderr)}")
    return done.stdout.decode(errors="replace")


async def _download(missing: list[Package], cache: Path, progress: Progress) -> None:
    size_bytes = sum(package.size_bytes for package in missing)
    progress(f"downloading {len(missing)} Debian packages, {size_bytes / 1e6:.1f} MB")
    with _download_dir(cache) as directory:
        exact = [f"{package.name}={package.version}" for package in missing]
        done = await run(
            ["apt-get", "-q", *IMPATIENT, "download", *exact],
            timeout_s=DOWNLOAD_TIMEOUT_S,
            check=False,
            environment=_apt_environment(),
            cwd=str(directory),
        )
        if done.returncode != 0:
            raise Unavailable(
                f"apt-get download failed: {_last_line(done.stderr)}",
                hint="run `apt-get update`, and check that Debian's mirror can be reached",
            )
        for package in missing:
            if not await anyio.to_thread.run_sync(_intact, directory, package):
                raise DataLoss(f"{package.file_name} is not what apt's index promised")
            (directory / package.file_name).replace(cache / package.file_name)


def _apt_environment() -> dict[str, str]:
    """Return what the environment says about apt: its configuration, the way to a mirror."""
    return {name: os.environ[name] for name in APT_VARIABLES if name in os.environ}


@contextmanager
def _download_dir(cache: Path) -> Iterator[Path]:
    """A directory that apt's sandbox user can write to, when we are root."""
    directory = Path(tempfile.mkdtemp(prefix=DOWNLOAD_PREFIX, dir=cache))
    try:
        if os.geteuid() == 0:
            try:
                user = pwd.getpwnam(APT_USER)
            except KeyError:
                pass  # apt itself then downloads as root
            else:
                os.chown(directory, user.pw_uid, -1)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _from_cache(cache: Path) -> Resolution | None:
    """Return the recorded resolution if it is ours and every file is intact."""
    try:
        known = msgspec.json.decode((cache / RESOLUTION).read_bytes(), type=Resolution)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    if known.roots != list(ROOTS) or not all(_intact(cache, one) for one in known.packages):
        return None
    return known if _has_kernel(known) else None


def _has_kernel(known: Resolution) -> bool:
    """Tell whether every part of the kernel is there: an older recipe knew of one part only."""
    there = {package.name for package in known.packages}
    needed = {name for package in known.packages for name in package.depends}
    return all(name in there for name in needed if VERSIONED_KERNEL.match(name))


def _intact(directory: Path, package: Package) -> bool:
    try:
        return sha256_file(directory / package.file_name) == package.sha256
    except FileNotFoundError:
        return False


def _last_line(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("E:")]
    return (errors or lines or ["no message"])[-1][:300]
