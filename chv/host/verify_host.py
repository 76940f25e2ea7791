"""The host's part of `chv verify`: what KVM is good for, and the node's way out.

`verify_host` proves host and VMMs without an agent: storage and network need one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from chv.common.errors import ChvError
from chv.common.process import run
from chv.common.wire.agent import NodeStatusReply, VmmProbe
from chv.host.sandbox import Sandbox
from chv.host.verify import Check, Report, failure

IP_S_MAX = 5.0
KVM = Path("/dev/kvm")
CLOUD_HYPERVISOR = "cloud-hypervisor"


def kvm_check(status: NodeStatusReply, vmm: str) -> Check:
    """Judge KVM for what is to run: an emulated VM needs none, Cloud Hypervisor does."""
    by_name = {probe.name: probe for probe in status.vmms}
    gone = not KVM.exists()
    if vmm == CLOUD_HYPERVISOR:
        probe = by_name.get(vmm) or VmmProbe(name=vmm, usable=False, reason="not probed")
        if not probe.usable or gone:
            seen = f"no {KVM}" if gone else probe.reason
            words = failure(f"Cloud Hypervisor cannot run here: {seen}", "", "`chv doctor`")
            return Check("kvm", False, 0, words)
        return Check("kvm", True, 0, probe.reason)
    lost = [probe.name for probe in status.vmms if probe.accelerator == "kvm" and gone]
    if lost:
        words = failure(
            f"the node found KVM usable for {', '.join(lost)}, and now there is no {KVM}",
            "its module was unloaded or the device removed",
            "`chv doctor`, then start the agent again",
        )
        return Check("kvm", False, 0, words)
    reasons = "; ".join(f"{probe.name}: {probe.reason}" for probe in status.vmms if probe.reason)
    return Check("kvm", True, 0, reasons or "KVM was not tried")


async def next_hop(instance: str) -> str:
    """Return the node's own way out, where there is one: the gateway of its default route."""
    box = Sandbox(instance)
    where = ("-n", box.host) if box.exists() else ()
    argv = ("ip", "-4", "-j", *where, "route", "show", "default")
    try:
        done = await run(argv, timeout_s=IP_S_MAX, check=False)
    except ChvError:
        return ""  # without `ip` it is not known, and not tried
    if done.returncode or not done.stdout.strip():
        return ""
    routes: list[dict[str, str]] = json.loads(done.stdout)
    return next((route["gateway"] for route in routes if "gateway" in route), "")


async def verify_host(vmm: str, on_check: Callable[[Check], None]) -> Report:
    """Prove host and VMM alone."""
    raise NotImplementedError
