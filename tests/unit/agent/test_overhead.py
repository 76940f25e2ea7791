"""The bound of what a VM takes beside its guest's memory: it grows with what the VM has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chv.agent.resources.overhead import (
    MIB,
    Shape,
    overhead_bytes,
    qcow2_cache_bytes,
    storage_bytes,
    vmm_bytes,
)

GIB = 1 << 30
SHAPES = st.builds(
    Shape,
    driver=st.sampled_from(("", "qemu", "cloud-hypervisor", "fake")),
    accelerator=st.sampled_from(("", "kvm", "tcg")),
    vcpus=st.integers(1, 512),
    memory_bytes=st.integers(MIB, 1 << 44),
    disks=st.integers(0, 16),
    proxies=st.integers(0, 16),
    nics=st.integers(0, 8),
    cache_bytes=st.integers(0, GIB),
)


@given(SHAPES, st.sampled_from(("vcpus", "memory_bytes", "disks", "proxies", "nics")))
def test_more_of_anything_never_takes_less(shape: Shape, field: str) -> None:
    more = replace(shape, **{field: getattr(shape, field) * 2 + 1})
    assert overhead_bytes(more) >= overhead_bytes(shape)


@given(SHAPES)
def test_what_is_not_chosen_yet_counts_as_the_dearest(shape: Shape) -> None:
    unknown = replace(shape, driver="", accelerator="")
    chosen = [("qemu", "tcg"), ("qemu", "kvm"), ("cloud-hypervisor", "kvm")]
    for driver, accelerator in chosen:
        known = replace(shape, driver=driver, accelerator=accelerator)
        assert overhead_bytes(unknown) >= overhead_bytes(known)


@given(SHAPES)
def test_the_whole_is_the_sum_of_its_processes(shape: Shape) -> None:
    parts = vmm_bytes(shape) + storage_bytes(shape)
    assert overhead_bytes(shape) >= parts
    assert storage_bytes(replace(shape, disks=0)) == 0


@pytest.mark.parametrize(
    ("driver", "accelerator", "measured_mib"),
    [("qemu", "tcg", 130.5), ("cloud-hypervisor", "kvm", 6.9)],
)
def test_the_bound_is_above_what_was_measured(
    driver: str, accelerator: str, measured_mib: float
) -> None:
    shape = Shape(driver=driver, accelerator=accelerator, memory_bytes=256 * MIB, nics=1)
    assert 1.1 < vmm_bytes(shape) / MIB / measured_mib < 2.5


def test_tables_of_a_large_disk_are_bounded_by_the_drivers_cache() -> None:
    assert qcow2_cache_bytes(8 * GIB) == 2 * (MIB + MIB)
    assert qcow2_cache_bytes(1 << 44) == 2 * 32 * MIB
