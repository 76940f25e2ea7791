"""A storage daemon and an in-flight proxy without stord: started, killed and started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chv.stord.proxy import command
from tests.integration.stord_helpers import MIB, short_root

IMAGE_BYTES = 16 * MIB
READY_S = 5.0


class ProxyRig:
    """One disk. `front` is where a VMM connects, `live` the export of the storage daemon."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.front, self.live, self.image = root / "disk.sock", root / "live", root / "disk.raw"
        self.log = root / "log"
        self.backend: subprocess.Popen[bytes] | None = None
        self.proxy: subprocess.Popen[bytes] | None = None
        self._number = 0
        with self.image.open("wb") as image:
            image.truncate(IMAGE_BYTES)

    # --- storage daemon
    def start_backend(self) -> None:
        """Start one on a path of its own; the write cache is left to the proxy."""
        self._number += 1
        path, pid_file = self.root / f"qsd{self._number}", self.root / f"pid{self._number}"
        node = {
            "driver": "raw",
            "node-name": "disk",
            "file": {"driver": "file", "filename": str(self.image), "locking": "off"}
            | {"cache": {"direct": True}, "aio": "native"},
        }
        export = f"vhost-user-blk,id=e,node-name=disk,addr.type=unix,addr.path={path},writable=on"
        argv = ["qemu-storage-daemon", "--blockdev", json.dumps(node), "--export", export]
        with self.log.open("ab") as log:
            self.backend = subprocess.Popen([*argv, "--pidfile", str(pid_file)], stderr=log)
        end = time.monotonic() + READY_S
        while not pid_file.exists():
            assert time.monotonic() < end and self.backend.poll() is None, self.log.read_text()
            time.sleep(0.002)
        path.rename(self.live)

    def end_backend(self, number: int = signal.SIGKILL) -> None:
        _end(self.backend, number)
        self.live.unlink(missing_ok=True)

    def restart_backend(self, number: int = signal.SIGKILL) -> None:
        self.end_backend(number)
        self.start_backend()

    # --- proxy
    def start_proxy(self) -> None:
        """Start one with a new listener, put in the old one's place."""
        moving = self.root / ".disk"
        with command.listen(moving) as listener:
            moving.rename(self.front)
            self.proxy = self.spawn_proxy(listener)

    def spawn_proxy(self, listener: socket.socket) -> subprocess.Popen[bytes]:
        """Start one; its listener has the number that it has for stord's."""
        program = command.install(self.root)
        moved = f'exec "$@" {command.LISTENER_FD}<&0 </dev/null'
        argv = ["sh", "-c", moved, "sh"]
        argv += command.argv("chv:tester:proxy:disk:1", self.live, program)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                argv, stdin=listener.fileno(), stderr=log, env={"PATH": os.defpath}
            )

    def end_proxy(self, number: int = signal.SIGKILL) -> None:
        _end(self.proxy, number)

    def pss_bytes(self) -> int:
        assert self.proxy is not None
        for line in Path(f"/proc/{self.proxy.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no Pss")

    def proxy_fds(self) -> int:
        assert self.proxy is not None
        return len(list(Path(f"/proc/{self.proxy.pid}/fd").iterdir()))


def _end(process: subprocess.Popen[bytes] | None, number: int) -> None:
    if process is not None and process.poll() is None:
        process.send_signal(number)
        process.wait()


@contextmanager
def open_rig() -> Iterator[ProxyRig]:
    """Both of them running."""
    with short_root() as root:
        rig = ProxyRig(root)
        try:
            rig.start_backend()
            rig.start_proxy()
            yield rig
        finally:
            rig.end_proxy()
            rig.end_backend()
