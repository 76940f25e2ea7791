"""Which driver a VM gets. Pure: probes come in, a choice and its reason go out.

The choice is made once per VM and stored with it. Fails with Unsupported, saying for each driver
that was considered why it is not usable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from chv.common.errors import Unsupported
from chv.common.wire.resources import VmmChoice
from chv.vmm.driver import DriverProbe

FAKE = "fake"
AUTO = "auto"
PREFERENCE = ("cloud-hypervisor", "qemu")
OVERRIDE_VARIABLE = "CHV_VMM"


def configured(config_driver: str, environment: Mapping[str, str]) -> str:
    """Return the node's driver setting; the environment overrides the file."""
    return environment.get(OVERRIDE_VARIABLE, "") or config_driver or AUTO


def choose(config_driver: str, spec_choice: str, probes: Iterable[DriverProbe]) -> tuple[str, str]:
    """Return (driver name, reason) for a VM that asks for `spec_choice`."""
    known = {probe.driver: probe for probe in probes}
    if config_driver == FAKE:
        return FAKE, "this node is configured for the fake driver"
    candidates, why = _candidates(config_driver, spec_choice)
    passed_by: list[str] = []
    for name in candidates:
        probe = known.get(name)
        if probe is not None and probe.usable and (probe.auto or len(candidates) == 1):
            return name, "; ".join([_reason(probe, why), *passed_by])
        passed_by.append(f"{name}: {_refusal(probe)}")
    seen = "; ".join(passed_by)
    raise Unsupported(f"no usable VMM: {seen}", field="spec.vmm")


def _candidates(config_driver: str, spec_choice: str) -> tuple[tuple[str, ...], str]:
    asked = config_driver if spec_choice == VmmChoice.AUTO else spec_choice
    if config_driver not in (AUTO, asked):
        raise Unsupported(
            f"the VM asks for {spec_choice}, this node is configured for {config_driver}",
            field="spec.vmm",
        )
    if spec_choice != VmmChoice.AUTO:
        return (asked,), "the VM asks for it"
    if asked != AUTO:
        return (asked,), "the node is configured for it"
    return PREFERENCE, "first usable one"


def _reason(probe: DriverProbe, why: str) -> str:
    with_accelerator = f" with {probe.accelerator}" if probe.accelerator else ""
    detail = f": {probe.reason}" if probe.reason else ""
    return f"{why}{with_accelerator}{detail}"


def _refusal(probe: DriverProbe | None) -> str:
    return "not probed" if probe is None else probe.reason or "not usable"
