"""Paths from outside: nothing leads out of its directory, by text, link or swap."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chv.common import paths
from chv.common.errors import InvalidArgument
from chv.common.paths import PATH_BYTES_MAX, open_beneath, resolve_inside

Open = Callable[[str, int], int]

OUTSIDE = ["/etc/passwd", "..", "../x", "a/../../x", "a/..", "a\0b", "", ".", "./", "\ud800"]
OUTSIDE += ["x/" * (PATH_BYTES_MAX // 2) + "y"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    base = tmp_path / "base"
    (base / "sub").mkdir(parents=True)
    (base / "sub" / "file").write_text("inside")
    (tmp_path / "secret").write_text("outside")
    (base / "link_out").symlink_to(tmp_path / "secret")
    (base / "dir_out").symlink_to(tmp_path)
    (base / "link_in").symlink_to("sub/file")
    (base / "loop").symlink_to("loop")
    return base


@pytest.fixture(params=["openat2", "walk"])
def opener(
    request: pytest.FixtureRequest, base: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Open]:
    """Open below `base`, by the system call and by the walk that replaces it on old kernels."""
    if request.param == "walk":

        def not_there(*_: object) -> int:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(paths, "_openat2", not_there)
    root = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
    yield lambda path, flags: open_beneath(root, path, flags)
    os.close(root)


@pytest.mark.parametrize("relative", OUTSIDE)
def test_text_that_leads_out_is_refused(base: Path, relative: str, opener: Open) -> None:
    with pytest.raises(InvalidArgument):
        resolve_inside(base, relative)
    with pytest.raises(InvalidArgument):
        opener(relative, os.O_RDONLY)


@pytest.mark.parametrize(
    "relative", ["link_out", "dir_out/secret", "dir_out/base/sub", "loop", "loop/x"]
)
def test_a_link_that_leads_out_is_refused(base: Path, relative: str, opener: Open) -> None:
    if relative != "dir_out/base/sub":  # goes out and comes back: harmless once resolved
        with pytest.raises(InvalidArgument):
            resolve_inside(base, relative)
    with pytest.raises(InvalidArgument):
        opener(relative, os.O_RDONLY)


def test_a_link_to_the_directory_itself_is_refused(base: Path) -> None:
    (base / "self").symlink_to(base)
    with pytest.raises(InvalidArgument):
        resolve_inside(base, "self")


@pytest.mark.parametrize("relative", ["sub/file", "./sub//file", "sub", "new/not/there"])
def test_a_path_inside_is_resolved(base: Path, relative: str) -> None:
    assert resolve_inside(base, relative) == (base / relative).resolve()


def test_a_link_that_stays_inside_resolves_to_what_it_names(base: Path) -> None:
    assert resolve_inside(base, "link_in") == base.resolve() / "sub" / "file"


def test_a_file_inside_is_opened_and_not_inherited(opener: Open) -> None:
    fd = opener("./sub//file", os.O_RDONLY)
    try:
        assert os.read(fd, 100) == b"inside"
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_not_even_a_link_inside_is_followed_at_open(opener: Open) -> None:
    for flags in (os.O_RDONLY, os.O_PATH):
        with pytest.raises(InvalidArgument, match="symbolic link"):
            opener("link_in", flags)


def test_a_file_can_be_made_below(base: Path, opener: Open) -> None:
    fd = opener("sub/new", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.close(fd)
    assert (base / "sub" / "new").stat().st_mode & 0o777 == 0o600


def test_a_missing_file_is_the_kernels_error(opener: Open) -> None:
    with pytest.raises(FileNotFoundError):
        opener("sub/nothing", os.O_RDONLY)
    with pytest.raises(NotADirectoryError):
        opener("sub/file/x", os.O_RDONLY)


def test_a_directory_swapped_for_a_link_after_the_check_is_refused(
    base: Path, opener: Open
) -> None:
    assert resolve_inside(base, "sub/file")
    (base / "sub").rename(base / "old")
    (base / "sub").symlink_to(base.parent)
    with pytest.raises(InvalidArgument):
        opener("sub/secret", os.O_RDONLY)


def test_no_descriptor_is_leaked_by_refusals(base: Path, opener: Open) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for relative in [*OUTSIDE, "link_out", "dir_out/secret", "loop/x", "link_in"]:
        with pytest.raises(InvalidArgument):
            opener(relative, os.O_PATH)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
