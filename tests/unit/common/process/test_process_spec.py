"""What may be started: checks of Program and SpawnSpec, and the errors of a start."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec
import pytest

from chv.common.errors import (
    ChvError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
)
from chv.common.process import Program, SpawnSpec
from chv.common.process.spec import (
    check,
    check_spawn,
    program_name,
    resolve,
    start_error,
    whole_environment,
)

WORKER_ID = "chv:abc123:vmm:0123456789:0badcafe"
GOOD = SpawnSpec(worker_id=WORKER_ID, argv=("prog", f"--name={WORKER_ID},x=1"))


def test_a_worker_whose_id_stands_alone_in_an_argument_is_accepted() -> None:
    check_spawn(GOOD)


@pytest.mark.parametrize(
    "argv",
    [
        ("prog",),
        ("prog", WORKER_ID + "0"),
        ("prog", WORKER_ID, WORKER_ID),
        ("prog", WORKER_ID, "chv:abc123:vmm:0123456789:11111111"),
    ],
    ids=["missing", "part of a longer id", "twice", "another id too"],
)
def test_a_worker_that_could_not_be_found_again_is_refused(argv: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgument) as raised:
        check_spawn(msgspec.structs.replace(GOOD, argv=argv))
    assert raised.value.field == "argv"


def test_a_malformed_worker_id_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="not a worker id"):
        check_spawn(SpawnSpec(worker_id="vm-1", argv=("prog", "vm-1")))


@pytest.mark.parametrize("leaf", ["../other", "a/b", ".hidden"])
def test_a_cgroup_leaf_never_leaves_the_instance(leaf: str) -> None:
    with pytest.raises(InvalidArgument, match="leaf"):
        check_spawn(msgspec.structs.replace(GOOD, cgroup=leaf))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"argv": ()}, "argv"),
        ({"argv": ("a\0b",)}, "argv"),
        ({"environment": {"A=B": "c"}}, "environment"),
        ({"environment": {"": "c"}}, "environment"),
        ({"fds": {-1: 0}}, "fds"),
        ({"fds": {100000: 0}}, "fds"),
        ({"uid": -1}, "uid"),
        ({"uid": 2**32}, "uid"),
        ({"uid": 1000}, "gid"),
        ({"uid": 1000, "gid": 1000, "groups": (0,)}, "gid"),
        ({"keep_capabilities": ("CAP_FLY",)}, "keep_capabilities"),
        ({"netns": "relative"}, "netns"),
    ],
)
def test_a_program_that_the_kernel_would_misread_is_refused(
    change: dict[str, object], field: str
) -> None:
    program = msgspec.structs.replace(Program(argv=("prog",)), **change)
    with pytest.raises(InvalidArgument) as raised:
        check(program)
    assert raised.value.field == field


def test_only_the_given_environment_and_three_names_are_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RUST_BACKTRACE", "1")
    environment = whole_environment(Program(argv=("a",), environment={"X": "1", "HOME": "/h"}))
    assert set(environment) == {"PATH", "LANG", "HOME", "X"}
    assert environment["HOME"] == "/h"
    assert environment["LANG"] == "C.UTF-8"


def test_a_program_that_is_not_installed_is_named() -> None:
    with pytest.raises(NotFound, match="no-such-program"):
        resolve(Program(argv=("no-such-program",)))


def test_a_relative_path_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="relative"):
        resolve(Program(argv=("./prog",)))


def test_the_executable_is_found_in_the_path_of_its_own_environment(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    program = Program(argv=("argv0",), executable="tool", environment={"PATH": str(tmp_path)})
    assert resolve(program) == str(tool)


def test_the_name_shown_has_no_arguments_and_no_directory() -> None:
    assert program_name(Program(argv=("/usr/bin/tool", "--key=hush"))) == "tool"


@pytest.mark.parametrize(
    ("stage", "number", "expected"),
    [
        ("exec", errno.ENOENT, NotFound),
        ("exec", errno.EACCES, PermissionDenied),
        ("exec", errno.ENOEXEC, FailedPrecondition),
        ("fork", errno.EAGAIN, ResourceExhausted),
        ("netns", errno.EINVAL, FailedPrecondition),
        ("identity", errno.EPERM, PermissionDenied),
        ("directory", errno.ENOENT, FailedPrecondition),
    ],
)
def test_a_failed_start_is_a_typed_error_that_names_the_program(
    stage: str, number: int, expected: type[ChvError]
) -> None:
    error = start_error(Program(argv=("tool", "--key=hush")), stage, number)
    assert type(error) is expected
    assert "tool" in str(error)
    assert "hush" not in str(error)
