"""`chv doctor`: does this machine have what a node needs, and if not, what to type.

Each check is one function that looks and returns; none changes anything, though VMMs are tried out
with the probe guest. Status: ok, info (worth
knowing), warning (something will be missing or slow), error (a node cannot run).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec

from chv.common.config import VmmConfig
from chv.host import forward_checks, storage_checks, vmm_checks
from chv.vmm.driver import DriverProbe

FREE_BYTES_MIN = 1 << 30
MEMORY_BYTES_MIN = 1 << 30

PROGRAMS: dict[str, tuple[str, str, str]] = {
    "qemu-storage-daemon": ("error", "serves volumes", "qemu-utils qemu-system-common"),
    "qemu-img": ("error", "makes volumes", "qemu-utils"),
    "dnsmasq": ("error", "DHCP and DNS of networks", "dnsmasq-base"),
    "ip": ("error", "sandbox of `chv up`", "iproute2"),
    "ssh": ("error", "`chv ssh`", "openssh-client"),
    "mke2fs": ("error", "builds the tiny guest", "e2fsprogs"),
    "qemu-system-x86_64": ("error", "runs VMs", "qemu-system-x86"),
}


class Check(msgspec.Struct, frozen=True):
    """One finding. `remedy` is what to type, empty where nothing is to be done."""

    id: str
    status: str
    message: str
    remedy: str = ""


def run_checks() -> list[Check]:
    """Look at everything; the order is the order to read in."""
    checks: tuple[Callable[[], Check], ...] = (
        _root,
        _tun,
        _nft,
        _netns,
        _memory,
        _space,
        _requests,
    )
    programs = [_program(name) for name in PROGRAMS]
    looked = [check() for check in checks]
    return looked + programs + _vmms() + _forwarding() + _volume_classes()


def _root() -> Check:
    if os.geteuid() == 0:
        return Check("root", "ok", "runs as root")
    return Check("root", "error", f"runs as uid {os.geteuid()}", "sudo chv ...")


def _tun() -> Check:
    if Path("/dev/net/tun").exists():
        return Check("tun", "ok", "/dev/net/tun is there")
    return Check("tun", "error", "/dev/net/tun is missing: no NICs", "modprobe tun")


def _vmms() -> list[Check]:
    """Boot the probe guest on each VMM: that a device node exists proves nothing."""
    settings = vmm_checks.settings()
    probes = anyio.run(vmm_checks.tried, settings)
    return [
        _kvm(list(probes.values()), vmm_checks.kvm_refusal(settings)),
        _cloud_hypervisor(probes[vmm_checks.CLOUD_HYPERVISOR], settings),
    ]


def _kvm(probes: list[DriverProbe], refusal: str) -> Check:
    emulated = "VMs run by emulation, several times slower"
    if refusal:
        message = f"{refusal}: {emulated}"
        remedy = "enable virtualisation in the firmware; modprobe kvm"
        return Check("kvm", "warning", message, remedy)
    good = [probe for probe in probes if probe.accelerator == "kvm" and probe.auto]
    if good:
        return Check("kvm", "ok", good[0].reason)
    missing = next((probe for probe in probes if probe.missing), None)
    if missing is not None:
        remedy = "nested virtualisation that is whole, or a machine of its own"
        return Check("kvm", "warning", f"{missing.reason}: {emulated}", remedy)
    reasons = "; ".join(f"{probe.driver}: {probe.reason}" for probe in probes)
    return Check("kvm", "warning", f"KVM runs no guest ({reasons}): {emulated}", "dmesg | grep kvm")


def _cloud_hypervisor(probe: DriverProbe, settings: VmmConfig) -> Check:
    """It comes from upstream, not from a package: version and digest are what there is to check."""
    if not probe.version:
        remedy = "install upstream's release binary, see README"
        return Check("cloud-hypervisor", "info", f"not usable: {probe.reason}", remedy)
    pinned = "as pinned" if settings.cloud_hypervisor_sha256 else "pin it in chv.toml"
    what = f"{probe.binary} {probe.version}, sha256 {probe.sha256} ({pinned})"
    if not probe.usable:
        remedy = "a newer release of upstream, see README" if not probe.accelerator else ""
        return Check("cloud-hypervisor", "warning", f"{what}: {probe.reason}", remedy or "see kvm")
    return Check("cloud-hypervisor", "ok", f"{what} runs the probe guest")


def _nft() -> Check:
    import ctypes.util

    if ctypes.util.find_library("nftables"):
        return Check("libnftables", "ok", "libnftables is there")
    return Check("libnftables", "error", "libnftables is missing: no firewall",
                 "apt-get install libnftables1")  # fmt: skip


def _netns() -> Check:
    if Path("/proc/self/ns/net").exists():
        return Check("netns", "ok", "the kernel has network namespaces")
    return Check("netns", "error", "no network namespaces", "a kernel with CONFIG_NET_NS")


def _memory() -> Check:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            status = "ok" if available >= MEMORY_BYTES_MIN else "warning"
            return Check("memory", status, f"{available >> 20} MiB of memory available")
    return Check("memory", "warning", "the kernel does not tell how much memory is available")


def _space() -> Check:
    path = next(p for p in (Path("/var/lib/chv"), Path("/var/lib"), Path("/")) if p.exists())
    free = shutil.disk_usage(path).free
    if free >= FREE_BYTES_MIN:
        return Check("space", "ok", f"{free >> 20} MiB free in {path}")
    return Check("space", "warning", f"only {free >> 20} MiB free in {path}", "make room")


def _requests() -> Check:
    """Beyond this limit of the whole host a VM's storage daemon opens no disk."""
    found = storage_checks.requests()
    message = (
        f"the host's asynchronous requests are enough for {found.vms} VMs "
        f"(fs.aio-max-nr={found.limit}, {found.taken} taken, "
        f"{storage_checks.REQUESTS_PER_VM} for each VM with disks)"
    )
    if found.vms >= storage_checks.VMS_MIN:
        return Check("storage-requests", "ok", message)
    return Check("storage-requests", "warning", message, storage_checks.REQUESTS_REMEDY)


