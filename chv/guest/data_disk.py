"""Makes the tiny image's data disk: a small ext4 file system, the same bytes every time.

mke2fs gets a fixed uuid, hash seed, clock and feature list (the host's mke2fs.conf has no say);
what it still copies from the host, the change times of the source files, debugfs sets afterwards.
Needs e2fsprogs, not root.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from chv.common.errors import FailedPrecondition, NotFound
from chv.common.process import run
from chv.common.process.spec import DEFAULT_PATH

LABEL = "chv-data"
UUID = "c4a1d05e-0000-4000-8000-000000000001"
SIZE_MIB = 64
EPOCH = 1_700_000_000
TOOL_TIMEOUT_S = 60.0
FEATURES = (
    "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,"
    "large_file,huge_file,dir_nlink,extra_isize,metadata_csum"
)
README = "This disk is the guest's own: write what you like. Reset the volume to start over.\n"
FIXED_ENV = {
    "E2FSPROGS_FAKE_TIME": str(EPOCH),
    "SOURCE_DATE_EPOCH": str(EPOCH),
    "MKE2FS_CONFIG": "/dev/null",
    "TZ": "UTC",
    "PATH": DEFAULT_PATH,
}
MKE2FS = (
    *("mke2fs", "-q", "-F", "-t", "ext4", "-O", FEATURES, "-b", "4096", "-I", "256", "-N", "4096"),
    *("-m", "0", "-L", LABEL, "-U", UUID),
    *("-E", f"hash_seed={UUID},root_owner=0:0,lazy_itable_init=0,lazy_journal_init=0"),
)
INODES = ("<2>", "<11>", "/README")  # the root directory, lost+found, our file
TIMES = ("ctime", "atime", "mtime", "crtime")


async def make_data_disk(path: Path) -> None:
    """Write the file system to `path`, which must not exist yet."""
    with tempfile.TemporaryDirectory(prefix=".content-", dir=path.parent) as directory:
        content = Path(directory)
        content.chmod(0o755)
        readme = content / "README"
        readme.write_text(README)
        readme.chmod(0o644)
        for entry in (readme, content):
            os.utime(entry, (EPOCH, EPOCH))
        await _tool([*MKE2FS, "-d", str(content), str(path), f"{SIZE_MIB}m"])
    requests = [f"set_inode_field {inode} {field} @{EPOCH}" for inode in INODES for field in TIMES]
    requests += [f"set_inode_field {inode} {field}_extra 0" for inode in INODES for field in TIMES]
    requests += [f"set_inode_field /README {owner} 0" for owner in ("uid", "gid")]
    await _tool(["debugfs", "-w", "-f", "-", str(path)], "\n".join(requests).encode() + b"\n")


async def _tool(argv: list[str], stdin: bytes | None = None) -> None:
    try:
        done = await run(
            argv, stdin=stdin, timeout_s=TOOL_TIMEOUT_S, check=False, environment=FIXED_ENV
        )
    except NotFound as error:
        raise FailedPrecondition(
            f"{argv[0]} is not installed", hint="apt-get install e2fsprogs"
        ) from error
    if done.returncode != 0:
        message = done.stderr.decode(errors="replace").strip()[-300:]
        raise FailedPrecondition(f"{argv[0]} failed: {message}")
