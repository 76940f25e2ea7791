"""What a VMM at a proxy sees of deaths: before its guest does anything, and of the proxy itself."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from chv.stord.proxy.channel import close_all
from chv.stord.proxy.message import (
    GET_CONFIG,
    GET_FEATURES,
    GET_PROTOCOL_FEATURES,
    SET_PROTOCOL_FEATURES,
    U64,
    Message,
    Reader,
)
from chv.stord.proxy.prelude import GET_QUEUE_NUM, SET_FEATURES, SET_MEM_TABLE, SET_OWNER
from chv.stord.proxy.rewrite import PROTOCOL_CONFIG, WCE_OFFSET
from tests.helpers import wait_until
from tests.integration.proxy_rig import ProxyRig, open_rig
from tests.integration.stord_helpers import needs_qsd

pytestmark = [pytest.mark.root, needs_qsd]
PROTOCOL_FEATURES = 1 << 30
CONFIG_BYTES = 36
SO_ACCEPTCON = 1 << 16


@pytest.fixture
def rig() -> Iterator[ProxyRig]:
    with open_rig() as running:
        yield running


class Vmm:
    """A VMM's side of the handshake."""

    def __init__(self, rig: ProxyRig) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(5)
        self.socket.connect(str(rig.front))

    def __enter__(self) -> Vmm:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def tell(self, request: int, payload: bytes = b"") -> None:
        self.socket.sendall(Message(request, payload).encode())

    def answer(self, request: int) -> bytes:
        reader = Reader()
        while True:
            data = self.socket.recv(reader.wants)
            assert data, "hung up"
            if message := reader.feed(data):
                close_all(message.fds)
                assert message.is_reply(request)
                return message.payload

    def ask(self, request: int, payload: bytes = b"") -> bytes:
        self.tell(request, payload)
        return self.answer(request)

    def introduce(self) -> None:
        self.tell(SET_OWNER)
        (features,) = U64.unpack(self.ask(GET_FEATURES))
        assert features & PROTOCOL_FEATURES
        self.tell(SET_FEATURES, U64.pack(features))
        self.ask(GET_PROTOCOL_FEATURES)
        self.tell(SET_PROTOCOL_FEATURES, U64.pack(PROTOCOL_CONFIG))

    def write_cache(self) -> int:
        head = (0).to_bytes(4, "little") + CONFIG_BYTES.to_bytes(4, "little") + bytes(4)
        return self.ask(GET_CONFIG, head + bytes(CONFIG_BYTES))[len(head) + WCE_OFFSET]


def test_the_connection_stays_over_storage_daemons_and_each_has_the_write_cache_on(
    rig: ProxyRig,
) -> None:
    with Vmm(rig) as vmm:
        vmm.introduce()
        for _ in range(3):
            rig.restart_backend()
            assert vmm.ask(GET_QUEUE_NUM)
            assert vmm.write_cache() == 1


def test_a_question_meanwhile_is_answered_by_the_next_storage_daemon(rig: ProxyRig) -> None:
    with Vmm(rig) as vmm:
        vmm.introduce()
        rig.end_backend()
        vmm.tell(GET_QUEUE_NUM)
        rig.start_backend()
        assert vmm.answer(GET_QUEUE_NUM)


async def test_a_vmm_that_leaves_meanwhile_is_let_go_of_and_the_next_one_served(
    rig: ProxyRig,
) -> None:
    with Vmm(rig) as vmm:
        vmm.introduce()
        rig.end_backend()
    await wait_until(lambda: "between two" in rig.log.read_text(), what="that it has left")
    rig.start_backend()
    with Vmm(rig) as vmm:
        vmm.introduce()
        assert vmm.write_cache() == 1


def test_a_vmm_in_the_middle_of_a_start_is_dropped_as_its_descriptors_are_gone(
    rig: ProxyRig,
) -> None:
    with Vmm(rig) as vmm:
        vmm.introduce()
        vmm.tell(SET_MEM_TABLE, bytes(8))
        rig.end_backend()
        assert vmm.socket.recv(1) == b""


def test_the_listener_of_a_proxy_is_its_last_descriptor_and_ends_before_any_connection(
    rig: ProxyRig,
) -> None:
    """The kernel closes a killed process's descriptors from the last to the first."""
    assert rig.proxy is not None
    with Vmm(rig) as vmm:
        vmm.introduce()
        directory = Path(f"/proc/{rig.proxy.pid}/fd")
        last = max(int(entry.name) for entry in directory.iterdir())
        lines = Path("/proc/net/unix").read_text().splitlines()
        named = [line.split() for line in lines if line.endswith(f"{rig.root}/.disk")]
        listening = [fields[6] for fields in named if int(fields[3], 16) & SO_ACCEPTCON]
        assert str((directory / str(last)).readlink()) == f"socket:[{listening[0]}]"


def test_a_vmm_that_loses_a_killed_proxy_does_not_reach_its_listener_any_more(
    rig: ProxyRig,
) -> None:
    for _ in range(20):
        with Vmm(rig) as vmm, socket.socket(socket.AF_UNIX) as again:
            vmm.introduce()
            assert rig.proxy is not None
            rig.proxy.send_signal(signal.SIGKILL)
            with contextlib.suppress(ConnectionResetError):
                assert vmm.socket.recv(1) == b""
            assert again.connect_ex(str(rig.front)) == errno.ECONNREFUSED
        rig.end_proxy()
        rig.start_proxy()
