"""Probing of VMMs: a try-boot only where it teaches something, once per boot and guest."""

from __future__ import annotations

from pathlib import Path

import pytest

from chv.agent import probes as module
from chv.agent.probes import Probes, settings_of
from chv.common.config import VmmConfig
from chv.common.errors import Unsupported
from chv.common.wire.resources import VmmChoice
from chv.vmm.driver import DriverProbe, ProbeGuest
from chv.vmm.fake_driver import FakeDriver


class Driver(FakeDriver):
    """A driver named qemu that notes what it was asked."""

    name = "qemu"

    def __init__(self, missing: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.missing = missing
        self.guests: list[ProbeGuest | None] = []
        self.recalled: list[DriverProbe] = []

    async def probe(self, guest: ProbeGuest | None) -> DriverProbe:
        self.guests.append(guest)
        accelerator = "kvm" if guest else "tcg"
        return DriverProbe(
            driver="qemu",
            usable=True,
            accelerator=accelerator,
            version="7.2",
            missing=self.missing if guest else (),
        )

    def recall(self, result: DriverProbe) -> None:
        self.recalled.append(result)


@pytest.fixture
def kvm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvm").touch()
    monkeypatch.setattr(module, "KVM", tmp_path / "kvm")


def make(driver: Driver, tmp_path: Path, settings: VmmConfig | None = None) -> Probes:
    return Probes(settings or VmmConfig(), {"qemu": driver}, tmp_path / "cache")


@pytest.mark.usefixtures("kvm")
async def test_kvm_is_tried_by_booting_and_the_result_is_kept_for_the_boot(tmp_path: Path) -> None:
    first, second = Driver(), Driver()
    assert (await make(first, tmp_path).select(VmmChoice.AUTO)).accelerator == "kvm"
    assert [guest is not None for guest in first.guests] == [False, True]
    assert (await make(second, tmp_path).select(VmmChoice.AUTO)).accelerator == "kvm"
    assert second.guests == [None]
    assert second.recalled[-1].accelerator == "kvm"


@pytest.mark.usefixtures("kvm")
async def test_another_boot_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await make(Driver(), tmp_path).ensure()
    monkeypatch.setattr(module, "boot_id", lambda: "another")
    driver = Driver()
    await make(driver, tmp_path).ensure()
    assert len(driver.guests) == 2


@pytest.mark.usefixtures("kvm")
async def test_kvm_off_in_the_configuration_boots_nothing(tmp_path: Path) -> None:
    driver = Driver()
    selection = await make(driver, tmp_path, VmmConfig(kvm="off")).select(VmmChoice.AUTO)
    assert (selection.accelerator, driver.guests) == ("tcg", [None])


async def test_machine_without_kvm_boots_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KVM", tmp_path / "absent")
    driver = Driver()
    await make(driver, tmp_path).ensure()
    assert driver.guests == [None]


@pytest.mark.usefixtures("kvm")
async def test_another_mode_of_the_device_tries_again(tmp_path: Path) -> None:
    await make(Driver(), tmp_path).ensure()
    module.KVM.chmod(0o600)
    driver = Driver()
    await make(driver, tmp_path).ensure()
    assert len(driver.guests) == 2


@pytest.mark.usefixtures("kvm")
async def test_what_one_vmm_misses_spares_the_next_the_search(tmp_path: Path) -> None:
    first, second = Driver(missing=("popcnt", "clac")), Driver()
    drivers = {"first": first, "qemu": second}
    await Probes(VmmConfig(), drivers, tmp_path / "cache").ensure()
    guest = second.guests[-1]
    assert guest is not None
    assert guest.missing == ("popcnt", "clac")
    assert set(guest.missing) < set(guest.instructions)


@pytest.mark.usefixtures("kvm")
async def test_damaged_cache_is_probed_anew(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / module.CACHE_FILE).write_text("{")
    driver = Driver()
    await make(driver, tmp_path).ensure()
    assert len(driver.guests) == 2


async def test_unusable_choice_says_why(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="not probed"):
        await make(Driver(), tmp_path, VmmConfig(kvm="off")).select(VmmChoice.CLOUD_HYPERVISOR)


def test_environment_overrides_the_configured_driver() -> None:
    assert settings_of(VmmConfig(), {"CHV_VMM": "fake"}).driver == "fake"
    assert settings_of(VmmConfig(driver="qemu"), {}).driver == "qemu"
