"""What a confined process cannot reach, though its uid could: files by Landlock, the network."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from chv.common.errors import InvalidArgument, NotFound
from chv.common.process import Access, PathAccess, landlock, landlock_abi, run
from chv.common.process.child import start_child
from chv.common.process.spec import Program, check
from tests.leftovers import scratch

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change uid and namespaces"),
]
with_landlock = pytest.mark.skipif(landlock_abi() == 0, reason="the kernel has no Landlock")
USER = 1_999_998
SYSTEM = tuple(
    PathAccess(path, Access.EXECUTE, optional=True)
    for path in ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
)


async def shell(text: str, *rules: PathAccess, empty_netns: bool = False) -> tuple[int, str]:
    done = await run(
        ("/bin/sh", "-c", text),
        timeout_s=10,
        uid=USER,
        gid=USER,
        check=False,
        landlock=(*SYSTEM, *rules) if rules else (),
        empty_netns=empty_netns,
    )
    return done.returncode, (done.stdout + done.stderr).decode()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that the user may do everything in."""
    root = scratch()
    root.chmod(0o711)
    for name in ("allowed", "other"):
        directory = root / name
        directory.mkdir()
        directory.chmod(0o777)
        (directory / "file").write_text(f"the {name} one\n")
        (directory / "file").chmod(0o666)
    yield root
    shutil.rmtree(root)


@with_landlock
async def test_only_the_listed_paths_can_be_opened(place: Path) -> None:
    rule = PathAccess(str(place / "allowed"), Access.READ)
    assert (await shell(f"cat {place}/allowed/file", rule)) == (0, "the allowed one\n")
    for path in (f"{place}/other/file", "/etc/passwd", f"{place}/allowed/../other/file"):
        code, said = await shell(f"cat {path}", rule)
        assert code != 0
        assert "Permission denied" in said
    assert (await shell(f"cat {place}/other/file"))[0] == 0  # without rules it may


@with_landlock
@pytest.mark.parametrize(
    ("access", "reads", "writes", "makes"),
    [
        (Access.READ, True, False, False),
        (Access.WRITE, True, True, False),
        (Access.OWN, True, True, True),
        (Access.DEVICE, True, True, False),
    ],
)
async def test_each_access_allows_what_it_says(
    place: Path, access: Access, reads: bool, writes: bool, makes: bool
) -> None:
    rule = PathAccess(str(place / "allowed"), access)
    here = place / "allowed"
    assert ((await shell(f"cat {here}/file", rule))[0] == 0) is reads
    assert ((await shell(f"echo more > {here}/file", rule))[0] == 0) is writes
    assert ((await shell(f"echo new > {here}/new", rule))[0] == 0) is makes
    assert ((await shell(f"rm {here}/file", rule))[0] == 0) is makes
    for never in (f"mkdir {here}/sub", f"ln -s x {here}/link", f"mkfifo {here}/pipe"):
        assert (await shell(never, rule))[0] != 0


@with_landlock
async def test_a_rule_for_one_file_is_for_that_file(place: Path) -> None:
    rule = PathAccess(str(place / "allowed" / "file"), Access.WRITE)
    assert (await shell(f"echo more > {place}/allowed/file", rule))[0] == 0
    (place / "allowed" / "beside").write_text("x")
    assert (await shell(f"cat {place}/allowed/beside", rule))[0] != 0


@with_landlock
async def test_only_what_is_listed_for_it_can_be_executed(place: Path) -> None:
    tool = place / "allowed" / "tool"
    tool.write_text("#!/bin/sh\necho ran\n")
    tool.chmod(0o755)
    assert (await shell(str(tool), PathAccess(str(place / "allowed"), Access.READ)))[0] == 126
    assert (await shell(str(tool), PathAccess(str(place / "allowed"), Access.EXECUTE)))[0] == 0


async def test_a_missing_path_is_told_unless_it_may_be_missing(place: Path) -> None:
    missing = str(place / "missing")
    if landlock_abi():
        with pytest.raises(NotFound, match="missing"):
            await shell("true", PathAccess(missing, Access.READ))
    assert await shell("true", PathAccess(missing, Access.READ, optional=True)) == (0, "")


async def test_a_kernel_without_landlock_restricts_nothing_and_says_so(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: 0)
    assert landlock.make_ruleset(SYSTEM) == -1
    rule = PathAccess(str(place / "allowed"), Access.READ)
    assert (await shell(f"cat {place}/other/file", rule))[0] == 0


async def test_an_empty_network_is_another_one_with_nothing_in_it() -> None:
    own = Path("/proc/self/ns/net").readlink()
    code, there = await shell("readlink /proc/self/ns/net; cat /proc/net/dev", empty_netns=True)
    assert code == 0
    assert str(own) not in there
    devices = [line.split(":")[0].strip() for line in there.splitlines() if ":" in line[:10]]
    assert [name for name in devices if name != "net"] == ["lo"]


async def test_in_an_empty_network_nothing_can_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        argv = ("/usr/bin/python3", "-c", code)
        reached = await run(argv, timeout_s=10, uid=USER, gid=USER, check=False)
        assert reached.returncode == 0, reached.stderr
        alone = await run(argv, timeout_s=10, uid=USER, gid=USER, check=False, empty_netns=True)
        assert alone.returncode != 0
        assert b"unreachable" in alone.stderr


async def test_a_confined_process_keeps_no_descriptor_of_its_rules(place: Path) -> None:
    code, listed = await shell(
        "ls /proc/self/fd | wc -l", PathAccess("/proc", Access.READ), empty_netns=True
    )
    assert code == 0
    assert int(listed) <= 4  # three streams and the directory itself


def test_contradictions_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="not both"):
        check(Program(argv=("true",), netns="/run/netns/x", empty_netns=True))
    rules = (PathAccess("/usr", Access.READ),)
    with pytest.raises(InvalidArgument, match="no_new_privs"):
        check(Program(argv=("true",), landlock=rules, no_new_privs=False))


async def own_devices(text: str, *devices: str) -> str:
    """Run a shell as the user with nodes of its own; return what it printed."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    with os.fdopen(reader) as output:
        try:
            child = await start_child(
                Program(
                    argv=("/bin/sh", "-c", text),
                    uid=USER,
                    gid=USER,
                    fds={1: writer},
                    own_devices=devices,
                )
            )
        finally:
            os.close(writer)
        with anyio.fail_after(10):
            await child.wait()
        return output.read()


async def test_a_device_that_is_roots_alone_gets_a_node_that_nobody_else_sees() -> None:
    secret = Path("/dev") / f"chv-test-{os.getpid()}"
    os.mknod(secret, 0o020600, os.makedev(1, 5))  # what /dev/zero is
    try:
        refused, _ = await shell(f"head -c 3 {secret}")
        text = f"head -c 3 {secret} | wc -c; stat -c %a:%u:%g {secret}; cat /run/node"
        counted, mode = (await own_devices(text, str(secret))).split()
        after = secret.stat()
    finally:
        secret.unlink()
    assert refused != 0
    assert (counted, mode) == ("3", f"660:0:{USER}")
    assert (after.st_mode & 0o777, after.st_gid) == (0o600, 0)


async def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(NotFound, match="/dev/chv-nothing"):
        await own_devices("true", "/dev/chv-nothing")
