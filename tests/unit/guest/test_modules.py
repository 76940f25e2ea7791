"""Module order from the modules' own dependency records."""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from chv.common.errors import FailedPrecondition
from chv.guest.debs import Deb
from chv.guest.modules import KernelModules, kernel_image
from tests.unit.guest.deb_maker import make_deb


def module(depends: str) -> bytes:
    return b"\x7fELF...\0license=GPL\0depends=" + depends.encode() + b"\0intree=Y\0"


@pytest.fixture
def modules(tmp_path: Path) -> Iterator[KernelModules]:
    base = "usr/lib/modules/6.1-cloud"
    files = {
        f"{base}/modules.builtin": b"kernel/fs/ext4/ext4.ko\nkernel/drivers/x/built-in.ko\n",
        f"{base}/kernel/drivers/virtio/virtio.ko": module("virtio_ring"),
        f"{base}/kernel/drivers/virtio/virtio_ring.ko": module(""),
        f"{base}/kernel/drivers/net/virtio_net.ko.xz": lzma.compress(module("virtio,failover")),
        f"{base}/kernel/net/core/failover.ko": module("built_in"),
        f"{base}/kernel/drivers/char/virtio-rng.ko": module("virtio"),
    }
    with Deb(make_deb(tmp_path / "linux.deb", files), tmp_path) as deb:
        yield KernelModules(deb)


def test_dependencies_come_first_and_once(modules: KernelModules) -> None:
    order = modules.ordered(["virtio_net", "virtio-rng"])
    assert order == ["virtio_ring", "virtio", "failover", "virtio_net", "virtio_rng"]


def test_what_is_loaded_or_built_in_is_left_out(modules: KernelModules) -> None:
    assert modules.ordered(["ext4", "virtio_rng"], ["virtio_ring", "virtio"]) == ["virtio_rng"]


def test_a_compressed_module_is_stored_plain(modules: KernelModules) -> None:
    assert modules.content("virtio_net").startswith(b"\x7fELF")


def test_a_module_that_no_kernel_has_is_named(modules: KernelModules) -> None:
    with pytest.raises(FailedPrecondition, match="flux_capacitor"):
        modules.ordered(["flux_capacitor"])


def test_a_kernel_that_is_split_over_packages_is_put_together(tmp_path: Path) -> None:
    base = "usr/lib/modules/7.2-cloud"
    shipped = {
        "base": {f"{base}/modules.builtin": b"kernel/fs/ext4/ext4.ko\n"},
        "binary": {f"{base}/vmlinuz": b"the kernel"},
        "modules": {f"{base}/kernel/drivers/block/virtio_blk.ko": module("ext4")},
    }
    with ExitStack() as stack:
        parts = [
            stack.enter_context(Deb(make_deb(tmp_path / f"{name}.deb", files), tmp_path))
            for name, files in shipped.items()
        ]
        assert kernel_image(parts) == b"the kernel"
        assert KernelModules(*parts).ordered(["virtio_blk"]) == ["virtio_blk"]
        with pytest.raises(FailedPrecondition, match="no kernel in base"):
            kernel_image([parts[0], parts[2]])
