"""The limits of a VMM's cgroup leave room for all that the guest and its VMM may take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chv.agent.resources.overhead import MIB, Shape, vmm_bytes
from chv.agent.resources.vmm_limits import vmm_limits
from chv.vmm.driver import VmmConfig

CONFIGS = st.builds(
    VmmConfig,
    vm_id=st.just("u"),
    name=st.just("n"),
    worker_id=st.just("w"),
    runtime_dir=st.just("/r"),
    uuid=st.just("u"),
    cpus=st.integers(1, 64),
    cpus_max=st.sampled_from((0, 1, 64)),
    memory_bytes=st.integers(16, 1 << 20).map(lambda mib: mib * MIB),
    memory_max_bytes=st.sampled_from((0, 1 << 40)),
    accelerator=st.sampled_from(("kvm", "tcg")),
)


@given(CONFIGS, st.sampled_from(("qemu", "cloud-hypervisor", "fake")))
def test_the_limit_is_above_what_may_ever_be_plugged_and_its_overhead(
    config: VmmConfig, driver: str
) -> None:
    limits = vmm_limits(driver, config)
    guest = max(config.memory_bytes, config.memory_max_bytes)
    vcpus = max(config.cpus, config.cpus_max)
    shape = Shape(driver=driver, accelerator=config.accelerator, vcpus=vcpus, memory_bytes=guest)
    assert limits.memory_max_bytes > guest + vmm_bytes(shape)
    assert limits.cpus_max > vcpus
    assert 1 <= limits.cpu_weight <= 10_000
    assert limits.pids_max > 4 * vcpus
