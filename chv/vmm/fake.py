"""`python -m chv.vmm.fake`: a process that behaves as a VMM does and runs no guest.

Serves a control socket and a serial console, connects to the VM's vhost-user sockets as a VMM
would, opens its files and holds its NICs. One thread, one selector, few imports: a fake starts in
tens of milliseconds. It ends with 1 and a line on stderr where something it needs is missing.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from chv.common.errors import ERRORS_BY_CODE, ChvError, Internal, InvalidArgument, Unavailable
from chv.vmm.driver import DiskConfig, NicConfig
from chv.vmm.fake_spec import (
    BEHAVIOUR_VARIABLE,
    CONTROL_SOCKET,
    LINE_BYTES_MAX,
    SERIAL_SOCKET,
    FakeArguments,
    Reply,
    Request,
    answer,
    make_vm,
    parse_argv,
    parse_behaviour,
)
from chv.vmm.fake_state import Behaviour

RECONNECT_S = 0.05
CLIENTS_MAX = 64
FDS_MAX = 16  # the queues of a NIC
USAGE = "python -m chv.vmm.fake --id WORKER_ID --runtime DIR [--parts JSON]"


class FakeProcess:
    """The sockets around one FakeVm."""

    def __init__(self, arguments: FakeArguments, behaviour: Behaviour) -> None:
        self._runtime = Path(arguments.runtime_dir)
        self._vhost = arguments.parts.served
        self._nics = arguments.parts.nic_fds
        self._vm = make_vm(arguments, behaviour, time.monotonic)
        self._backends: dict[str, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._viewers: list[socket.socket] = []
        self._clients: dict[socket.socket, bytes] = {}
        self._given: list[int] = []  # descriptors that came with the line at hand
        self._held: list[int] = []
        self._take_hold(arguments)

    def _take_hold(self, arguments: FakeArguments) -> None:
        files = [d.path for d in arguments.parts.disks if d.kind == "file"]
        for path in (*arguments.parts.files, *files):
            self._held.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        for fds in self._nics.values():
            for fd in fds:
                os.fstat(fd)
        for disk in self._vhost.values():
            if not self._connect(disk):
                raise InvalidArgument(f"nothing listens on {disk.path}", field=disk.id)

    def serve(self) -> None:
        """Answer until told to quit."""
        self._listen(SERIAL_SOCKET, self._accept_viewer)
        self._listen(CONTROL_SOCKET, self._accept_client)
        while True:
            for key, _ in self._selector.select(self._wait_s()):
                handle: Callable[[socket.socket], None] = key.data
                handle(key.fileobj)  # type: ignore[arg-type]  # only sockets are registered
            for disk_id in [d for d, up in self._vm.disks.items() if not up]:
                self._connect(self._vhost[disk_id])
            self._vm.advance()
            self._print()

    def _wait_s(self) -> float | None:
        if not all(self._vm.disks.values()):
            return RECONNECT_S
        due = self._vm.next_due()
        return None if due is None else max(0.0, due - time.monotonic())

    def _listen(self, name: str, accept: Callable[[socket.socket], None]) -> None:
        path = self._runtime / name
        path.unlink(missing_ok=True)  # an earlier incarnation that was killed left it
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(CLIENTS_MAX)
        self._selector.register(listener, selectors.EVENT_READ, accept)

    # --- vhost-user disks
    def _connect(self, disk: DiskConfig) -> bool:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(disk.path)
        except OSError:
            connection.close()
            return False
        self._vm.disks[disk.id] = True
        self._backends[disk.id] = connection
        self._selector.register(connection, selectors.EVENT_READ, self._backend_spoke(disk.id))
        return True

    def _plug(self, disk: DiskConfig) -> None:
        if disk.id in self._vm.disks:
            return
        if not self._connect(disk):
            raise Unavailable(f"nothing answers on {disk.path}", field="disk.path")
        self._vhost[disk.id] = disk

    def _plug_nic(self, nic: NicConfig) -> None:
        if nic.id in self._vm.nics:
            return
        self._nics[nic.id], self._given = tuple(self._given), []
        self._vm.nics.add(nic.id)

    def _let_go(self) -> None:
        """Hang up on the back ends of what the guest has let go of."""
        for nic_id in self._nics.keys() - self._vm.nics:
            _close(self._nics.pop(nic_id))
        for disk_id in self._vhost.keys() - self._vm.disks.keys():
            del self._vhost[disk_id]
            connection = self._backends.pop(disk_id, None)
            if connection is not None:
                self._drop(connection)

    def _backend_spoke(self, disk_id: str) -> Callable[[socket.socket], None]:
        def handle(connection: socket.socket) -> None:
            if not _receive(connection):
                self._drop(connection)
                del self._backends[disk_id]
                self._vm.disks[disk_id] = False

        return handle

    # --- serial console
    def _accept_viewer(self, listener: socket.socket) -> None:
        viewer, _ = listener.accept()
        viewer.setblocking(False)
        for earlier in self._viewers:  # one at a time, as QEMU has it
            self._drop(earlier)
        self._viewers = [viewer]
        self._selector.register(viewer, selectors.EVENT_READ, self._viewer_spoke)

    def _viewer_spoke(self, viewer: socket.socket) -> None:
        data = _receive(viewer)
        if data:
            with suppress(BlockingIOError, BrokenPipeError):
                viewer.send(data)  # a terminal echoes
            return
        self._viewers.remove(viewer)
        self._drop(viewer)

    def _print(self) -> None:
        text, self._vm.output = "".join(f"{line}\r\n" for line in self._vm.output), []
        for viewer in self._viewers if text else ():
            with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                viewer.send(text.encode())  # what does not fit is lost, as on a real line

    # --- control
    def _accept_client(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        self._clients[client] = b""
        self._selector.register(client, selectors.EVENT_READ, self._client_spoke)

    def _client_spoke(self, client: socket.socket) -> None:
        data, self._given = _receive_fds(client)
        buffer = self._clients[client] + data
        *lines, self._clients[client] = buffer.split(b"\n")
        for line in lines:
            if not self._answer(client, line):
                data = b""
                break
        _close(self._given)
        if not data or len(self._clients[client]) > LINE_BYTES_MAX:
            del self._clients[client]
            self._drop(client)

    def _answer(self, client: socket.socket, line: bytes) -> bool:
        """Do what a line asks; False to hang up."""
        try:
            request = msgspec.json.decode(line, type=Request)
            fault = self._vm.take_fault(request.command)
            kind = fault.kind if fault else ""
            if fault and kind == "delay":
                time.sleep(fault.seconds)
            if fault and kind == "error":
                raise ERRORS_BY_CODE.get(fault.code, Internal)("a planted fault")
            if kind == "exit":
                sys.exit(1)
            if kind in ("drop", "hang"):
                return kind == "hang"
            reply = self._do(request)
            if kind == "apply_drop":
                return False
        except ChvError as error:
            reply = Reply(state=self._vm.state, error=error.data())
        except msgspec.MsgspecError as error:
            reply = Reply(error=InvalidArgument(str(error)).data())
        return _send(client, msgspec.json.encode(reply) + b"\n")

    def _do(self, request: Request) -> Reply:
        if request.command == "quit":
            sys.exit(0)
        if request.disk is not None:
            self._plug(request.disk)
        if request.nic is not None:
            self._plug_nic(request.nic)
        reply = answer(self._vm, request)
        self._let_go()
        return reply

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()


def _receive(connection: socket.socket) -> bytes:
    """Return what is there, nothing at the end of the stream or after an error."""
    try:
        return connection.recv(LINE_BYTES_MAX)
    except OSError:
        return b""


def _receive_fds(connection: socket.socket) -> tuple[bytes, list[int]]:
    """As `_receive`, with the descriptors that came along."""
    try:
        data, fds, _, _ = socket.recv_fds(connection, LINE_BYTES_MAX, FDS_MAX)
    except OSError:
        return b"", []
    return data, fds


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _send(connection: socket.socket, data: bytes) -> bool:
    try:
        connection.sendall(data)
    except OSError:
        return False
    return True


def main(argv: list[str]) -> int:
    """Run a fake; return the exit code."""
    if argv in (["--help"], ["-h"]):
        sys.stdout.write(f"{USAGE}\n")
        return 0
    try:
        behaviour = parse_behaviour(os.environ.get(BEHAVIOUR_VARIABLE, ""))
        FakeProcess(parse_argv(argv), behaviour).serve()
    except (ChvError, OSError, msgspec.MsgspecError) as error:
        sys.stderr.write(f"chv.vmm.fake: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
