"""Identity of workers: parsing /proc, finding ids in argv, verdicts on records."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chv.common.process import AdoptVerdict, WorkerRecord, examine, procfs, scan, verify

WORKER_ID = "chv:tst9zz:vmm:0123456789:0badcafe"
WORDS = st.text(alphabet="abcxyz0189-_", min_size=1, max_size=8)


@pytest.fixture
def sleeper() -> Iterator[WorkerRecord]:
    with subprocess.Popen([WORKER_ID, "1000"], executable="/usr/bin/sleep") as process:
        stat = procfs.stat(process.pid)
        assert stat is not None
        yield WorkerRecord(
            worker_id=WORKER_ID,
            pid=process.pid,
            start_time=stat.start_time,
            boot_id=procfs.boot_id(),
            executable=os.path.realpath("/usr/bin/sleep"),
        )
        process.kill()


def test_a_command_name_with_blanks_and_parentheses_does_not_confuse_the_parser() -> None:
    tail = " ".join(str(number) for number in range(4, 53))
    stat = procfs.parse_stat(f"77 (a) b (R) S {tail}\n".encode())
    assert (stat.state, stat.parent_pid, stat.threads, stat.start_time) == ("S", 4, 20, 22)


def test_a_zombie_leader_with_running_threads_is_not_dead() -> None:
    assert not procfs.ProcessStat("Z", 1, 3, 1).dead
    assert procfs.ProcessStat("Z", 1, 1, 1).dead
    assert not procfs.ProcessStat("D", 1, 1, 1).dead


@given(st.tuples(WORDS, WORDS, WORDS, WORDS), st.sampled_from(["", "name=", "/run/", "a,b="]))
def test_every_id_is_found_where_it_stands_alone(words: tuple[str, ...], before: str) -> None:
    worker_id = ":".join(("chv", *words))
    for after in ("", ",x=1", ".sock", " more"):
        assert procfs.worker_ids(("prog", before + worker_id + after)) == [worker_id]


@pytest.mark.parametrize("text", [f"{WORKER_ID}:more", f"x{WORKER_ID}", "chv:a:b:c", "chv::a:b:c"])
def test_what_is_only_part_of_a_longer_word_is_no_id(text: str) -> None:
    assert WORKER_ID not in procfs.worker_ids((text,))
    assert not procfs.is_worker_id(text)


def test_argv_is_awaited_in_the_middle_of_an_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([(), (), ("prog", WORKER_ID)])
    monkeypatch.setattr(procfs, "cmdline", lambda _: next(seen))
    assert procfs.argv(os.getpid()) == ("prog", WORKER_ID)


def test_a_kernel_thread_has_no_argv_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "_EXEC_POLL_S", 3600.0)
    monkeypatch.setattr(procfs, "executable", lambda _: None)
    monkeypatch.setattr(procfs, "cmdline", lambda _: ())
    assert procfs.argv(2) == ()


def test_a_record_survives_json() -> None:
    record = WorkerRecord(worker_id=WORKER_ID, pid=1, start_time=2, boot_id="b", executable="/e")
    assert msgspec.json.decode(msgspec.json.encode(record), type=WorkerRecord) == record


def test_a_running_worker_is_alive(sleeper: WorkerRecord) -> None:
    assert verify(sleeper) is AdoptVerdict.ALIVE


def test_a_pid_with_another_start_time_belongs_to_somebody_else(sleeper: WorkerRecord) -> None:
    reused = msgspec.structs.replace(sleeper, start_time=sleeper.start_time - 1)
    assert verify(reused) is AdoptVerdict.OTHER
    assert AdoptVerdict.OTHER.dead


def test_a_record_of_an_earlier_boot_is_gone(sleeper: WorkerRecord) -> None:
    assert verify(msgspec.structs.replace(sleeper, boot_id="earlier")) is AdoptVerdict.GONE


def test_a_pid_that_nobody_has_is_gone(sleeper: WorkerRecord) -> None:
    assert verify(msgspec.structs.replace(sleeper, pid=2**22 + 1)) is AdoptVerdict.GONE


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"executable": "/usr/bin/other"}, "now runs"),
        ({"worker_id": "chv:tst9zz:vmm:0123456789:11111111"}, "does not carry"),
    ],
)
def test_a_process_that_turned_into_something_else_is_unknown(
    sleeper: WorkerRecord, change: dict[str, str], reason: str
) -> None:
    adoption = examine(msgspec.structs.replace(sleeper, **change))
    assert adoption.verdict is AdoptVerdict.UNKNOWN
    assert not adoption.verdict.dead
    assert reason in adoption.reason


def test_a_hidden_process_is_unknown(
    sleeper: WorkerRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(procfs, "stat", refuse)
    assert verify(sleeper) is AdoptVerdict.UNKNOWN


def test_a_zombie_is_gone_and_not_found() -> None:
    argv = [sys.executable, "-c", f"'{WORKER_ID}'"]
    process = subprocess.Popen(argv)
    stat = procfs.stat(process.pid)
    assert stat is not None
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    record = WorkerRecord(
        worker_id=WORKER_ID,
        pid=process.pid,
        start_time=stat.start_time,
        boot_id=procfs.boot_id(),
        executable=os.path.realpath(sys.executable),
    )
    assert verify(record) is AdoptVerdict.GONE
    assert scan("chv:tst9zz:") == []
    process.wait()


def test_a_scan_finds_by_prefix_and_tells_owner_and_program(sleeper: WorkerRecord) -> None:
    (found,) = scan("chv:tst9zz:vmm:")
    assert found.record() == msgspec.structs.replace(sleeper, cgroup=found.cgroup)
    assert found.uid == os.getuid()
    assert scan("chv:tst9zz:qsd:") == []
