"""Which driver a VM gets, and what is said about it."""

from __future__ import annotations

import pytest

from chv.common.errors import Unsupported
from chv.vmm.driver import DriverProbe
from chv.vmm.registry import make_drivers
from chv.vmm.select import choose, configured

QEMU = DriverProbe(driver="qemu", usable=True, accelerator="tcg", reason="no /dev/kvm")
NO_QEMU = DriverProbe(driver="qemu", usable=False, reason="not in PATH")
CLOUD = DriverProbe(driver="cloud-hypervisor", usable=True, accelerator="kvm")
NO_CLOUD = DriverProbe(driver="cloud-hypervisor", usable=False, reason="no KVM")
ASKED_FOR = DriverProbe(
    driver="cloud-hypervisor", usable=True, auto=False, reason="a stock kernel dies"
)


def test_auto_takes_the_first_usable_one_in_order_of_preference() -> None:
    assert choose("auto", "auto", [QEMU, CLOUD])[0] == "cloud-hypervisor"
    assert choose("auto", "auto", [QEMU])[0] == "qemu"


def test_the_reason_names_accelerator_and_what_was_seen() -> None:
    _, reason = choose("auto", "auto", [QEMU])
    assert "tcg" in reason
    assert "no /dev/kvm" in reason


def test_a_vm_that_asks_for_a_driver_gets_it_or_an_error_with_the_reason() -> None:
    assert choose("auto", "qemu", [QEMU, CLOUD])[0] == "qemu"
    with pytest.raises(Unsupported, match="cloud-hypervisor: no KVM"):
        choose("auto", "cloud-hypervisor", [QEMU, NO_CLOUD])


def test_auto_passes_by_what_runs_no_stock_kernel_and_says_why() -> None:
    name, reason = choose("auto", "auto", [ASKED_FOR, QEMU])
    assert name == "qemu"
    assert "cloud-hypervisor: a stock kernel dies" in reason
    assert choose("auto", "cloud-hypervisor", [ASKED_FOR, QEMU])[0] == "cloud-hypervisor"
    assert choose("cloud-hypervisor", "auto", [ASKED_FOR, QEMU])[0] == "cloud-hypervisor"
    with pytest.raises(Unsupported, match="a stock kernel dies"):
        choose("auto", "auto", [ASKED_FOR, NO_QEMU])


def test_the_nodes_own_choice_binds_vms_that_ask_for_nothing() -> None:
    assert choose("qemu", "auto", [QEMU, CLOUD])[0] == "qemu"
    with pytest.raises(Unsupported, match="configured for qemu"):
        choose("qemu", "cloud-hypervisor", [QEMU, CLOUD])


def test_with_nothing_usable_every_reason_is_named() -> None:
    with pytest.raises(Unsupported) as caught:
        choose("auto", "auto", [NO_CLOUD, NO_QEMU])
    assert "not in PATH" in str(caught.value)
    assert "no KVM" in str(caught.value)
    assert caught.value.field == "spec.vmm"


def test_a_driver_that_was_not_probed_is_not_usable() -> None:
    with pytest.raises(Unsupported, match="qemu: not probed"):
        choose("auto", "qemu", [])


def test_a_node_of_fakes_runs_every_vm_on_the_fake() -> None:
    for choice in ("auto", "qemu", "cloud-hypervisor"):
        assert choose("fake", choice, [])[0] == "fake"


def test_the_environment_overrides_the_configuration() -> None:
    assert configured("qemu", {"CHV_VMM": "fake"}) == "fake"
    assert configured("qemu", {}) == "qemu"
    assert configured("", {"CHV_VMM": ""}) == "auto"


async def test_every_driver_that_may_be_stored_with_a_vm_is_made() -> None:
    environment = {"CHV_FAKE": '{"boot_s": 2}', "CHV_CLOUD_HYPERVISOR": "/opt/ch-b:/opt/ch-c"}
    drivers = make_drivers(
        qemu_binary="/opt/qemu",
        cloud_hypervisor_binary=["/opt/ch-a"],
        environment=environment,
    )
    assert set(drivers) == {"cloud-hypervisor", "qemu", "fake"}
    seen = await drivers["qemu"].probe(None)
    assert "/opt/qemu" in seen.reason
    seen = await drivers["cloud-hypervisor"].probe(None)
    assert "/opt/ch-b" in seen.reason
    assert "/opt/ch-c" in seen.reason
    assert "/opt/ch-a" not in seen.reason
