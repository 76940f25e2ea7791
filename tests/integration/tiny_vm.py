"""A tiny guest under QEMU, driven the way a person would: console, QMP, ssh with a pinned key."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from chv.guest.host_keys import known_hosts_line, make_host_key
from chv.guest.seed_disk import SeedNic, SeedSpec, build_seed
from chv.guest.tiny import KERNEL_CMDLINE, TinyImage
from tests.helpers import wait_until

MAC = "52:54:00:12:34:56"
STATIC_MAC = "52:54:00:12:34:57"
SECRET = "s3cr't $x"
# An emulated boot takes 3 s on an idle machine and has been seen to take 20 on a busy one.
BOOT_TIMEOUT_S = 90.0


@dataclass
class TinyVm:
    """A started VM and what is needed to reach it."""

    directory: Path
    process: subprocess.Popen[bytes]
    port: int

    @property
    def console(self) -> str:
        """Everything that the guest has written to its serial port."""
        return (self.directory / "console").read_text(errors="replace")

    async def seen(self, text: str, *, times: int = 1) -> None:
        """Wait until the console shows `text`, and fail at once if QEMU ends before."""

        def probe() -> bool:
            shown = self.console.count(text) >= times
            assert shown or self.process.poll() is None, self.console
            return shown

        await wait_until(probe, timeout_s=BOOT_TIMEOUT_S, what=f"{text!r} on the console")

    async def ended(self, timeout_s: float) -> int:
        """Wait for QEMU to end by itself and return its exit code."""
        await wait_until(lambda: self.process.poll() is not None, timeout_s=timeout_s)
        return self.process.returncode

    async def ssh(self, command: str, known_hosts: str = "known_hosts") -> tuple[int, str]:
        """Run a command in the guest; return exit code and both outputs."""
        options = [
            f"UserKnownHostsFile={self.directory / known_hosts}",
            "StrictHostKeyChecking=yes", "IdentitiesOnly=yes", "BatchMode=yes",
            "ConnectTimeout=20", "LogLevel=ERROR",
        ]  # fmt: skip
        argv = ["ssh", "-F", "none", "-i", str(self.directory / "id"), "-p", str(self.port)]
        argv += [part for option in options for part in ("-o", option)]
        done = await anyio.run_process(
            [*argv, "root@127.0.0.1", command], check=False, stderr=subprocess.STDOUT
        )
        return done.returncode, done.stdout.decode(errors="replace")

    async def qmp(self, command: str, **arguments: Any) -> None:
        """Send one QMP command and wait for its answer."""
        await anyio.to_thread.run_sync(self._qmp, {"execute": command, "arguments": arguments})

    def _qmp(self, command: dict[str, Any]) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(str(self.directory / "qmp"))
            with connection.makefile("rw") as stream:
                stream.readline()
                for request in ({"execute": "qmp_capabilities"}, command):
                    stream.write(json.dumps(request) + "\n")
                    stream.flush()
                    answer = json.loads(stream.readline())
                    while "event" in answer:
                        answer = json.loads(stream.readline())
                    assert "return" in answer, answer


def free_port() -> int:
    """Return a port of the loopback address that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


def write_seed(directory: Path, port: int) -> None:
    """Make a user's key, a seed disk and the known_hosts file that pins its host key."""
    make_key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / "id")]
    subprocess.run(make_key, check=True)
    host_key = make_host_key()
    spec = SeedSpec(
        hostname="hello",
        instance_id="i-1",
        host_key=host_key,
        authorized_keys=[(directory / "id.pub").read_text().strip()],
        guest_env={"TOKEN": SECRET},
        nics=[
            SeedNic(MAC),
            SeedNic(STATIC_MAC, "10.8.0.77/24", dns=("10.8.0.3",), search="static.chv"),
        ],
    )
    (directory / "seed.iso").write_bytes(build_seed(spec))
    host = f"[127.0.0.1]:{port}"
    (directory / "known_hosts").write_text(known_hosts_line(host, host_key.public))
    wrong = known_hosts_line(host, make_host_key().public)
    (directory / "wrong_known_hosts").write_text(wrong)


def _start(argv: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL)


@asynccontextmanager
async def boot(
    image: TinyImage, directory: Path, *, seeded: bool, extra: Sequence[str] = ()
) -> AsyncIterator[TinyVm]:
    """Boot the image with a data disk, and a seed disk if `seeded`; kill it in the end."""
    port = free_port()
    argv = [
        "qemu-system-x86_64", "-machine", "q35,accel=tcg", "-m", "256", "-nodefaults",
        "-display", "none", "-kernel", str(image.path("kernel")),
        "-initrd", str(image.path("initramfs")), "-append", KERNEL_CMDLINE,
        "-serial", f"file:{directory / 'console'}", "-device", "virtio-rng-pci",
        "-device", "pcie-root-port,id=spare",
        "-qmp", f"unix:{directory / 'qmp'},server=on,wait=off",
    ]  # fmt: skip
    if seeded:
        write_seed(directory, port)
        shutil.copyfile(image.path("disk.raw"), directory / "disk")
        argv += ["-drive", f"if=virtio,format=raw,readonly=on,file={directory / 'seed.iso'}"]
        argv += ["-drive", f"if=virtio,format=raw,file={directory / 'disk'}"]
        forward = f"hostfwd=tcp:127.0.0.1:{port}-:22"
        argv += ["-nic", f"user,model=virtio-net-pci,mac={MAC},dnssearch=demo.chv,{forward}"]
        argv += ["-nic", f"user,model=virtio-net-pci,mac={STATIC_MAC},net=10.8.0.0/24"]
    (directory / "console").touch()
    process = _start([*argv, *extra])
    try:
        yield TinyVm(directory, process, port)
    finally:
        process.kill()
        process.wait()
