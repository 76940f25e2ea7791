"""What must hold on this machine before the agent starts anything: checked, not assumed.

`failures` are what keeps a node from coming up. `shortages` come and go with what the node does:
they make it Degraded, in which VMs can still be stopped and deleted, which is what helps.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from chv.common.config import Config
from chv.common.files import free_bytes
from chv.common.layout import Layout

FREE_BYTES_MIN = 64 << 20
TUN = Path("/dev/net/tun")
PROGRAMS = {
    "qemu-storage-daemon": "apt-get install qemu-utils qemu-system-common",
    "qemu-img": "apt-get install qemu-utils",
    "dnsmasq": "apt-get install dnsmasq-base",
}
QEMU = {"qemu-system-x86_64": "apt-get install qemu-system-x86"}


def failures(config: Config) -> list[str]:
    """Return what is missing, each with its remedy; empty when the host is fit."""
    found: list[str] = []
    if os.geteuid() != 0:
        found.append(f"runs as uid {os.geteuid()}, needs root")
    if not TUN.exists():
        found.append(f"{TUN} is missing: modprobe tun")
    programs = dict(PROGRAMS)
    if config.vmm.driver in ("auto", "qemu") and not config.vmm.qemu_binary:
        programs |= QEMU
    for program, remedy in programs.items():
        if shutil.which(program) is None:
            found.append(f"{program} is missing: {remedy}")
    return found


def shortages(layout: Layout) -> list[str]:
    """Return what there is too little of, now."""
    free = free_bytes(layout.state)
    if free >= FREE_BYTES_MIN:
        return []
    return [f"{free >> 20} MiB free in {layout.state}, needs {FREE_BYTES_MIN >> 20}"]
