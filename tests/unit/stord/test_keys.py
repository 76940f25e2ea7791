"""Key files: read where they are safe, refused by name where they are not, never shown."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from chv.common.errors import ChvError, FailedPrecondition, NotFound, PermissionDenied
from chv.common.layout import Layout
from chv.stord.keys import is_wrong_key, read_key, wrong_key

VALUE = b"correct horse battery staple"


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout("keys01", tmp_path / "run", tmp_path / "state")
    layout.keys.mkdir(parents=True)
    layout.keys.chmod(0o700)
    (layout.keys / "default").mkdir(mode=0o700)
    return layout


@pytest.fixture
def key(layout: Layout) -> Path:
    path = layout.keys / "default" / "disk"
    path.write_bytes(VALUE)
    path.chmod(0o600)
    return path


def test_the_key_is_the_file_byte_for_byte_and_does_not_print(layout: Layout, key: Path) -> None:
    found = read_key(layout, "default/disk")
    assert found.reveal() == VALUE
    assert found.name == "default/disk"
    assert VALUE.decode() not in f"{found} {found!r}"


def test_a_key_that_is_not_there_is_named(layout: Layout) -> None:
    with pytest.raises(NotFound, match="default/absent"):
        read_key(layout, "default/absent")
    with pytest.raises(NotFound, match="other/disk"):
        read_key(layout, "other/disk")


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o666, 0o601])
def test_a_key_that_others_can_reach_is_refused(layout: Layout, key: Path, mode: int) -> None:
    key.chmod(mode)
    with pytest.raises(PermissionDenied, match="default/disk"):
        read_key(layout, "default/disk")


def test_a_key_below_a_directory_that_others_write_is_refused(layout: Layout, key: Path) -> None:
    key.parent.chmod(0o777)
    with pytest.raises(PermissionDenied, match="may write"):
        read_key(layout, "default/disk")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.root
def test_a_key_of_another_uid_is_refused(layout: Layout, key: Path) -> None:
    os.chown(key, 12345, 12345)
    with pytest.raises(PermissionDenied, match="belongs to uid 12345"):
        read_key(layout, "default/disk")


def link_out(key: Path) -> None:
    outside = key.parents[2] / "outside"
    outside.write_bytes(VALUE)
    outside.chmod(0o600)
    key.unlink()
    key.symlink_to(outside)


def make_directory(key: Path) -> None:
    key.unlink()
    key.mkdir(mode=0o700)


def make_fifo(key: Path) -> None:
    key.unlink()
    os.mkfifo(key, 0o600)


@pytest.mark.parametrize("spoil", [link_out, make_directory, make_fifo])
def test_what_is_not_a_file_of_its_own_is_refused(
    layout: Layout, key: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(key)
    with pytest.raises(PermissionDenied, match="default/disk"):
        read_key(layout, "default/disk")


@pytest.mark.parametrize("value", [b"", b"short", b"x" * 5000])
def test_a_key_of_no_sensible_length_is_refused_without_being_shown(
    layout: Layout, key: Path, value: bytes
) -> None:
    key.write_bytes(value)
    with pytest.raises(FailedPrecondition, match=f"has {min(len(value), 4097)} bytes") as refused:
        read_key(layout, "default/disk")
    assert value == b"" or value.decode() not in str(refused.value)


def test_no_error_shows_the_key(layout: Layout, key: Path) -> None:
    key.chmod(0o644)
    with pytest.raises(ChvError) as refused:
        read_key(layout, "default/disk")
    assert VALUE.decode() not in str(refused.value)


def test_qemus_text_of_a_wrong_key_is_known() -> None:
    assert is_wrong_key("Could not open 'x': Invalid password, cannot unlock any keyslot")
    assert not is_wrong_key("Could not open 'x': Permission denied")
    assert "the key a/b does not open volume v" in str(wrong_key("a/b", "v"))
