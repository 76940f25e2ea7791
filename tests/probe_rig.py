"""The probe guest on a bare VMM, without any driver of ours: its serial port, its VMM's monitor.

What is started ends with the stack that it was given. Cloud Hypervisor is the one that
`CHV_CLOUD_HYPERVISOR` or PATH names; tests of it skip where there is none.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from chv.probe.events import Event
from chv.probe.image import ELF_PATH, ProbeCommand
from chv.probe.lines import LineReader
from tests.helpers import wait_until

E = TypeVar("E", bound=Event)
QEMU = "qemu-system-x86_64"
PORTS = 4


class Serial:
    """The guest's serial port: all events so far, and a way to speak to it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._reader = LineReader()
        self.events: list[Event] = []
        self.closed = False

    def poll(self) -> None:
        try:
            while data := self._connection.recv(65536):
                self.events += self._reader.feed(data)
        except BlockingIOError:
            return
        except OSError:  # the VMM is gone, or has made the socket anew
            pass
        self.closed = True

    def all(self, kind: type[E]) -> list[E]:
        self.poll()
        return [event for event in self.events if isinstance(event, kind)]

    async def wait(self, kind: type[E], count: int = 1, timeout_s: float = 10) -> E:
        """Return the count-th event of this kind."""

        def there() -> list[E]:
            found = self.all(kind)
            return found if len(found) >= count else []

        try:
            found: list[E] = await wait_until(there, timeout_s=timeout_s, what=kind.__name__)
        except AssertionError as missing:
            raise AssertionError(f"no {count}. {kind.__name__}: {self.events[-20:]}") from missing
        return found[count - 1]

    def type(self, line: str) -> None:
        self._connection.sendall(line.encode() + b"\n")


class Machine:
    """A VMM process with the probe in it."""

    def __init__(self, process: subprocess.Popen[bytes], serial: Serial, control: Path) -> None:
        self.process = process
        self.serial = serial
        self.control = control

    async def exit(self, timeout_s: float = 10) -> int:
        """Return the exit status of the VMM, which may be 0."""
        await wait_until(lambda: self.process.poll() is not None, timeout_s=timeout_s, what="exit")
        return int(self.process.returncode)


