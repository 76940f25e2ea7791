"""One leak of every kind, made as a node's own things are, and by none of its daemons."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from chv.common.ids import Ids, short_uid
from chv.common.layout import Layout
from chv.common.process import CgroupProvider, choose_provider

IDS = Ids()
SLEEP = "import time; time.sleep(600)"


@dataclass
class Planted:
    """What was planted: kind -> name as `chv leaks` shows it; None: this machine has none."""

    names: dict[str, str] = field(default_factory=dict)
    pids: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def remove(self) -> None:
        """End what a test did not have reaped, and collect what it had."""
        for process in self.pids:
            process.kill()
            process.wait()
        if "mount" in self.names:
            subprocess.run(["umount", self.names["mount"]], check=False, capture_output=True)


def run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True)


@contextlib.contextmanager
def planted(layout: Layout, host_netns: str) -> Iterator[Planted]:
    """Plant them; the network namespace `host_netns` is what nwd takes for the host's."""
    found = Planted()
    try:
        plant(layout, host_netns, found)
        yield found
    finally:
        found.remove()


def plant(layout: Layout, host_netns: str, found: Planted) -> None:
    names, uid = found.names, IDS.uid()
    found.pids.append(stray(layout, "vmm", uid))
    names["process"] = worker_id_of(found.pids[-1])
    found.pids.append(stray(layout, "qsd", IDS.uid()))
    names["process of stord"] = worker_id_of(found.pids[-1])
    names["netns"] = layout.netns(uid)
    run("ip", "netns", "add", names["netns"])
    run("ip", "-n", names["netns"], "tuntap", "add", layout.tap(uid), "mode", "tap")
    names["link"] = f"{names['netns']}/{layout.tap(uid)}"
    table = f"{layout.host_table}_old"
    run("ip", "netns", "exec", host_netns, "nft", "add", "table", "inet", table)
    names["nft"] = f"inet {table}"
    names["socket"] = bind(layout.api / "other.sock")
    directory = layout.vms / short_uid(uid)
    directory.mkdir()
    names["file"] = str(directory)
    names["export"] = bind(directory / f"{short_uid(IDS.uid())}.sock")
    volume = layout.volume(IDS.uid())
    volume.mkdir(parents=True)
    (volume / "disk.raw").write_bytes(b"x" * 8192)
    names["volume"] = str(volume)
    mount = layout.run / "net" / short_uid(uid)
    mount.mkdir(parents=True)
    names["directory of nwd"] = str(mount)
    run("mount", "-t", "tmpfs", "chv-test", str(mount))
    names["mount"] = str(mount)
    provider = choose_provider(layout)
    if isinstance(provider, CgroupProvider):
        leaf = provider.base / f"vmm-{short_uid(uid)}-{IDS.nonce()}"
        leaf.mkdir()
        names["cgroup"] = str(leaf)


def stray(layout: Layout, kind: str, uid: str) -> subprocess.Popen[bytes]:
    """A process whose command line is that of a worker of ours."""
    worker_id = layout.worker_id(kind, uid, IDS.nonce())
    return subprocess.Popen([sys.executable, "-c", SLEEP, worker_id], start_new_session=True)


def worker_id_of(process: subprocess.Popen[bytes]) -> str:
    argv = process.args
    assert isinstance(argv, list)
    return str(argv[-1])


def bind(path: Path) -> str:
    """A socket file that nobody listens on any more."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(path))
    return str(path)
