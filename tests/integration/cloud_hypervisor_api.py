"""Cloud Hypervisor by its raw API, for tests: the real program, and its double, from one hand.

Nothing of `chv.vmm` is used in here: what the driver takes for granted is what is tested.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROBE = ROOT / "chv" / "probe" / "probe.elf"
ANSWER_S_MAX = 10.0
# The word that stands in argv for the double, in place of a path.
DOUBLE = (sys.executable, "-S", "-m", "tests.doubles.cloud_hypervisor")
READY = b" ready virtio="


@dataclass(frozen=True)
class Answer:
    """`head` is the raw status line and headers; an empty `head` means: hung up, no answer."""

    head: bytes = b""
    body: bytes = b""

    @property
    def status(self) -> int:
        return int(self.head[9:12]) if self.head else 0

    @property
    def json(self) -> Any:
        return json.loads(self.body, strict=False)

    @property
    def errors(self) -> list[str]:
        """The messages beyond the one that all have in common."""
        found: list[str] = self.json
        assert found[0] == "Error from API", found
        return found[1:]


class Line:
    """One connection."""

    def __init__(self, path: Path, limit_s: float = ANSWER_S_MAX) -> None:
        self.channel = socket.socket(socket.AF_UNIX)
        self.channel.settimeout(limit_s)
        self.channel.connect(str(path))
        self._rest = b""

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        if fds:
            assert socket.send_fds(self.channel, [data], list(fds)) == len(data)
        else:
            self.channel.sendall(data)

    def answer(self) -> Answer:
        """Read one answer."""
        data = self._rest
        while b"\r\n\r\n" not in data:
            more = self._receive()
            if not more:
                return Answer()
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        while len(body) < length:
            more = self._receive()
            assert more, "cut short"
            body += more
        self._rest = body[length:]
        return Answer(head, body[:length])

    def _receive(self) -> bytes:
        try:
            return self.channel.recv(65536)
        except ConnectionResetError:
            return b""

    def call(self, method: str, name: str, body: Any = None, fds: Sequence[int] = ()) -> Answer:
        self.send(encode(method, name, body), fds)
        return self.answer()


def encode(method: str, name: str, body: Any = None) -> bytes:
    """Return a request; `body`: bytes as they are, None for none, or what JSON can say."""
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    length = "" if content is None else f"Content-Length: {len(content)}\r\n"
    return f"{method} /api/v1/{name} HTTP/1.1\r\n{length}\r\n".encode() + (content or b"")


@dataclass
class Vmm:
    """A running program and the directory that is all its own."""

    kind: str
    directory: Path
    process: subprocess.Popen[bytes]
    lines: list[Line] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        return self.directory / "api.sock"

    @property
    def serial(self) -> Path:
        return self.directory / "serial.sock"

    def line(self, limit_s: float = ANSWER_S_MAX) -> Line:
        line = Line(self.socket, limit_s)
        self.lines.append(line)
        return line

    def raw(self, data: bytes) -> Answer:
        """Send bytes on a connection of their own."""
        with Line(self.socket) as line:
            line.send(data)
            return line.answer()

    def put(
        self, name: str, body: Any = None, fds: Sequence[int] = (), limit_s: float = ANSWER_S_MAX
    ) -> Answer:
        with Line(self.socket, limit_s) as line:
            return line.call("PUT", name, body, fds)

    def get(self, name: str, limit_s: float = ANSWER_S_MAX) -> Answer:
        with Line(self.socket, limit_s) as line:
            return line.call("GET", name)

    def did(self, name: str, body: Any = None, fds: Sequence[int] = ()) -> None:
        """PUT what is to succeed without a word."""
        answer = self.put(name, body, fds)
        assert (answer.status, answer.body) == (204, b""), (name, answer)

    def refused(self, name: str, body: Any = None, *, status: int = 500) -> list[str]:
        """PUT what is to be refused; returns the messages, the API's own left out."""
        answer = self.put(name, body)
        assert answer.status == status, (name, answer)
        return answer.errors

    def config(self, **changes: Any) -> dict[str, Any]:
        """Return what a small VM with the probe in it is made of."""
        return {
            "payload": {"kernel": str(PROBE), "cmdline": "beat=200"},
            "cpus": {"boot_vcpus": 1, "max_vcpus": 1},
            "memory": {"size": 64 << 20, "shared": True},
            "serial": {"mode": "Socket", "socket": str(self.serial)},
            "console": {"mode": "Off"},
        } | changes

    def disk(self, name: str, **changes: Any) -> dict[str, Any]:
        """Return a disk on a file that is made here."""
        path = self.directory / f"{name}.raw"
        if not path.exists():
            path.write_bytes(bytes(1 << 20))
        return {"id": name, "path": str(path), "image_type": "Raw"} | changes

    def start(self, **changes: Any) -> None:
        """Create and boot, and wait until the guest is up."""
        self.did("vm.create", self.config(**changes))
        with self.viewer() as viewer:
            self.did("vm.boot")
            viewer.wait(READY)

    def viewer(self) -> Viewer:
        return Viewer(self.serial)

    def info(self) -> dict[str, Any]:
        answer = self.get("vm.info")
        assert answer.status == 200, answer
        found: dict[str, Any] = answer.json
        return found

    def state(self) -> str:
        """Return the VM's state, or "" where there is none."""
        answer = self.get("vm.info")
        return "" if answer.status == 404 else str(answer.json["state"])

    def becomes(self, state: str) -> None:
        wait_for(lambda: self.state() == state, what=state)

    def text(self) -> str:
        return (self.directory / "events").read_text()

    def records(self) -> list[dict[str, Any]]:
        found = []
        for part in self.text().split("\n\n"):
            with contextlib.suppress(ValueError):
                found.append(json.loads(part))
        return found

    def events(self, *, devices: bool = False) -> list[str]:
        """Return the names of what was told; those of devices come when the guest likes."""
        names = [f"{each['source']}/{each['event']}" for each in self.records()]
        quiet = ("virtio-device/", "vm/device-removed")
        return names if devices else [name for name in names if not name.startswith(quiet)]

    def told(self, *expected: str) -> None:
        """Wait until these are the events so far; they come a little after the answers."""
        wait_for(lambda: self.events() == list(expected), what=lambda: str(self.events()))

    def send(self, number: int) -> None:
        """Send a signal; a stop is one only when every thread has come to it."""
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:
            tasks = Path(f"/proc/{self.process.pid}/task")
            stopped = lambda: all(  # noqa: E731
                (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
                for task in tasks.iterdir()
            )
            wait_for(stopped, what=lambda: "every thread stands")

    def code(self) -> int:
        """Wait for the end."""
        return self.process.wait(ANSWER_S_MAX)

    def end(self) -> None:
        for line in self.lines:
            line.channel.close()
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.send(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        shutil.rmtree(self.directory)


class Viewer:
    """Somebody at the serial socket."""

    def __init__(self, path: Path) -> None:
        self.channel = socket.socket(socket.AF_UNIX)
        self.channel.settimeout(ANSWER_S_MAX)
        self.channel.connect(str(path))
        self.seen = b""

    def __enter__(self) -> Viewer:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def wait(self, text: bytes) -> bytes:
        """Read up to the end of the line in which `text` comes."""
        while text not in self.seen or b"\n" not in self.seen.partition(text)[2]:
            data = self.channel.recv(65536)
            assert data, f"hung up after {self.seen!r}"
            self.seen += data
        return self.seen

    def hung_up(self) -> bool:
        """Wait for the end of it."""
        with contextlib.suppress(ConnectionResetError):
            while data := self.channel.recv(65536):
                self.seen += data
        return True

    def type(self, words: bytes) -> None:
        """Type a line; what a viewer before has left in the guest's ends first."""
        self.channel.sendall(b"\n" + words + b"\n")


def binary(kind: str) -> tuple[str, ...]:
    """Return what to start, or skip."""
    if kind == "double":
        return DOUBLE
    variable = {"real": "CHV_CLOUD_HYPERVISOR", "tolerant": "CHV_CLOUD_HYPERVISOR_TOLERANT"}[kind]
    found = os.environ.get(variable)
    if not found and kind == "real":
        found = shutil.which("cloud-hypervisor")
    if not found:
        pytest.skip(f"no Cloud Hypervisor: {variable} is not set")
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        pytest.skip("Cloud Hypervisor needs /dev/kvm")
    return (found,)


def spawn(kind: str, options: Sequence[str] = ("--no-shutdown",), **environment: str) -> Vmm:
    """Start one in its directory, with listener and event file; it need not be up yet."""
    command = binary(kind)
    directory = Path(tempfile.mkdtemp(prefix="chv-ch-"))
    with socket.socket(socket.AF_UNIX) as listener, (directory / "events").open("ab") as events:
        listener.bind(str(directory / "api.sock"))
        listener.listen(16)
        fds = (listener.fileno(), events.fileno())
        inherited = ("--api-socket", f"fd={fds[0]}", "--event-monitor", f"fd={fds[1]}")
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, *inherited, *options],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)} | environment,
            )
    return Vmm(kind, directory, process)


@contextlib.contextmanager
def running(
    kind: str, options: Sequence[str] = ("--no-shutdown",), **environment: str
) -> Iterator[Vmm]:
    """Start one, and wait until it answers."""
    vmm = spawn(kind, options, **environment)
    try:
        assert vmm.get("vmm.ping").status == 200, (vmm.directory / "log").read_text()
        yield vmm
    finally:
        vmm.end()


def switched(**switches: Any) -> dict[str, str]:
    """Return the environment that changes a double, and means nothing to the real program."""
    return {"CHV_DOUBLE": json.dumps(switches)}


def timed_s(act: Callable[[], Any]) -> float:
    """Return how long something takes."""
    begun_s = time.monotonic()
    act()
    return time.monotonic() - begun_s


def wait_for(
    true: Callable[[], object], *, what: str | Callable[[], str], timeout_s: float = ANSWER_S_MAX
) -> None:
    """Return once it is true; fail when it does not become so in time."""
    deadline_s = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not in time: {what() if callable(what) else what}")
        time.sleep(0.005)
