"""Reading packages: compressions, merged directories, links, damage."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from chv.common.errors import DataLoss, NotFound, Unsupported
from chv.guest.debs import Deb, canonical
from tests.unit.guest.deb_maker import make_deb


@pytest.mark.parametrize("suffix", ["xz", "gz", "tar"])
def test_a_file_is_read_from_every_compression_that_debian_used(
    tmp_path: Path, suffix: str
) -> None:
    path = make_deb(tmp_path / "a.deb", {"bin/tool": b"content"}, suffix)
    with Deb(path, tmp_path) as deb:
        assert deb.read("bin/tool") == b"content"


def test_merged_and_unmerged_paths_name_the_same_file(tmp_path: Path) -> None:
    path = make_deb(tmp_path / "a.deb", {"usr/lib/x.so": b"merged", "etc/x": b"etc"})
    with Deb(path, tmp_path) as deb:
        assert deb.read("lib/x.so") == deb.read("/usr/lib/x.so") == b"merged"
        assert deb.read("etc/x") == b"etc"
    assert canonical("./usr/share/doc") == "usr/share/doc"


def test_links_are_followed_within_the_package(tmp_path: Path) -> None:
    files = {
        "usr/lib/x.so.1.2": b"real",
        "usr/lib/x.so.1": b"->x.so.1.2",
        "lib/y": b"->/lib/x.so.1",
    }
    with Deb(make_deb(tmp_path / "a.deb", files), tmp_path) as deb:
        assert deb.read("lib/x.so.1") == deb.read("lib/y") == b"real"


@pytest.mark.parametrize("files", [{"lib/a": b"->b", "lib/b": b"->a"}, {"lib/a": b"->gone"}])
def test_a_link_that_leads_nowhere_is_not_found(tmp_path: Path, files: dict[str, bytes]) -> None:
    with (
        Deb(make_deb(tmp_path / "a.deb", files), tmp_path) as deb,
        pytest.raises(NotFound, match="lib/a"),
    ):
        deb.read("lib/a")


@pytest.mark.parametrize("cut", [0, 4, 100, 200])
def test_a_damaged_package_is_named(tmp_path: Path, cut: int) -> None:
    path = make_deb(tmp_path / "broken.deb", {"bin/tool": b"content" * 1000})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataLoss, match=r"broken\.deb"):
        Deb(path, tmp_path)


def test_nothing_is_left_in_the_scratch_directory_while_a_package_is_open(tmp_path: Path) -> None:
    path = make_deb(tmp_path / "a.deb", {"bin/tool": b"content"})
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with Deb(path, scratch):
        assert list(scratch.iterdir()) == []


def test_an_unknown_compression_is_unsupported(tmp_path: Path) -> None:
    path = make_deb(tmp_path / "a.deb", {"bin/tool": b"content"}, "lzip")
    with pytest.raises(Unsupported, match="lzip"):
        Deb(path, tmp_path)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python reads zstd")
def test_zstd_without_a_codec_says_so(tmp_path: Path) -> None:
    path = make_deb(tmp_path / "a.deb", {"bin/tool": b"content"}, "zst")
    with pytest.raises(Unsupported, match="zstd"):
        Deb(path, tmp_path)
