"""`chv console` and `chv logs` on a real node: terminals, pens, kills."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from chv.common.log_rotation import FILE_BYTES_MAX
from tests.integration.console_viewer import Viewer, command, environment, viewer
from tests.integration.live_node import ROOT, LiveNode, live_node, need

pytestmark = [pytest.mark.root, need()]

MANIFEST = """
apiVersion: compute.chv.dev/v1alpha1
kind: Volume
metadata: {name: disk}
spec: {size: 16Mi, format: raw}
---
apiVersion: compute.chv.dev/v1alpha1
kind: VirtualMachine
metadata: {name: talker}
spec:
  memory: 64Mi
  disks: [{name: data, volume: disk}]
"""


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node(CHV_VMM="fake", CHV_TEST_BUILD="1") as running:
        running.apply(MANIFEST)
        yield running


def test_escape_key_leaves_and_sets_the_terminal_back(node: LiveNode) -> None:
    with viewer(node) as one:
        one.type(b"hello-escape\r")
        one.sees(b"hello-escape")
        one.type(b"\x1d")
        assert one.ends() == 0
        assert not one.is_raw()


def test_a_terminated_viewer_sets_the_terminal_back(node: LiveNode) -> None:
    with viewer(node, "--escape", "none") as one:
        one.type(b"a\x1db")  # no escape key: both go to the guest
        one.sees(b"a\x1db")
        one.process.send_signal(signal.SIGTERM)
        assert one.ends() == 128 + signal.SIGTERM
        assert not one.is_raw()


def test_what_is_typed_before_the_escape_key_reaches_the_guest(node: LiveNode) -> None:
    with viewer(node, "--read-only") as looks, viewer(node) as one:
        looks.sees(b"read-only")
        one.type(b"last-words\x1dnever")
        assert one.ends() == 0
        looks.sees(b"last-words")
        assert b"never" not in looks.text


def test_one_writes_and_all_see_and_the_pen_can_be_taken(node: LiveNode) -> None:
    with viewer(node) as first, viewer_after(node, first) as second:
        second.sees(b"another viewer has the pen")
        first.type(b"from-first")
        second.sees(b"from-first")
        second.type(b"not-sent")
        with viewer(node, "--take") as third:
            first.sees(b"took the pen")
            third.type(b"from-third")
            for each in (first, second):
                each.sees(b"from-third")
                assert b"not-sent" not in each.text
            third.type(b"\x1d")
            assert third.ends() == 0
        first.sees(b"the pen is yours")


@contextlib.contextmanager
def viewer_after(node: LiveNode, first: Viewer, *arguments: str) -> Iterator[Viewer]:
    first.type(b"first-is-there")
    first.sees(b"first-is-there")
    with viewer(node, *arguments) as second:
        yield second


def test_pipes_work_and_the_last_output_is_shown_on_attach(node: LiveNode) -> None:
    done = subprocess.run(
        command("talker"), input=b"piped-words\n", capture_output=True, check=False, cwd=ROOT,
        env=environment(node), timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"piped-words" in done.stdout
    with viewer(node, "--read-only") as one:
        one.sees(b"piped-words")


def test_piped_input_without_the_pen_fails(node: LiveNode) -> None:
    with viewer(node) as first:
        first.type(b"holding")
        first.sees(b"holding")
        done = subprocess.run(
            command("talker"), input=b"x", capture_output=True, check=False, cwd=ROOT,
            env=environment(node), timeout=60,
        )  # fmt: skip
    assert done.returncode == 6
    assert b"another viewer has the pen" in done.stderr


def test_a_viewer_that_shows_nothing_is_dropped_and_told(node: LiveNode) -> None:
    with viewer(node, "--read-only") as slow, viewer(node, "--read-only") as stuck:
        done = subprocess.run(
            command("talker"), input=b"a line that is many times as long as it was\n" * 20_000,
            capture_output=True, check=False, cwd=ROOT, env=environment(node), timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        stuck.process.send_signal(signal.SIGTERM)
        assert stuck.ends() == 128 + signal.SIGTERM
        assert not stuck.is_raw()
        slow.sees(b"read too slowly")
        assert slow.ends() == 8
        assert not slow.is_raw()
    with viewer(node) as next_one:
        next_one.type(b"goes-on")
        next_one.sees(b"goes-on")


def test_a_viewer_goes_on_while_the_agent_is_dead(node: LiveNode) -> None:
    with viewer(node) as one:
        one.type(b"before")
        one.sees(b"before")
        node.kill("agent")
        node.await_agent_death()
        one.type(b"without-agent")
        one.sees(b"without-agent")
        node.up()
        one.type(b"with-the-next")
        one.sees(b"with-the-next")
        assert b"has gone" not in one.text


def test_a_killed_holder_is_told_and_the_viewer_attached_again(node: LiveNode) -> None:
    vmm = node.workers("vmm")
    with viewer(node) as one:
        one.type(b"before-kill")
        one.sees(b"before-kill")
        (holder,) = node.workers("console").values()
        os.kill(holder, signal.SIGKILL)
        one.sees(b"is lost")
        one.sees(b"attached again")
        one.type(b"after-kill")
        one.sees(b"after-kill")
    assert node.workers("vmm") == vmm
    recorded = node.cli("logs", "vm/talker", "--no-timestamps").stdout.splitlines()
    lost = recorded.index("--- the console holder ended: what the guest said since is lost")
    assert recorded[lost + 1].startswith("--- console attached")


def test_full_logs_of_the_daemons_are_rotated(node: LiveNode) -> None:
    logs = node.dev.layout.logs
    node.kill("agent")
    node.await_agent_death()
    for daemon in ("agent", "stord", "nwd"):
        os.truncate(logs / f"{daemon}.log", FILE_BYTES_MAX)
    node.up()
    node.cli("daemon", "restart", "console")
    for daemon in ("agent", "stord", "nwd"):
        assert (logs / f"{daemon}.log.1").stat().st_size > FILE_BYTES_MAX
        assert (logs / f"{daemon}.log").stat().st_size < FILE_BYTES_MAX
    assert "\0" not in node.cli("logs", "daemon/agent", "--tail", "1").stdout


def test_logs_since_and_without_times(node: LiveNode) -> None:
    shown = node.cli("logs", "vm/talker", "--since", "1h", "--no-timestamps").stdout
    assert any(line.startswith("--- console attached") for line in shown.splitlines())
    later = node.cli("logs", "vm/talker", "--since", "2999-01-01T00:00:00Z").stdout
    assert later == ""
    assert node.cli("logs", "daemon/stord", "--since", "1h").stdout
    refused = node.cli("logs", "vm/talker", "--since", "yesterday", check=False)
    assert refused.returncode == 2
    assert "--since" in refused.stderr


def test_the_end_of_the_vm_ends_its_viewers(node: LiveNode) -> None:
    with viewer(node) as one:
        one.type(b"last-test")
        one.sees(b"last-test")
        node.cli("stop", "talker")
        one.sees(b"the VM ended")
        assert one.ends() == 6
        assert not one.is_raw()
    refused = node.cli("console", "talker", check=False)
    assert refused.returncode == 6
    assert "chv start talker" in refused.stderr
