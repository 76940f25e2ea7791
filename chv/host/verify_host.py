"""The host's part of `chv verify`: what KVM is good for, and the node's way out.

`verify_host` proves host and VMMs without an agent: storage and network need one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

from chv.common.errors import ChvError
from chv.common.process import run
from chv.common.wire.agent import NodeStatusReply, VmmProbe
from chv.host import vmm_checks
from chv.host.sandbox import Sandbox
from chv.host.verify import Check, Findings, Report, failure, since_ms
from chv.host.vmm_checks import CLOUD_HYPERVISOR, QEMU
from chv.vmm.driver import DriverProbe
from chv.vmm.kvm import kvm_access
from chv.vmm.qemu.probe import try_emulation
from chv.vmm.registry import QEMU_BINARY
from chv.vmm.select import AUTO

IP_S_MAX = 5.0


def kvm_check(status: NodeStatusReply, vmm: str) -> Check:
    """Judge KVM for what is to run: an emulated VM needs none, Cloud Hypervisor does."""
    by_name = {probe.name: probe for probe in status.vmms}
    gone = kvm_access().refusal
    if vmm == CLOUD_HYPERVISOR:
        probe = by_name.get(vmm) or VmmProbe(name=vmm, usable=False, reason="not probed")
        if not probe.usable or gone:
            seen = f"Cloud Hypervisor cannot run here: {gone or probe.reason}"
            words = failure(seen, "it needs KVM", "`chv doctor`")
            return Check("kvm", False, 0, words)
        return Check("kvm", True, 0, probe.reason)
    asked = [probe for probe in status.vmms if vmm != QEMU or probe.name == QEMU]
    lost = [probe.name for probe in asked if probe.accelerator == "kvm" and gone]
    if lost:
        words = failure(
            f"the node found KVM usable for {', '.join(lost)}, and now: {gone}",
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
    """Prove host and VMM alone: storage and network need an agent."""
    findings = Findings(on_check)
    settings = vmm_checks.settings()
    started = time.monotonic()
    probes = await vmm_checks.tried(settings)
    refusal = vmm_checks.kvm_refusal(settings)
    chosen = _chosen(vmm, probes)
    findings.add(_kvm_alone(chosen, probes, refusal, since_ms(started)))
    started = time.monotonic()
    findings.add(await _vmm_alone(chosen, probes[chosen], started))
    if findings.checks[-1].ok:
        probe = probes[chosen]
        findings.vmm = f"{probe.driver} {probe.version} with {probe.accelerator}"
    words = "no agent runs here: storage and network were not tried; `chv up` starts one"
    findings.add(Check("agent", True, 0, words))
    return findings.report()


def _chosen(vmm: str, probes: Mapping[str, DriverProbe]) -> str:
    if vmm != AUTO:
        return vmm
    preferred = [name for name, probe in probes.items() if probe.usable and probe.auto]
    return preferred[0] if preferred else QEMU


def _kvm_alone(vmm: str, probes: Mapping[str, DriverProbe], refusal: str, spent_ms: float) -> Check:
    probe = probes[vmm]
    if vmm == CLOUD_HYPERVISOR and not probe.usable:
        words = failure(
            f"Cloud Hypervisor cannot run here: {probe.reason}", "it needs KVM", "`chv doctor`"
        )
        return Check("kvm", False, spent_ms, words)
    if refusal:
        return Check("kvm", True, spent_ms, f"{refusal}: VMs run by emulation")
    reasons = dict.fromkeys(each.reason for each in probes.values() if each.missing)
    return Check("kvm", True, spent_ms, "; ".join(reasons) or probe.reason)


async def _vmm_alone(vmm: str, probe: DriverProbe, started: float) -> Check:
    """A VMM that ran on KVM has run the probe already; an emulating one is tried now."""
    words = f"{vmm} {probe.version} runs the probe"
    if not probe.usable:
        message = failure(f"{vmm}: {probe.reason}", "", "`chv doctor`")
        return Check("vmm", False, since_ms(started), message)
    if probe.accelerator == "kvm":
        return Check("vmm", True, since_ms(started), words)
    try:
        binary = vmm_checks.settings().qemu_binary or QEMU_BINARY
        verdict = await try_emulation(binary, vmm_checks.guest())
    except ChvError as error:
        return Check("vmm", False, since_ms(started), failure(error.message, "", "`chv doctor`"))
    if verdict.stock:
        return Check("vmm", True, since_ms(started), f"{words} by emulation")
    seen = verdict.last if not verdict.booted else f"it lacks {', '.join(verdict.missing)}"
    return Check("vmm", False, since_ms(started), failure(f"{vmm} does not: {seen}", "", ""))
