"""A node as a user has it: `chv up` in a sandbox, the CLI as a process, kills, a leak check."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from chv.common.process import scan
from chv.host import devnode
from tests.leftovers import scratch

ROOT = Path(__file__).parents[2]
HELLO = ROOT / "examples" / "hello.yaml"
TWO_TENANTS = ROOT / "examples" / "two-tenants.yaml"
CLI_TIMEOUT_S = 180.0
DAEMONS = ("agent", "stord", "nwd")
# A VM with a disk and a NIC, for nodes with the fake VMM.
GUEST = """
apiVersion: compute.chv.dev/v1alpha1
kind: Network
metadata: {name: net}
spec: {subnet: 10.77.0.0/24}
---
apiVersion: compute.chv.dev/v1alpha1
kind: Volume
metadata: {name: disk}
spec: {size: 16Mi, format: raw}
---
apiVersion: compute.chv.dev/v1alpha1
kind: VirtualMachine
metadata: {name: guest}
spec:
  memory: 64Mi
  disks: [{name: data, volume: disk}]
  interfaces: [{name: net, network: net}]
"""
NEEDED = ("qemu-storage-daemon", "qemu-img", "dnsmasq", "ip", "nft", "ssh", "mke2fs")


def need(*programs: str) -> pytest.MarkDecorator:
    """Skip, with the reason, where root or a program is missing."""
    missing = [name for name in (*NEEDED, *programs) if shutil.which(name) is None]
    why = "needs root" if os.geteuid() != 0 else f"needs {', '.join(missing)}"
    return pytest.mark.skipif(os.geteuid() != 0 or bool(missing), reason=why)


class CommandFailed(AssertionError):
    """A CLI call that was expected to work."""


@dataclass
class LiveNode:
    """One development node of its own instance."""

    directory: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def dev(self) -> devnode.DevNode:
        return devnode.find(self.directory)

    def cli(
        self, *arguments: str, check: bool = True, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `chv`; on an unexpected failure show its words and the daemons' logs."""
        base = {key: value for key, value in os.environ.items() if key != "CHV_SOCKET"}
        done = subprocess.run(
            [sys.executable, "-m", "chv.cli", *arguments],
            capture_output=True, text=True, timeout=CLI_TIMEOUT_S, check=False, cwd=ROOT,
            env=base | self.environment | self._socket() | (env or {}),
        )  # fmt: skip
        if check and done.returncode != 0:
            raise CommandFailed(
                f"chv {' '.join(arguments)} -> {done.returncode}\n{done.stdout}{done.stderr}\n"
                + self.logs()
            )
        return done

    def apply(self, manifest: str) -> None:
        """Apply a manifest and wait until all is as wanted."""
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(manifest)
            file.flush()
            self.cli("apply", "-f", file.name, "--wait")

    def _socket(self) -> dict[str, str]:
        pointer = self.directory / "socket"
        return {"CHV_SOCKET": pointer.read_text().strip()} if pointer.exists() else {}

    def up(self, **env: str) -> None:
        self.cli("up", "--dir", str(self.directory), env=env)

    def down(self, *arguments: str) -> None:
        self.cli("down", "--dir", str(self.directory), *arguments)

    def restart(self, failpoints: str = "") -> None:
        """Bring the agent up, armed; it may die of the failpoint before it is even ready."""
        if devnode.agent_process(self.dev) is not None:
            self.down()
        env = {"CHV_FAILPOINTS": failpoints}
        self.cli("up", "--dir", str(self.directory), check=False, env=env)

    def await_agent_death(self) -> None:
        wait_for(lambda: devnode.agent_process(self.dev) is None, 30, "the agent's death")

    def get(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            self.cli("get", kind, name, "-n", namespace, "-o", "json").stdout
        )
        return found

    def status(self, name: str, namespace: str = "default") -> dict[str, Any]:
        found: dict[str, Any] = self.get("vm", name, namespace)["status"]
        return found

    def condition(self, vm: str, kind: str) -> dict[str, Any]:
        return next(entry for entry in self.status(vm)["conditions"] if entry["type"] == kind)

    def ssh(
        self, vm: str, command: str, namespace: str = "default", check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        return self.cli("ssh", vm, "-n", namespace, "--", command, check=check)

    def node_status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.cli("node", "status", "-o", "json").stdout)
        return found

    def daemon_pid(self, name: str) -> int:
        status = self.node_status()
        if name == "agent":
            return int(status["pid"])
        return next(int(entry["pid"]) for entry in status["daemons"] if entry["name"] == name)

    def kill(self, *names: str) -> None:
        """SIGKILL daemons, all found before the first dies."""
        for pid in [self.daemon_pid(name) for name in names]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def await_state(self, state: str, timeout_s: float = 20.0) -> None:
        wait_for(lambda: self.node_status()["state"] == state, timeout_s, f"node {state}")

    def workers(self, kind: str) -> dict[str, int]:
        """Return worker id -> pid of this instance's workers of a kind."""
        prefix = f"{self.dev.layout.worker_prefix}{kind}:"
        return {worker.worker_id: worker.pid for worker in scan(prefix)}

    def logs(self, lines: int = 40) -> str:
        if not devnode.exists(self.directory):
            return ""
        found = []
        for path in sorted(self.dev.layout.logs.glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            found.append(f"--- {path.name}\n" + "\n".join(line[:600] for line in tail))
        return "\n".join(found)


def wait_for(probe: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Return the first true value of `probe`; an error of a CLI call counts as not yet."""
    deadline = time.monotonic() + timeout_s
    last: BaseException | None = None
    while time.monotonic() < deadline:
        try:
            if value := probe():
                return value
        except (CommandFailed, StopIteration, KeyError) as error:
            last = error
        time.sleep(0.1)
    raise AssertionError(f"not within {timeout_s:g} s: {what}; last error: {last}")


@contextlib.contextmanager
def live_node(**environment: str) -> Iterator[LiveNode]:
    """A running node; afterwards it is purged and nothing of its instance may be left."""
    node = LiveNode(scratch(), environment)
    before = Machine.look()
    try:
        node.up()
        instance = node.dev.layout.instance
        yield node
        node.down("--purge")
        leaks = traces_of(instance) + before.changes()
        assert leaks == [], leaks
    finally:
        if devnode.exists(node.directory):
            _force_away(node)
        shutil.rmtree(node.directory, ignore_errors=True)


def _force_away(node: LiveNode) -> None:
    """After a failed test: end everything of the instance, so that it harms no other test."""
    import anyio

    print(node.logs())
    dev = node.dev
    anyio.run(devnode.stop, dev)
    anyio.run(devnode.remove, dev)
    for netns in Path("/run/netns").glob(f"chv-{dev.layout.instance}-*"):
        subprocess.run(["ip", "netns", "delete", netns.name], check=False)


def traces_of(instance: str) -> list[str]:
    """Return everything on this machine that carries an instance's id."""
    found = [f"process {worker.worker_id}" for worker in scan(f"chv:{instance}:")]
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if instance.encode() in process.read_bytes():
                found.append(f"process {process.parent.name}: {process.read_bytes()[:200]!r}")
    for directory in ("/run/netns", "/run/chv", "/var/lib/chv", "/run"):
        with contextlib.suppress(OSError):
            found += [str(path) for path in Path(directory).iterdir() if instance in path.name]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if instance in line:
            found.append(f"mount {line}")
    for line in Path("/proc/net/unix").read_text().splitlines():
        if instance in line:
            found.append(f"socket {line}")
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
    found += [line for line in links.stdout.splitlines() if instance in line]
    cgroups = subprocess.run(
        ["find", "/sys/fs/cgroup", "-maxdepth", "3", "-name", f"*{instance}*"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found += cgroups.stdout.split()
    return found


@dataclass(frozen=True)
class Machine:
    """What of the machine itself must not change, whoever uses it."""

    rules: str
    links: frozenset[str]

    @classmethod
    def look(cls) -> Machine:
        rules = subprocess.run(
            ["nft", "list", "ruleset"], capture_output=True, text=True, check=True
        )
        links = frozenset(path.name for path in Path("/sys/class/net").iterdir())
        return cls(rules.stdout, links)

    def changes(self) -> list[str]:
        now = Machine.look()
        changed = [f"link {name}" for name in now.links ^ self.links]
        return changed + (["the host's nft ruleset"] if now.rules != self.rules else [])
