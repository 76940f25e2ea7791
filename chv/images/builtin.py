"""Images that CHV brings or makes: built once per machine, then imported into a store.

The build directory, `<cache_dir>/tiny-<codename>/`, is shared by every node of the machine; a
lock file lets one of them build while the others wait for its result. It is separate from the
stores, so that a second node costs no second build.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from chv.common.errors import DeadlineExceeded, NotFound
from chv.guest.tiny import FORMATS, TinyImage, build_tiny, load_tiny
from chv.images.copying import Progress
from chv.images.store import Artifact, ImageStore
from chv.probe import image

PROBE = "probe"  # comes with the package: nothing to build
BUILTIN_NAMES = ("tiny", PROBE)
# An Image's artifact by the file that the build makes.
ARTIFACT_NAMES = {"kernel": "kernel", "initramfs": "initramfs", "disk.raw": "disk"}
LOCK_POLL_S = 0.1
LOCK_TIMEOUT_S = 900.0
UNSAFE = re.compile(r"[^a-z0-9.]+")


async def ensure_builtin(
    name: str, cache_dir: Path, store: ImageStore, progress: Progress
) -> dict[str, Artifact]:
    """Return the artifacts of a builtin image by name; build and import only what is missing."""
    if name not in BUILTIN_NAMES:
        raise NotFound(
            f"there is no builtin image {name!r}",
            field="spec.source.builtin",
            hint=f"one of {', '.join(BUILTIN_NAMES)}",
        )
    if name == PROBE:
        kernel = await store.import_file(image.ELF_PATH, FORMATS["kernel"], image.sha256())
        return {"kernel": kernel}
    # The cheap answer first: a finished build is never changed in place.
    out = cache_dir / f"{name}-{codename()}"
    tiny = load_tiny(out)
    if tiny is not None and _stored(tiny, store):
        return await _import(tiny, store)
    cache_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
    async with exclusive(cache_dir / f".{out.name}.lock", progress):
        tiny = load_tiny(out) or await build_tiny(out, out / "debs", progress=progress)
        return await _import(tiny, store)


def codename() -> str:
    """Return the distribution's code name, which decides the packages: `bookworm`, `trixie`."""
    release = platform.freedesktop_os_release()
    text = release.get("VERSION_CODENAME") or release.get("ID", "linux")
    return UNSAFE.sub("-", text.lower())


def _stored(tiny: TinyImage, store: ImageStore) -> bool:
    return all(store.get(built.sha256) for built in tiny.manifest.artifacts.values())


async def _import(tiny: TinyImage, store: ImageStore) -> dict[str, Artifact]:
    return {
        ARTIFACT_NAMES[file]: await store.link_file(tiny.path(file), FORMATS[file], built.sha256)
        for file, built in tiny.manifest.artifacts.items()
    }


@asynccontextmanager
async def exclusive(lock: Path, progress: Progress) -> AsyncIterator[None]:
    """Hold a file lock; the kernel gives it back when its holder dies."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        await _acquire(descriptor, lock, progress)
        yield
    finally:
        os.close(descriptor)


async def _acquire(descriptor: int, lock: Path, progress: Progress) -> None:
    told = False
    try:
        with anyio.fail_after(LOCK_TIMEOUT_S):
            while not _try_lock(descriptor):
                if not told:
                    progress("waiting for another node that builds the same image")
                    told = True
                await anyio.sleep(LOCK_POLL_S)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{lock} was held for {LOCK_TIMEOUT_S:.0f} s") from error


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
