"""A live node whose guests are the probe: on QEMU with TCG, and on the real Cloud Hypervisor."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from chv.probe.events import Event
from chv.probe.lines import parse_line
from tests.integration.live_node import LiveNode, live_node, wait_for

E = TypeVar("E", bound=Event)

VMMS = ("qemu", "cloud-hypervisor")
CLOUD_HYPERVISOR = "CHV_CLOUD_HYPERVISOR"
TOLERANT = "CHV_CLOUD_HYPERVISOR_TOLERANT"
BASE = """
apiVersion: compute.chv.dev/v1alpha1
kind: Image
metadata: {name: probe}
spec: {builtin: probe}
---
apiVersion: compute.chv.dev/v1alpha1
kind: Network
metadata: {name: lan}
spec: {subnet: 10.9.0.0/24}
"""
_STAMP = re.compile(r"^\S+Z ")


def skip_without(vmm: str) -> None:
    """Skip where the VMM is not on this machine, or cannot run there."""
    if vmm == "qemu":
        if shutil.which("qemu-system-x86_64") is None:
            pytest.skip("qemu-system-x86_64 is not installed")
        return
    if not cloud_hypervisor():
        pytest.skip(f"no Cloud Hypervisor: neither {CLOUD_HYPERVISOR} nor PATH names one")
    if not Path("/dev/kvm").exists():
        pytest.skip("no /dev/kvm, without which Cloud Hypervisor does not start")


def cloud_hypervisor() -> str:
    """Return the binary that the developer has given us; empty where there is none."""
    return os.environ.get(CLOUD_HYPERVISOR, "") or shutil.which("cloud-hypervisor") or ""


class ProbeNode:
    """A node, and what its probes say."""

    def __init__(self, node: LiveNode, vmm: str, directory: Path) -> None:
        self.node = node
        self.vmm = vmm
        self.directory = directory
        self.path = directory / "vm.yaml"

    def apply(self, *documents: str, check: bool = True) -> None:
        """Apply documents and, where that is to work, wait until all is as wanted."""
        self.path.write_text("\n---\n".join(documents))
        waits = ("--wait",) if check else ()
        self.node.cli("apply", "-f", str(self.path), *waits, check=check)

    def events(self, kind: type[E], name: str = "p") -> list[E]:
        """Return what the probe has said of one kind, since its console was attached first."""
        lines = self.node.cli("logs", f"vm/{name}").stdout.splitlines()
        said = [parse_line(_STAMP.sub("", line)) for line in lines]
        return [event for event in said if isinstance(event, kind)]

    def await_event(self, kind: type[E], *, more_than: int = 0, timeout_s: float = 30.0) -> E:
        """Return the last event of a kind, once there are more than so many."""

        def said() -> list[E]:
            found = self.events(kind)
            return found if len(found) > more_than else []

        found: list[E] = wait_for(said, timeout_s, f"more than {more_than} {kind.__name__}")
        return found[-1]


@contextmanager
def probe_node(vmm: str, directory: Path, **environment: str) -> Iterator[ProbeNode]:
    """A node for one kind of VMM, with a network `lan` and the image of the probe."""
    skip_without(vmm)
    directory.mkdir(parents=True, exist_ok=True)
    if vmm == "cloud-hypervisor":
        environment[CLOUD_HYPERVISOR] = cloud_hypervisor()
    with live_node(**environment) as node:
        running = ProbeNode(node, vmm, directory)
        running.apply(BASE)
        yield running


@contextmanager
def saving_node(kind: str, directory: Path, **environment: str) -> Iterator[ProbeNode]:
    """A node whose VMM can save memory here: `qemu`, or the Cloud Hypervisor of TOLERANT."""
    if kind == "qemu":
        with probe_node("qemu", directory, **environment) as running:
            yield running
        return
    binary = os.environ.get(TOLERANT, "")
    if not binary:
        pytest.skip(f"{TOLERANT} names no Cloud Hypervisor that bears a KVM without nested state")
    with live_node(CHV_CLOUD_HYPERVISOR=binary, **environment) as node:
        running = ProbeNode(node, "cloud-hypervisor", directory)
        running.apply(BASE)
        yield running


def volume(name: str, size: str = "64Mi", **spec: str) -> str:
    """Return a Volume."""
    more = "".join(f", {key}: {value}" for key, value in ({"format": "raw"} | spec).items())
    return f"""
apiVersion: compute.chv.dev/v1alpha1
kind: Volume
metadata: {{name: {name}}}
spec: {{size: {size}{more}}}
"""


def vm(
    vmm: str,
    command: str,
    *,
    disks: tuple[str, ...] = (),
    networks: tuple[str, ...] = (),
    spec: str = "",
) -> str:
    """Return a VirtualMachine `p` that boots the probe."""
    plugged = ", ".join(f"{{name: {name}, volume: {name}}}" for name in disks)
    nics = ", ".join(f"{{name: eth{i}, network: {name}}}" for i, name in enumerate(networks))
    return f"""
apiVersion: compute.chv.dev/v1alpha1
kind: VirtualMachine
metadata: {{name: p}}
spec:
  vmm: {vmm}
  memory: 128Mi
  shutdownTimeout: 20s
  boot: {{image: probe, cmdline: "{command}"}}
  disks: [{plugged}]
  interfaces: [{nics}]
{spec}
"""
