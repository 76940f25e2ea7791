"""A QEMU of the agent's, started once more by hand: the same command line, to its first line.

The VM must have neither disks of volumes nor NICs, as those come by descriptors and daemons.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path

from chv.common.layout import Layout
from chv.common.process import scan

BOOT = b"@0 boot "
START_S_MAX = 30.0


def command_line(layout: Layout, vm_uid: str, scratch: Path) -> list[str]:
    """Return the argv of a VM's process, with its sockets in a directory of their own."""
    prefix = f"{layout.worker_prefix}vmm:"
    (worker,) = [each for each in scan(prefix) if layout.vm(vm_uid).name in each.worker_id]
    argv = Path(f"/proc/{worker.pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    runtime_dir = str(layout.vmm(vm_uid))
    return [element.replace(runtime_dir, str(scratch)) for element in argv]


def first_line_ms(argv: list[str], scratch: Path) -> float:
    """Start it, let it run, and return when its guest has spoken."""
    clean = {"PATH": os.environ["PATH"]}
    begun = time.perf_counter()
    process = subprocess.Popen(argv, env=clean, stderr=subprocess.PIPE, cwd=scratch)
    try:
        with (
            _connected(scratch / "serial.sock", process) as serial,
            _connected(scratch / "qmp.sock", process) as monitor,
        ):
            if "-S" in argv:
                _continue(monitor)
            heard = b""
            while BOOT not in heard:
                data = serial.recv(4096)
                if not data:
                    raise SystemExit("QEMU hung up")
                heard += data
            return (time.perf_counter() - begun) * 1000
    finally:
        process.kill()
        process.communicate()
        for path in scratch.iterdir():
            path.unlink()


def _continue(monitor: socket.socket) -> None:
    reader = monitor.makefile("rw")
    reader.readline()
    for command in ("qmp_capabilities", "cont"):
        reader.write(json.dumps({"execute": command}) + "\n")
        reader.flush()
        reader.readline()


def _connected(path: Path, process: subprocess.Popen[bytes]) -> socket.socket:
    deadline = time.monotonic() + START_S_MAX
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(START_S_MAX)
    while connection.connect_ex(str(path)) != 0:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"no QEMU: {process.stderr.read()!r}" if process.stderr else "")
        time.sleep(0.001)
    return connection