def _program(name: str) -> Check:
    severity, purpose, packages = PROGRAMS[name]
    found = shutil.which(name)
    if found:
        return Check(name, "ok", f"{found} ({purpose})")
    remedy = f"apt-get install {packages}" if packages else ""
    return Check(name, severity, f"{name} is missing ({purpose})", remedy)


def _forwarding() -> list[Check]:
    """Nothing is changed: whether guests may pass somebody else's firewall is for its owner."""
    found = forward_checks.blocking(forward_checks.look())
    checks = [
        Check(
            f"forwarding-{each.title.replace(' ', '-')}",
            "warning",
            f"{each.owner or 'a firewall'} keeps guests from the outside: chain {each.title} "
            f"of the forward hook has {each.how}",
            forward_checks.remedy(each, forward_checks.links()),
        )
        for each in found
    ]
    if forward_checks.legacy():
        message = "there are rules of the old iptables, which were not looked at"
        checks.append(Check("forwarding-legacy", "info", message, "iptables-legacy -S FORWARD"))
    return checks or [Check("forwarding", "ok", "no other firewall drops what guests send")]


def _volume_classes() -> list[Check]:
    return [_volume_class(need) for need in storage_checks.CLASSES]


def _volume_class(need: storage_checks.Need) -> Check:
    """A class that nobody uses is no fault of the machine: what is missing is worth knowing."""
    name = f"volumes-{need.class_name}"
    absent = storage_checks.missing(need)
    if not absent:
        message = f"volumes of class {need.class_name} are usable (packages {need.packages})"
        return Check(name, "ok", message)
    message = f"no volumes of class {need.class_name}: {', '.join(absent)} missing"
    return Check(name, "info", message, storage_checks.remedy(need, absent))
