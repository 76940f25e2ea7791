"""`chv console` on real VMMs: the probe answers what is typed, and its reboot keeps the viewer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from chv.probe.events import Ready
from tests.integration.console_viewer import viewer
from tests.integration.live_node import need
from tests.probe_node import VMMS, probe_node, vm

pytestmark = [pytest.mark.root, pytest.mark.slow, need()]


@pytest.mark.parametrize("vmm", VMMS)
def test_what_is_typed_is_answered_before_and_after_a_reboot(vmm: str, tmp_path: Path) -> None:
    with probe_node(vmm, tmp_path) as probes:
        probes.apply(vm(vmm, "net=off"))
        probes.await_event(Ready)
        with viewer(probes.node, name="p") as one, viewer(probes.node, name="p") as other:
            one.type(b"ping=before\r")
            one.sees(b"pong")
            other.sees(b"before")
            one.forget()
            one.type(b"reboot\r")
            one.sees(b" ready")
            one.type(b"ping=after\r")
            one.sees(b"pong")
            other.sees(b"after")
            assert b"has gone" not in one.text
            vmms = probes.node.workers("vmm")
            (holder,) = probes.node.workers("console").values()
            os.kill(holder, signal.SIGKILL)
            one.sees(b"attached again")
            one.type(b"ping=anew\r")
            one.sees(b'token="anew"')
            assert probes.node.workers("vmm") == vmms
            probes.node.cli("stop", "p")
            one.sees(b"the VM ended")
            assert one.ends() == 6