def _connect(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    if connection.connect_ex(str(path)) == 0:
        return connection
    connection.close()
    return None


async def connected(path: Path) -> socket.socket:
    """Connect to a socket that a process is about to make."""

    def try_it() -> socket.socket | None:
        return _connect(path)

    found = await wait_until(try_it, what=str(path))
    assert found is not None
    return found


@contextmanager
def started(argv: Sequence[str], log: Path, fds: Sequence[int] = ()) -> Iterator[Any]:
    """Run a process, and end it."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RUST_")}
    with log.open("wb") as err:
        process = subprocess.Popen(argv, stdout=err, stderr=err, env=clean, pass_fds=fds)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


class Qemu(Machine):
    """QEMU with TCG on q35, with root ports `port0`... to plug into."""

    async def connect(self) -> None:
        self._monitor = (await connected(self.control)).makefile("rw")
        self._answer()
        self.ask("qmp_capabilities")

    def _answer(self) -> dict[str, Any]:
        while True:
            answer: dict[str, Any] = json.loads(self._monitor.readline())
            if "event" not in answer:
                return answer

    def ask(self, command: str, **arguments: object) -> Any:
        self._monitor.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self._monitor.flush()
        answer = self._answer()
        assert "return" in answer, (command, answer)
        return answer["return"]

    def plug_disk(self, name: str, image: Path, port: int) -> None:
        file, node = {"driver": "file", "filename": str(image)}, f"{name}-{port}"
        self.ask("blockdev-add", driver="raw", **{"node-name": node, "file": file})
        self.ask("device_add", driver="virtio-blk-pci", id=name, bus=f"port{port}", drive=node,
                 serial=name, **{"share-rw": True})  # fmt: skip

    def unplug(self, name: str) -> None:
        self.ask("device_del", id=name)


def _ports() -> list[str]:
    argv = []
    for number in range(PORTS):
        multi = ",multifunction=on" if number == 0 else ""
        place = f"bus=pcie.0,chassis={number + 1},addr=2.{number},io-reserve=0{multi}"
        argv += ["-device", f"pcie-root-port,id=port{number},{place}"]
    return argv


async def qemu(
    stack: ExitStack, home: Path, command: ProbeCommand, *more: str, fds: Sequence[int] = ()
) -> Qemu:
    """Boot the probe on QEMU; the stack ends it."""
    if shutil.which(QEMU) is None:
        pytest.skip(f"no {QEMU}")
    argv = [
        QEMU, "-M", "q35,accel=tcg,memory-backend=m", "-cpu", "max", "-nodefaults",
        "-object", "memory-backend-memfd,id=m,size=64M,share=on", "-m", "64,slots=4,maxmem=512M",
        "-smp", "1,sockets=4,cores=1,threads=1,maxcpus=4", "-display", "none",
        "-kernel", str(ELF_PATH), "-append", command.render(),
        "-chardev", f"socket,id=s,path={home}/serial,server=on,wait=on", "-serial", "chardev:s",
        "-qmp", f"unix:{home}/qmp,server=on,wait=off", *_ports(), *more,
    ]  # fmt: skip
    process = stack.enter_context(started(argv, home / "vmm.log", fds))
    serial = Serial(await connected(home / "serial"))
    machine = Qemu(process, serial, home / "qmp")
    await machine.connect()
    return machine


def disk(image: Path, serial: str, port: int = 0) -> tuple[str, ...]:
    """QEMU's arguments for a plain disk that is there from the start."""
    return (
        "-blockdev", f"driver=file,filename={image},node-name={serial}-file",
        "-blockdev", f"driver=raw,file={serial}-file,node-name={serial}",
        "-device", f"virtio-blk-pci,id={serial},drive={serial},serial={serial},bus=port{port}",
    )  # fmt: skip


class CloudHypervisor(Machine):
    """The real VMM, spoken to by its API."""

    def get(self, call: str) -> str:
        return self._ask("GET", call)

    def put(self, call: str, body: object = None, fds: Sequence[int] = ()) -> None:
        self._ask("PUT", call, b"" if body is None else json.dumps(body).encode(), fds)

    def _ask(self, verb: str, call: str, data: bytes = b"", fds: Sequence[int] = ()) -> str:
        head = f"{verb} /api/v1/{call} HTTP/1.1\r\nHost: localhost\r\n"
        if data:
            head += f"Content-Length: {len(data)}\r\n"
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(str(self.control))
            socket.send_fds(connection, [head.encode() + b"\r\n" + data], fds)
            answer = connection.recv(65536).decode()
        assert answer.split()[1] in {"200", "204"}, (call, answer)
        return answer


def cloud_hypervisor_binary() -> str:
    """Return the binary that tests use, or skip."""
    found = os.environ.get("CHV_CLOUD_HYPERVISOR", "").split(":")[0]
    found = found or shutil.which("cloud-hypervisor") or ""
    if not found:
        pytest.skip("no Cloud Hypervisor: CHV_CLOUD_HYPERVISOR names none, PATH holds none")
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        pytest.skip("no usable /dev/kvm")
    return found


async def cloud_hypervisor(
    stack: ExitStack,
    home: Path,
    command: ProbeCommand,
    *,
    disks: Sequence[Mapping[str, object]] = (),
    nic: dict[str, object] | None = None,
    tap: int = -1,
) -> CloudHypervisor:
    """Boot the probe on Cloud Hypervisor; the stack ends it."""
    argv = [cloud_hypervisor_binary(), "--api-socket", f"path={home}/api"]
    process = stack.enter_context(started(argv, home / "vmm.log"))
    (await connected(home / "api")).close()
    machine = CloudHypervisor(process, Serial(socket.socket()), home / "api")
    vm: dict[str, object] = {
        "payload": {"kernel": str(ELF_PATH), "cmdline": command.render()},
        "cpus": {"boot_vcpus": 1, "max_vcpus": 4},
        "memory": {"size": 64 << 20, "shared": True, "hotplug_size": 512 << 20},
        "serial": {"mode": "Socket", "socket": str(home / "serial")},
        "console": {"mode": "Off"},
        "disks": list(disks),
    }
    machine.put("vm.create", vm)
    if nic is not None:
        machine.put("vm.add-net", nic, fds=[tap])
    machine.serial = Serial(await connected(home / "serial"))
    machine.put("vm.boot")
    return machine
