"""qemu-img under the tools uid: files lent and given back, keys unseen, errors typed."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from chv.common.errors import (
    ChvError,
    DataLoss,
    FailedPrecondition,
    Internal,
    InUse,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
)
from chv.common.layout import Layout
from chv.common.process import Completed
from chv.stord import acl
from chv.stord import tools as module
from chv.stord.keys import Key
from chv.stord.tools import Call, Tools, check_reachable, json_image
from tests.integration.stord_helpers import mounted_tmpfs, short_root

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("qemu-img") is None, reason="needs root and qemu-img"
    ),
]
MIB = 1 << 20
KEY = Key("default/one", b"correct horse battery staple")
CREATE_LOCKED = ["create", "-q", "--object", "secret,id=k,file={key}"]
OTHER_KEY = Key("default/two", b"this one opens nothing at all")


@pytest.fixture
def root() -> Iterator[Path]:
    with short_root() as path:
        yield path


@pytest.fixture
def layout(root: Path) -> Layout:
    layout = Layout("tools1", root / "run", root / "state")
    layout.state.mkdir(parents=True, mode=0o711)
    layout.state_root.chmod(0o711)
    return layout


@pytest.fixture
def disk(layout: Layout) -> Path:
    path = layout.state / "disk.qcow2"
    path.touch(mode=0o600)
    return path


def owner(path: Path) -> tuple[int, int]:
    return path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)


async def create(tools: Tools, disk: Path, *options: str) -> None:
    await tools.qemu_img(["create", "-q", "-f", "qcow2", *options, str(disk), "16M"], owns=[disk])


async def test_the_command_owns_its_file_while_it_runs_and_root_does_afterwards(
    layout: Layout, disk: Path
) -> None:
    tools = Tools(layout)
    await create(tools, disk)
    assert owner(disk) == (0, 0o600)
    assert disk.read_bytes()[:4] == b"QFI\xfb"
    assert list((layout.state / "grants").iterdir()) == []


async def test_a_private_file_is_readable_for_the_length_of_the_call_only(
    layout: Layout, disk: Path
) -> None:
    tools = Tools(layout)
    await create(tools, disk)
    completed = await tools.qemu_img(
        ["info", "--output=json", "-f", "qcow2", str(disk)], reads=[disk]
    )
    assert json.loads(completed.stdout)["virtual-size"] == 16 * MIB
    assert owner(disk) == (0, 0o600)
    assert acl.readers(disk) == []


async def test_a_file_that_was_not_lent_stays_closed_to_the_tool(
    layout: Layout, disk: Path
) -> None:
    tools = Tools(layout)
    await create(tools, disk)
    with pytest.raises(PermissionDenied):
        await tools.qemu_img(["info", "-f", "qcow2", str(disk)])


async def test_progress_is_told_as_it_comes(layout: Layout, disk: Path) -> None:
    tools, seen = Tools(layout), list[float]()
    source = layout.state / "source.raw"
    source.write_bytes(os.urandom(4 * MIB))
    await create(tools, disk)
    await tools.convert(
        {"driver": "raw", "file": {"driver": "file", "filename": str(source)}},
        {"driver": "qcow2", "file": {"driver": "file", "filename": str(disk)}},
        Call(owns=(disk,), reads=(source,)),
        seen.append,
    )
    assert seen == sorted(seen)
    assert seen[-1] == 100.0
    compared = ["compare", "-f", "raw", "-F", "qcow2", str(source), str(disk)]
    await tools.run(compared, Call(reads=(disk, source)))  # what one has more must be zeros


@pytest.mark.parametrize("luks", ["luks", "qcow2"])
async def test_a_wrong_key_is_an_error_that_names_key_and_volume(
    layout: Layout, disk: Path, luks: str
) -> None:
    tools = Tools(layout)
    prefix = "" if luks == "luks" else "encrypt."
    options = f"{prefix}key-secret=k,{prefix}iter-time=10"
    if luks == "qcow2":
        options += ",encrypt.format=luks"
    await tools.qemu_img(
        [*CREATE_LOCKED, "-f", luks, "-o", options, str(disk), "1M"],
        owns=[disk],
        key=KEY,
    )
    node: dict[str, object] = {"driver": luks, "file": {"driver": "file", "filename": str(disk)}}
    node |= (
        {"key-secret": "k"}
        if luks == "luks"
        else {"encrypt": {"format": "luks", "key-secret": "k"}}
    )
    argv = ["compare", json_image(node), json_image(node)]
    await tools.run(argv, Call(reads=(disk,), keys={"k": KEY}, volume_id="v1"))
    with pytest.raises(PermissionDenied, match="key default/two does not open volume v1"):
        await tools.run(argv, Call(reads=(disk,), keys={"k": OTHER_KEY}, volume_id="v1"))


async def test_the_key_is_in_no_argument_and_no_environment(layout: Layout, disk: Path) -> None:
    tools, seen = Tools(layout), list[bytes]()

    async def look() -> None:
        while True:
            for entry in Path("/proc").glob("[0-9]*"):
                try:
                    if b"qemu-img" in (line := (entry / "cmdline").read_bytes()):
                        seen.append(line + (entry / "environ").read_bytes())
                except (FileNotFoundError, ProcessLookupError, PermissionError):
                    continue
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look)
        await tools.qemu_img(
            [*CREATE_LOCKED, "-f", "luks", "-o", "key-secret=k,iter-time=10", str(disk), "1M"],
            owns=[disk],
            key=KEY,
        )
        tasks.cancel_scope.cancel()
    assert seen
    assert all(KEY.reveal() not in text for text in seen)
    assert any(b"secret,id=k" in text for text in seen)


async def test_errors_are_typed(layout: Layout, disk: Path, root: Path) -> None:
    tools = Tools(layout)
    with pytest.raises(NotFound, match="absent"):
        await tools.qemu_img(["info", "absent"], owns=[disk.with_name("absent")])
    with pytest.raises(DataLoss, match=r"disk\.qcow2") as lost:
        await tools.qemu_img(["check", "-f", "qcow2", str(disk)], owns=[disk])
    assert "restore" in lost.value.hint
    with pytest.raises(Internal, match="failed with code 1"):
        await tools.qemu_img(["create", "-f", "nonsense", str(disk), "1M"], owns=[disk])
    with mounted_tmpfs(root / "small", "1m"):
        small = root / "small" / "disk.raw"
        small.touch(mode=0o600)
        options = ["-o", "preallocation=full"]
        with pytest.raises(ResourceExhausted, match=r"small/disk\.raw"):
            await tools.qemu_img(
                ["create", "-q", "-f", "raw", *options, str(small), "8M"], owns=[small]
            )
    assert owner(disk) == (0, 0o600)


async def test_a_copy_without_space_names_the_place_that_is_full(
    layout: Layout, root: Path, disk: Path
) -> None:
    source = disk.with_name("source.raw")
    source.write_bytes(os.urandom(4 * MIB))
    with mounted_tmpfs(root / "small", "1m"):
        small = root / "small" / "disk.raw"
        small.touch(mode=0o600)
        os.truncate(small, 4 * MIB)
        copy = ["convert", "-n", "-f", "raw", "-O", "raw", str(source), str(small)]
        with pytest.raises(ResourceExhausted) as caught:
            await Tools(layout).qemu_img(copy, owns=[source, small])
        assert caught.value.message == f"no space for {str(small)!r}"


async def test_a_disk_that_another_process_writes_is_in_use(layout: Layout, disk: Path) -> None:
    tools = Tools(layout)
    await create(tools, disk)
    holder = subprocess.Popen(
        [
            "qemu-storage-daemon",
            "--blockdev",
            f"driver=qcow2,node-name=a,file.driver=file,file.filename={disk}",
            "--pidfile",
            str(layout.state / "pid"),
        ]
    )
    try:
        with anyio.fail_after(5):
            while not (layout.state / "pid").exists():
                await anyio.sleep(0.01)
        with pytest.raises(InUse, match=r"disk\.qcow2"):
            await tools.qemu_img(["check", "-f", "qcow2", str(disk)], owns=[disk])
    finally:
        holder.kill()
        holder.wait()


async def test_a_loan_of_a_killed_daemon_is_given_back_at_the_next_start(
    layout: Layout, disk: Path
) -> None:
    other = disk.with_name("other")
    other.write_bytes(b"x")
    other.chmod(0o600)
    script = (
        "import os\nfrom pathlib import Path\nfrom chv.common.ids import Ids\n"
        "from chv.stord.grants import Grants\n"
        f"Grants(Path({str(layout.state)!r}) / 'grants', {layout.tools_uid}, Ids())"
        f".give([Path({str(disk)!r})], [Path({str(other)!r})])\nos._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert disk.stat().st_uid == layout.tools_uid
    assert acl.readers(other) == [layout.tools_uid]
    assert Tools(layout).sweep() == [str(disk), str(other)]
    assert owner(disk) == (0, 0o600)
    assert owner(other) == (0, 0o600)
    assert acl.readers(other) == []
    assert Tools(layout).sweep() == []


async def test_one_file_is_lent_to_one_command_at_a_time(layout: Layout, disk: Path) -> None:
    tools = Tools(layout)
    grants = tools._grants
    token = grants.give([disk], [])
    with pytest.raises(InUse, match="another command"):
        await create(tools, disk)
    grants.take_back(token)
    await create(tools, disk)


async def test_a_cancelled_command_is_dead_and_its_file_is_roots(
    layout: Layout, disk: Path
) -> None:
    tools = Tools(layout)
    source = layout.state / "source.raw"
    source.write_bytes(os.urandom(8 * MIB))
    await create(tools, disk)
    argv = ["convert", "-n", "-r", "1M", "-f", "raw", "-O", "qcow2", str(source), str(disk)]
    with anyio.move_on_after(0.3) as scope:
        await tools.qemu_img(argv, owns=[disk], reads=[source])
    assert scope.cancelled_caught
    assert owner(disk) == (0, 0o600)
    assert list((layout.state / "grants").iterdir()) == []


def test_a_directory_that_keeps_others_out_is_named(root: Path) -> None:
    closed = root / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(FailedPrecondition, match="closed") as refused:
        check_reachable(closed / "file")
    assert refused.value.hint == f"chmod o+x {closed}"
    closed.chmod(0o711)
    assert check_reachable(closed / "file") == closed / "file"


@pytest.mark.parametrize(("bad", "works"), [(4, True), (5, False)])
async def test_a_key_derivation_that_could_not_be_timed_is_tried_again(
    layout: Layout, disk: Path, monkeypatch: pytest.MonkeyPatch, bad: int, works: bool
) -> None:
    answers = [Completed(1, b"", b"qemu-img: x: Unable to get accurate CPU usage\n")] * bad
    answers.append(Completed(0, b"", b""))
    asked = iter(answers)

    async def run(*_arguments: object, **_options: object) -> Completed:
        return next(asked)

    monkeypatch.setattr(module, "run", run)
    if works:
        await create(Tools(layout), disk)
        assert next(asked, None) is None
        return
    with pytest.raises(ChvError, match="accurate CPU usage"):
        await create(Tools(layout), disk)
