"""Resolution of packages from apt's index, and the cache that makes apt unnecessary."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chv.common.errors import FailedPrecondition
from chv.guest import apt
from chv.guest.apt import Package, Resolution, parse_index, select

INDEX = """\
Package: linux-image-cloud-amd64
Version: 6.1.1
Section: kernel
Depends: linux-image-6.1.0-9-cloud-amd64 (= 6.1.1)
SHA256: aa

Package: linux-image-6.1.0-9-cloud-amd64
Version: 6.1.1
Section: kernel
Depends: kmod, initramfs-tools (>= 0.120) | linux-initramfs-tool
Size: 100
SHA256: bb

Package: dropbear-bin
Version: 2025.1-1
Section: net
Pre-Depends: libc6 (>= 2.38)
Depends: libtomcrypt1t64 (>= 1.18.2), libodd1 | libodd0, adduser
Description: text
 Package: trap
SHA256: cc

Package: libtomcrypt1t64
Version: 1:2
Section: non-free/libs
Depends: libc6:any, dropbear-bin
SHA256: dd

Package: libc6
Version: 2.41
Section: libs
SHA256: ee

Package: libc6
Version: 2.40
Section: libs
SHA256: older

Package: libodd1
Version: 1
Section: oldlibs
SHA256: ff

Package: adduser
Version: 3
Section: admin
SHA256: 00
"""


def test_libraries_and_the_versioned_kernel_follow_from_the_roots() -> None:
    chosen = select(["linux-image-cloud-amd64", "dropbear-bin"], parse_index(INDEX))
    assert [package.name for package in chosen] == [
        "dropbear-bin",
        "libc6",
        "libodd1",
        "libtomcrypt1t64",
        "linux-image-6.1.0-9-cloud-amd64",
        "linux-image-cloud-amd64",
    ]


def test_the_first_stanza_of_a_name_wins_for_it_is_the_candidate() -> None:
    assert parse_index(INDEX)["libc6"]["Version"] == "2.41"


def test_an_epoch_is_quoted_as_apt_does_in_file_names() -> None:
    chosen = {package.name: package for package in select(["dropbear-bin"], parse_index(INDEX))}
    assert chosen["libtomcrypt1t64"].file_name == "libtomcrypt1t64_1%3a2_amd64.deb"


def test_a_root_that_apt_does_not_know_is_named_with_a_remedy() -> None:
    with pytest.raises(FailedPrecondition, match="busybox-static") as caught:
        select(["busybox-static"], parse_index(INDEX))
    assert "apt-get update" in caught.value.hint


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    content = b"a package"
    package = Package(
        name="one",
        version="1",
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        depends=[],
    )
    (tmp_path / package.file_name).write_bytes(content)
    known = Resolution(roots=list(apt.ROOTS), packages=[package])
    (tmp_path / apt.RESOLUTION).write_bytes(msgspec.json.encode(known))
    return tmp_path


class AptWasAsked(Exception):
    """Raised in place of running apt."""


@pytest.fixture(autouse=True)
def no_apt(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*args: Any, **options: Any) -> None:
        raise AptWasAsked

    monkeypatch.setattr(apt, "run", refuse)


async def test_a_complete_cache_needs_neither_apt_nor_network(cache: Path) -> None:
    found = await apt.packages(cache, lambda message: None)
    assert found == {"one": cache / "one_1_amd64.deb"}


async def test_a_damaged_package_in_the_cache_is_not_used(cache: Path) -> None:
    (cache / "one_1_amd64.deb").write_bytes(b"other bytes")
    with pytest.raises(AptWasAsked):
        await apt.packages(cache, lambda message: None)


async def test_a_cache_of_other_roots_is_resolved_again(cache: Path) -> None:
    known = msgspec.json.decode((cache / apt.RESOLUTION).read_bytes(), type=Resolution)
    other = msgspec.structs.replace(known, roots=["something"])
    (cache / apt.RESOLUTION).write_bytes(msgspec.json.encode(other))
    with pytest.raises(AptWasAsked):
        await apt.packages(cache, lambda message: None)


async def test_debris_of_a_killed_download_is_removed(cache: Path) -> None:
    debris = cache / f"{apt.DOWNLOAD_PREFIX}x1"
    debris.mkdir()
    (debris / "half.deb").write_bytes(b"half")
    await apt.packages(cache, lambda message: None)
    assert not debris.exists()


async def test_a_cache_that_lacks_a_part_of_the_kernel_is_resolved_anew(cache: Path) -> None:
    known = msgspec.json.decode((cache / apt.RESOLUTION).read_bytes(), type=Resolution)
    part = msgspec.structs.replace(known.packages[0], depends=["linux-modules-7.2-cloud"])
    incomplete = msgspec.structs.replace(known, packages=[part])
    (cache / apt.RESOLUTION).write_bytes(msgspec.json.encode(incomplete))
    with pytest.raises(AptWasAsked):
        await apt.packages(cache, lambda message: None)
