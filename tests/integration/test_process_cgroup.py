"""Cgroup v2 for real: grouping, killing descendants, and clearing away; and without it, plain."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import pytest

from chv.common.errors import FailedPrecondition, InUse
from chv.common.process import (
    AdoptVerdict,
    CgroupProvider,
    Limits,
    PlainProvider,
    become,
    choose_provider,
    procfs,
    syscalls,
    verify,
    wait_gone,
)
from chv.common.process.providers import cgroup, find_hierarchy
from tests.helpers import wait_until
from tests.integration.process_helpers import new_layout, open_provider, python_worker, sleeper

HIERARCHY = find_hierarchy()
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or HIERARCHY is None, reason="needs root and a writable cgroup v2"
    ),
]
FORKER = "import os,time;pid=os.fork();os.setsid() if not pid else None;time.sleep(99)"


@pytest.fixture
async def provider() -> AsyncIterator[CgroupProvider]:
    async with open_provider("cgroup") as made:
        assert isinstance(made, CgroupProvider)
        yield made


def members(leaf: str) -> list[int]:
    return [int(line) for line in Path(leaf, "cgroup.procs").read_text().split()]


async def test_a_worker_lives_in_a_leaf_of_its_own(provider: CgroupProvider) -> None:
    spec = sleeper(provider.layout, cgroup="vm1")
    record = await provider.spawn(spec)
    assert Path(record.cgroup).parent == provider.base
    assert Path(record.cgroup).name == "vm1-" + spec.worker_id.rpartition(":")[2]
    assert members(record.cgroup) == [record.pid]
    assert procfs.cgroup(os.getpid()) != procfs.cgroup(record.pid)


async def test_a_worker_is_born_in_its_leaf_and_joins_it_where_the_kernel_cannot_do_that(
    provider: CgroupProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_fd: int) -> int:
        raise OSError(errno.ENOSYS, "not in this sandbox")

    steps = tuple((name, step) for name, step in become._STEPS if name != "cgroup")
    with monkeypatch.context() as born:
        born.setattr(become, "_STEPS", steps)
        first = await provider.spawn(sleeper(provider.layout))
    monkeypatch.setattr(syscalls, "fork_into_cgroup", refused)
    second = await provider.spawn(sleeper(provider.layout))

    assert members(first.cgroup) == [first.pid]
    assert members(second.cgroup) == [second.pid]


async def test_kill_reaches_descendants_in_other_sessions(provider: CgroupProvider) -> None:
    record = await provider.spawn(python_worker(provider.layout, FORKER))
    await wait_until(lambda: len(members(record.cgroup)) == 2)
    assert await provider.kill(record, signal.SIGKILL)
    await wait_gone(record)
    await wait_until(lambda: members(record.cgroup) == [])
    await provider.cleanup(record)
    assert not Path(record.cgroup).exists()


async def test_cleanup_ends_descendants_of_a_worker_that_died_alone(
    provider: CgroupProvider,
) -> None:
    record = await provider.spawn(python_worker(provider.layout, FORKER))
    await wait_until(lambda: len(members(record.cgroup)) == 2)
    os.kill(record.pid, signal.SIGKILL)
    await wait_gone(record)
    await provider.cleanup(record)
    assert not Path(record.cgroup).exists()


async def test_descendants_are_killed_without_the_kernels_help_too(
    provider: CgroupProvider,
) -> None:
    record = await provider.spawn(python_worker(provider.layout, FORKER))
    await wait_until(lambda: len(members(record.cgroup)) == 2)
    cgroup._kill_one_by_one(Path(record.cgroup))
    await wait_until(lambda: members(record.cgroup) == [])


async def test_a_record_that_points_elsewhere_never_touches_that_cgroup(
    provider: CgroupProvider,
) -> None:
    async with open_provider("cgroup") as other:
        foreign = await other.spawn(sleeper(other.layout))
        mine = await provider.spawn(sleeper(provider.layout))
        forged = msgspec.structs.replace(mine, cgroup=foreign.cgroup)
        await provider.kill(forged, signal.SIGKILL)
        await wait_gone(mine)
        await provider.cleanup(forged)
        assert verify(foreign) is AdoptVerdict.ALIVE
        assert Path(foreign.cgroup).exists()


async def test_a_leaf_with_processes_is_never_shared(provider: CgroupProvider) -> None:
    spec = sleeper(provider.layout)
    record = await provider.spawn(spec)
    with pytest.raises(InUse, match="processes already"):
        await provider.spawn(spec)
    assert verify(record) is AdoptVerdict.ALIVE
    assert members(record.cgroup) == [record.pid]


async def test_sweep_removes_leaves_without_processes_only(provider: CgroupProvider) -> None:
    record = await provider.spawn(sleeper(provider.layout))
    (provider.base / "vmm-left-over").mkdir()
    assert await provider.sweep() == ["vmm-left-over"]
    assert members(record.cgroup) == [record.pid]
    assert await provider.sweep() == []


async def test_sweep_spares_a_leaf_whose_worker_is_just_being_started(
    provider: CgroupProvider,
) -> None:
    swept: list[str] = []

    async def sweep() -> None:
        for _ in range(50):
            swept.extend(await provider.sweep())
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(sweep)
        for _ in range(5):
            group.start_soon(provider.spawn, sleeper(provider.layout))
    assert swept == []
    assert len(provider.find(provider.layout.worker_prefix)) == 5


async def test_a_memory_limit_is_read_back_where_there_is_the_controller(
    provider: CgroupProvider,
) -> None:
    limits = Limits(memory_max_bytes=64 * 1024 * 1024, cpus_max=2, cpu_weight=200, pids_max=64)
    record = await provider.spawn(sleeper(provider.layout, limits=limits))
    wanted = {
        "memory.max": str(64 * 1024 * 1024),
        "cpu.max": "200000 100000",
        "cpu.weight": "200",
        "pids.max": "64",
    }
    for name, text in wanted.items():
        file = Path(record.cgroup, name)
        controlled = name.partition(".")[0] in provider.controllers
        assert file.exists() == controlled
        assert not controlled or file.read_text().strip() == text


async def test_another_instance_object_finds_and_clears_the_same_workers(
    provider: CgroupProvider,
) -> None:
    assert HIERARCHY is not None
    record = await provider.spawn(sleeper(provider.layout))
    successor = CgroupProvider(provider.layout, HIERARCHY)
    (found,) = successor.find(provider.layout.worker_prefix)
    assert found.record() == record
    await successor.kill(found.record(), signal.SIGKILL)
    await wait_gone(record)
    await successor.cleanup(record)
    await successor.retire()
    assert not provider.base.exists()


async def test_a_worker_starts_after_the_instances_directory_was_retired(
    provider: CgroupProvider,
) -> None:
    await provider.retire()
    assert verify(await provider.spawn(sleeper(provider.layout))) is AdoptVerdict.ALIVE


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("30 1 0:1 / {dir} rw - cgroup2 cgroup2 rw\n", True),
        ("30 1 0:1 / /a rw - tmpfs tmpfs rw\n31 1 0:2 / {dir} rw - cgroup2 none rw\n", True),
        ("30 1 0:1 / {dir} rw shared:9 master:1 - cgroup2 cgroup2 rw\n", True),
        ("30 1 0:1 / {dir} ro - cgroup2 cgroup2 rw\n", False),
        ("30 1 0:1 / {dir} rw - cgroup cgroup rw,memory\n", False),
        ("30 1 0:1 / /no/such/directory rw - cgroup2 cgroup2 rw\n", False),
    ],
    ids=["pure", "hybrid", "propagation", "read-only", "v1", "hidden"],
)
def test_only_a_writable_unified_hierarchy_is_used(
    tmp_path: Path, lines: str, expected: bool
) -> None:
    (tmp_path / "cgroup.procs").touch()
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(lines.format(dir=tmp_path))
    assert find_hierarchy(mountinfo) == (tmp_path if expected else None)


def test_a_host_without_a_hierarchy_gets_plain_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("chv.common.process.providers.find_hierarchy", lambda: None)
    assert isinstance(choose_provider(new_layout()), PlainProvider)


def test_limits_are_written_and_read_back_for_the_controllers_that_there_are(
    tmp_path: Path,
) -> None:
    """A directory of plain files stands for a leaf: they keep what is written, as the kernel's."""
    limits = Limits(memory_max_bytes=(1 << 20) + 7, cpus_max=3, cpu_weight=300, pids_max=99)
    for name in ("memory.max", "memory.oom.group", "pids.max", "cpu.max"):
        (tmp_path / name).touch()
    cgroup.limit(tmp_path, limits, frozenset({"memory", "pids"}))
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {
        "cpu.max": "",
        "memory.max": str(1 << 20),
        "memory.oom.group": "1",
        "pids.max": "99",
    }
    (tmp_path / "cpu.weight").symlink_to("/dev/null")
    with pytest.raises(FailedPrecondition, match=r"cpu.weight is  after writing 300"):
        cgroup.limit(tmp_path, limits, frozenset({"cpu"}))


def test_without_limits_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "memory.max").touch()
    cgroup.limit(tmp_path, Limits(), frozenset(cgroup.CONTROLLERS))
    assert (tmp_path / "memory.max").read_text() == ""


def test_a_memory_controller_that_cannot_be_had_is_not_claimed(tmp_path: Path) -> None:
    """A hierarchy of plain files stands for one that has the controller and passes it on."""
    base = tmp_path / "chv-abc123"
    base.mkdir()
    (tmp_path / "cgroup.controllers").write_text("cpu io\n")
    assert not cgroup._enable("memory", tmp_path, base)
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    (base / "cgroup.subtree_control").mkdir()
    with pytest.raises(IsADirectoryError):
        cgroup._enable("memory", tmp_path, base)
    (base / "cgroup.subtree_control").rmdir()
    (base / "cgroup.subtree_control").symlink_to("/proc/nothing/there")
    assert not cgroup._enable("memory", tmp_path, base)
