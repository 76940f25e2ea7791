"""Failpoints: the language, each action, the guard, and that they cost nothing when off."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from chv.common import failpoint as module
from chv.common.errors import FailedPrecondition, InvalidArgument, Unavailable
from chv.common.failpoint import configure, failpoint, failpoint_sync, hits, reset

NAME = "test.point"


@pytest.fixture(autouse=True)
def _off_before_and_after() -> Iterator[None]:
    reset()
    yield
    reset()


def run_with(terms: str, code: str, **more: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "CHV_TEST_BUILD": "1", "CHV_FAILPOINTS": terms, **more}
    program = f"import anyio\nfrom chv.common.failpoint import *\n{code}"
    return subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=30
    )


async def test_a_point_does_nothing_when_off() -> None:
    await failpoint(NAME)
    failpoint_sync(NAME)
    assert hits() == {}


async def test_hits_are_counted_when_on() -> None:
    configure("")
    await failpoint(NAME)
    failpoint_sync(NAME)
    failpoint_sync("test.other")
    assert hits() == {NAME: 2, "test.other": 1}


async def test_counted_terms_follow_each_other_and_then_end() -> None:
    configure(f"{NAME}=2*off->1*error(EIO)->1*error(UNAVAILABLE)")
    failpoint_sync(NAME)
    await failpoint(NAME)
    with pytest.raises(OSError, match=NAME) as caught:
        await failpoint(NAME)
    assert caught.value.errno == errno.EIO
    with pytest.raises(Unavailable, match=NAME):
        failpoint_sync(NAME)
    failpoint_sync(NAME)
    assert hits() == {NAME: 5}


async def test_an_uncounted_term_is_for_ever() -> None:
    configure(f"{NAME}=1*off->error(ENOSPC)")
    failpoint_sync(NAME)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            failpoint_sync(NAME)


async def test_points_do_not_touch_each_other() -> None:
    configure(f"{NAME}=error(EIO); test.other=1*error(EPERM) ;")
    with pytest.raises(PermissionError):
        failpoint_sync("test.other")
    failpoint_sync("test.third")
    with pytest.raises(OSError, match="Input/output"):
        failpoint_sync(NAME)


async def test_a_delay_waits_that_long() -> None:
    configure(f"{NAME}=delay(30)")
    started = time.monotonic()
    await failpoint(NAME)
    failpoint_sync(NAME)
    assert time.monotonic() - started >= 0.059


async def test_a_hang_can_be_cancelled() -> None:
    configure(f"{NAME}=hang")
    with anyio.move_on_after(0.05) as scope:
        await failpoint(NAME)
    assert scope.cancelled_caught


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "a.b",
        "a.b=",
        "a.b=explode",
        "A.b=off",
        "ab=off",
        "a.b=off->",
        "a.b=-1*off",
        "a.b=error",
        "a.b=error(ENOTHING)",
        "a.b=error(errorcode)",
        "a.b=delay",
        "a.b=delay(x)",
        "a.b=kill(9)",
        "a.b=exit(256)",
        "a.b=off\n",
        "a.b=off;a.b=kill",
        "a.b=1*2*off",
        "a.b=9999999*off",
        "a.b=delay(99999999)",
    ],
)
def test_a_malformed_term_is_refused_and_changes_nothing(text: str) -> None:
    configure("a.b=error(EIO)")
    if text == "a.b=off\n":
        return  # surrounding space is allowed
    with pytest.raises(InvalidArgument, match="CHV_FAILPOINTS"):
        configure(text)
    with pytest.raises(OSError, match=r"a\.b"):
        failpoint_sync("a.b")


def test_kill_ends_the_process_without_clean_up() -> None:
    code = "try: failpoint_sync('a.b')\nfinally: print('tidied', flush=True)"
    done = run_with("a.b=kill", code)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == ""


def test_kill_works_in_async_code_too() -> None:
    assert run_with("a.b=1*kill", "anyio.run(failpoint, 'a.b')").returncode == -signal.SIGKILL


@pytest.mark.parametrize(("term", "status"), [("exit", 70), ("exit(3)", 3)])
def test_exit_ends_the_process_with_a_status(term: str, status: int) -> None:
    done = run_with(f"a.b={term}", "try: failpoint_sync('a.b')\nfinally: print('tidied')")
    assert (done.returncode, done.stdout) == (status, "")


def test_the_log_gets_a_line_for_each_hit(tmp_path: Path) -> None:
    log = tmp_path / "hits"
    code = "failpoint_sync('a.b'); failpoint_sync('c.d'); failpoint_sync('a.b')"
    done = run_with("", code, CHV_FAILPOINTS_LOG=str(log))
    assert done.returncode == 0, done.stderr
    assert log.read_text().split() == ["a.b", "c.d", "a.b"]
    run_with("c.d=kill", "failpoint_sync('c.d')", CHV_FAILPOINTS_LOG=str(log))
    assert log.read_text().split()[-1] == "c.d", "a hit is logged before it kills"


@pytest.mark.parametrize("build", ["", "0", "true"])
def test_start_up_refuses_failpoints_outside_a_test_build(build: str) -> None:
    done = run_with("a.b=off", "require_allowed()", CHV_TEST_BUILD=build)
    assert done.returncode != 0
    assert "not a test build" in done.stderr


def test_a_process_that_does_not_ask_is_refused_at_its_first_point() -> None:
    done = run_with("a.b=off", "print('imported')\nfailpoint_sync('x.y')", CHV_TEST_BUILD="")
    assert done.stdout == "imported\n"
    assert "not a test build" in done.stderr


def test_a_malformed_environment_is_refused_at_start_up() -> None:
    done = run_with("a.b=explode", "require_allowed()")
    assert "is not a failpoint term" in done.stderr


def test_the_guard_passes_where_nothing_is_asked() -> None:
    module.from_environment({"CHV_TEST_BUILD": "1"})
    module.require_allowed()
    with pytest.raises(FailedPrecondition):
        module.from_environment({"CHV_FAILPOINTS": "a.b=off"})
        module.require_allowed()


def test_a_point_that_is_off_costs_about_a_function_call() -> None:
    def nothing(name: str) -> None:
        return None

    def best_of(function: object, rounds: int = 7, count: int = 20_000) -> float:
        call = function
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            for _ in range(count):
                call(NAME)  # type: ignore[operator]
            times.append(time.perf_counter() - started)
        return min(times)

    assert best_of(failpoint_sync) < 4 * best_of(nothing)
