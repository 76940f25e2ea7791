"""A VMM that has introduced itself and whose guest does nothing yet outlives storage daemons."""

from __future__ import annotations

import socket
from collections.abc import Iterator

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
