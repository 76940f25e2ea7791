"""`chv demo`: a node in a sandbox, a VM on it, a command in the guest, and nothing left behind.

Uses a node of its own in a temporary directory, so it runs beside any other node.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import msgspec

from chv.cli import connect, manifests, operations, output
from chv.cli.commands.up import delete_everything
from chv.common.errors import ChvError, Internal
from chv.common.process import run
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire import agent
from chv.host import devnode

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "hello.yaml"
START_TIMEOUT_S = 60.0
IMAGE_TIMEOUT_S = 300.0
SSH_TIMEOUT_S = 120.0
CLEAN_TIMEOUT_S = 60.0
VM = agent.ObjectRef(kind="VirtualMachine", name="hello")


@dataclass
class Summary:
    """What the demo found; the last line of `--json`."""

    started: float = field(default_factory=time.monotonic)
    steps: list[dict[str, Any]] = field(default_factory=list)
    vmm: str = ""
    guest_kernel: str = ""
    disk_export: str = ""
    address: str = ""
    ssh_output: str = ""
    error: str = ""

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time one step and tell about it."""
        begun = time.monotonic()
        output.note(f"  ... {name}")
        yield
        seconds = round(time.monotonic() - begun, 2)
        self.steps.append({"name": name, "seconds": seconds})
        output.note(f"  {seconds:6.2f} s  {name}")

    def as_json(self) -> dict[str, Any]:
        """Return the summary object."""
        found = {
            "ok": not self.error and bool(self.guest_kernel),
            "vmm": self.vmm,
            "guest_kernel": self.guest_kernel,
            "disk_export": self.disk_export,
            "address": self.address,
            "ssh_output": self.ssh_output,
            "steps": self.steps,
            "seconds": round(time.monotonic() - self.started, 2),
        }
        return found | ({"error": self.error} if self.error else {})


def demo(arguments: argparse.Namespace) -> int:
    """Run it; exit code 0 only if the guest answered."""
    summary = Summary()
    for name, seconds in _setup_steps():
        summary.steps.append({"name": name, "seconds": seconds})
        summary.started -= seconds
    directory = Path(tempfile.mkdtemp(prefix="chv-demo-"))
    exit_code = 0
    try:
        _build(directory, summary)
        _show(summary, directory, keep=arguments.keep)
    except ChvError as error:
        summary.error = str(error)
        print(f"chv demo: {error.code}: {error}", file=sys.stderr)
        _show_logs(directory)
        exit_code = error.exit_code
    finally:
        if not arguments.keep:
            _clean(directory, summary)
    if arguments.json:
        print(msgspec.json.encode(summary.as_json()).decode())
    return exit_code


def _setup_steps() -> list[tuple[str, float]]:
    """Return the steps of `./dev` before us, `name=seconds;...`, so that the sum is the whole."""
    steps = []
    for entry in os.environ.get("CHV_SETUP_STEPS", "").split(";"):
        name, _, seconds = entry.partition("=")
        if seconds:
            steps.append((name, float(seconds)))
    return steps


def _build(directory: Path, summary: Summary) -> None:
    with summary.step("start a node in a sandbox"):
        node = devnode.make(directory, sandboxed=True)
        anyio.run(_start, node)
    with BlockingClient(node.socket) as client:
        documents = manifests.load([str(EXAMPLE)])
        with summary.step("build the guest image"):
            _apply(client, [entry for entry in documents if entry["kind"] == "Image"])
        with summary.step("create network, volume and VM"):
            _apply(client, documents)
        with summary.step("boot until SSH answers"):
            client.call(
                agent.WAIT_CONDITION,
                agent.WaitCondition(
                    kind=VM.kind, name=VM.name, condition="SSHReady", timeout_s=SSH_TIMEOUT_S
                ),
                timeout_s=SSH_TIMEOUT_S + 5,
            )
        with summary.step("run `uname -a` in the guest"):
            summary.ssh_output = anyio.run(_uname, node)
        summary.guest_kernel = summary.ssh_output.split()[2]
        _observe(client, summary)


async def _start(node: devnode.DevNode) -> None:
    await devnode.start(node)
    await devnode.await_ready(node, START_TIMEOUT_S)


def _apply(client: BlockingClient, documents: list[dict[str, Any]]) -> None:
    request = agent.Apply(
        objects=manifests.raw(documents), requester=connect.requester(), reason="demo"
    )
    for result in client.call(agent.APPLY, request).results:
        if result.operation_id:
            operations.wait(client, result.operation_id, IMAGE_TIMEOUT_S)


async def _uname(node: devnode.DevNode) -> str:
    argv = (sys.executable, "-m", "chv.cli", "--socket", str(node.socket),
            "ssh", VM.name, "--", "uname", "-a")  # fmt: skip
    completed = await run(argv, timeout_s=30.0)
    text = completed.stdout.decode().strip()
    if len(text.split()) < 3:
        raise Internal(f"`uname -a` in the guest said {text!r}")
    return text


def _observe(client: BlockingClient, summary: Summary) -> None:
    found = msgspec.json.decode(client.call(agent.GET, VM).object)["status"]
    accelerator = found["vmm"].get("accelerator", "")
    summary.vmm = f"{found['vmm']['name']}" + (f" ({accelerator})" if accelerator else "")
    summary.disk_export = found["disks"][0]["export"]
    summary.address = found["interfaces"][0]["address"]


def _show(summary: Summary, directory: Path, *, keep: bool) -> None:
    output.note(
        f"""
What was built
  VM hello       {summary.vmm}, {summary.address} by DHCP of its network
  disk           {summary.disk_export}
  guest          {summary.ssh_output}
"""
    )
    if keep:
        socket = (directory / "socket").read_text().strip()
        output.note(
            f"""The node is still running. Try
  export CHV_SOCKET={socket}
  chv get vm                  chv describe vm hello
  chv ssh hello               chv logs vm/hello -f
  chv apply -f examples/two-tenants.yaml
  chv down --purge --dir {directory}
"""
        )
    else:
        output.note("Next: `./dev shell`, then `chv up` and `chv apply -f examples/hello.yaml`.")


def _show_logs(directory: Path) -> None:
    """Show the end of each daemon's log: after a failure this is the first thing to read."""
    if not devnode.exists(directory):
        return
    for log in sorted(devnode.find(directory).layout.logs.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-15:]
        output.note(f"--- {log}")
        for line in lines:
            output.note(line[:400])


def _clean(directory: Path, summary: Summary) -> None:
    with summary.step("clean up"):
        if devnode.exists(directory):
            node = devnode.find(directory)
            if devnode.agent_process(node) is not None:
                delete_everything(node.socket, CLEAN_TIMEOUT_S)
            anyio.run(devnode.stop, node)
            anyio.run(devnode.remove, node)
        elif directory.is_dir():
            directory.rmdir()
