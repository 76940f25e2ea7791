"""A VM's short life on Cloud Hypervisor: by our driver, and by hand with the same calls.

By hand is what a shell script does: the VMM started on a path, then a process of `ch-remote` for
each call (`CHV_CH_REMOTE` or PATH names it). Without it a new connection for each call stands in,
which is quicker than any script. Both run as root, on one bare VMM, in turns.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio

from chv.common.errors import Unavailable
from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import SpawnSpec, choose_provider, wait_gone
from chv.probe.image import ELF_PATH
from chv.vmm.cloud_hypervisor.driver import CloudHypervisorDriver
from chv.vmm.driver import VmmConfig
from chv.vmm.handing import handed_over

IDS = Ids()
ENVIRONMENT = "CHV_CLOUD_HYPERVISOR"
REMOTE = "CHV_CH_REMOTE"
POLL_S = 0.001
CALLS = ("boot", "info", "pause", "resume", "info", "shutdown", "shutdown-vmm")
_PUT = {"shutdown-vmm": "vmm.shutdown"}


def cloud_hypervisor() -> str:
    """Return the binary to measure; empty where there is none, or no KVM."""
    found = os.environ.get(ENVIRONMENT, "") or shutil.which("cloud-hypervisor") or ""
    return found if Path("/dev/kvm").exists() else ""


def measure(binary: str, rounds: int) -> tuple[list[float], list[float], str]:
    """Return our times and those by hand in milliseconds, and what did it by hand."""
    remote = os.environ.get(REMOTE, "") or shutil.which("ch-remote") or ""
    ours, by_hand = [], []
    with _node() as (layout, base):
        for _ in range(rounds):
            ours.append(anyio.run(_ours, layout, base, binary) * 1000)
            by_hand.append(_by_hand(base, binary, remote) * 1000)
    return ours, by_hand, "ch-remote" if remote else "a connection a call"


@contextmanager
def _node() -> Iterator[tuple[Layout, Path]]:
    base = Path(tempfile.mkdtemp(prefix="chv-bench-", dir="/run"))
    try:
        yield Layout(IDS.instance(), base, base), base
    finally:
        shutil.rmtree(base)


def _config(layout: Layout, base: Path) -> VmmConfig:
    uid = IDS.uid()
    runtime_dir = base / "vm" / "vmm"
    runtime_dir.mkdir(parents=True)
    return VmmConfig(
        vm_id=uid,
        uuid=uid,
        name="p",
        worker_id=layout.worker_id("vmm", uid, IDS.nonce()),
        cpus=1,
        memory_bytes=128 << 20,
        kernel=str(ELF_PATH),
        runtime_dir=str(runtime_dir),
    )


# --- by our driver


async def _ours(layout: Layout, base: Path, binary: str) -> float:
    driver, config = CloudHypervisorDriver((binary,)), _config(layout, base)
    runtime_dir = Path(config.runtime_dir)
    provider = choose_provider(layout)
    begun = time.perf_counter()
    launch = driver.launch(config)
    with handed_over(launch) as files:
        spec = SpawnSpec(
            worker_id=config.worker_id,
            argv=launch.argv,
            fds=dict(files),
            log_path=str(base / "vmm.log"),
        )
        record = await provider.spawn(spec)
    await _answers(driver, runtime_dir)
    await driver.create(runtime_dir, config, {})
    await driver.boot(runtime_dir)
    await driver.observe(runtime_dir)
    await driver.pause(runtime_dir)
    await driver.resume(runtime_dir)
    await driver.observe(runtime_dir)
    await driver.halt(runtime_dir)
    await driver.quit(runtime_dir)
    await wait_gone(record)
    took = time.perf_counter() - begun
    await provider.cleanup(record)
    await provider.retire()
    shutil.rmtree(base / "vm")
    return took


async def _answers(driver: CloudHypervisorDriver, runtime_dir: Path) -> None:
    while True:
        try:
            await driver.observe(runtime_dir)
        except Unavailable:
            await anyio.sleep(POLL_S)
        else:
            return


# --- by hand


def _by_hand(base: Path, binary: str, remote: str) -> float:
    api, body = base / "api.sock", base / "vm.json"
    body.write_text(json.dumps(_body(base)))
    call = _remote(remote, api, body) if remote else _connections(api, body)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RUST_")}
    begun = time.perf_counter()
    with (base / "vmm.log").open("wb") as log:
        argv = [binary, "--api-socket", str(api), "--no-shutdown"]
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=clean)
    try:
        while not call("ping"):
            time.sleep(POLL_S)
        for name in ("create", *CALLS):
            if not call(name):
                raise SystemExit(f"{name} failed: {(base / 'vmm.log').read_text()}")
        process.wait(10)
        return time.perf_counter() - begun
    finally:
        process.kill()
        process.wait()
        api.unlink(missing_ok=True)
        (base / "serial.sock").unlink(missing_ok=True)


def _body(base: Path) -> dict[str, Any]:
    return {
        "payload": {"kernel": str(ELF_PATH), "cmdline": ""},
        "cpus": {"boot_vcpus": 1, "max_vcpus": 1},
        "memory": {"size": 128 << 20, "shared": True},
        "serial": {"mode": "Socket", "socket": str(base / "serial.sock")},
        "console": {"mode": "Off"},
        "pvpanic": True,
    }


def _remote(remote: str, api: Path, body: Path) -> Callable[[str], bool]:
    def call(name: str) -> bool:
        argv = [remote, "--api-socket", str(api), name, *([str(body)] if name == "create" else [])]
        return subprocess.run(argv, capture_output=True, check=False).returncode == 0

    return call


def _connections(api: Path, body: Path) -> Callable[[str], bool]:
    def call(name: str) -> bool:
        path = _PUT.get(name) or ("vmm.ping" if name == "ping" else f"vm.{name}")
        content = body.read_bytes() if name == "create" else b""
        verb = "GET" if name in ("ping", "info") else "PUT"
        length = f"Content-Length: {len(content)}\r\n" if content else ""
        request = f"{verb} /api/v1/{path} HTTP/1.1\r\n{length}\r\n".encode() + content
        with socket.socket(socket.AF_UNIX) as connection:
            if connection.connect_ex(str(api)) != 0:
                return False
            connection.sendall(request)
            return connection.recv(65536)[9:12] in (b"200", b"204")

    return call
