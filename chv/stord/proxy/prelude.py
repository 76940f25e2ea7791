"""What a VMM has said while none of its rings run, so that it can be said once more. No I/O.

Between its handshake and the start of its guest's driver, and again between two drivers, Cloud
Hypervisor does not look at its connection: closed then, the disk is dead to the next driver. In
that time nothing is in flight and all that the storage daemon knows is a handful of settings. A
VMM that did anything else with the connection (QEMU hands over descriptors early, and does look)
is not kept.
"""

from __future__ import annotations

from struct import Struct

from chv.stord.proxy.message import (
    GET_CONFIG,
    GET_FEATURES,
    GET_PROTOCOL_FEATURES,
    SET_CONFIG,
    SET_PROTOCOL_FEATURES,
    Message,
)

SET_FEATURES, SET_OWNER, GET_QUEUE_NUM = 2, 3, 17
SET_MEM_TABLE, SET_VRING_NUM, GET_INFLIGHT_FD, SET_INFLIGHT_FD = 5, 8, 31, 32
SET_VRING_ADDR, SET_VRING_BASE, GET_VRING_BASE, SET_VRING_ENABLE = 9, 10, 11, 18
SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR = 12, 13, 14
NEED_REPLY = 0x8
RING_MASK = 0xFF
_INDEX = Struct("<I")
_ASKED = frozenset({GET_FEATURES, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM, GET_CONFIG})
_SETTINGS = frozenset({SET_FEATURES, SET_OWNER, SET_PROTOCOL_FEATURES, SET_CONFIG})
_STARTS = frozenset({SET_MEM_TABLE, SET_VRING_NUM, GET_INFLIGHT_FD, SET_INFLIGHT_FD})
_RINGS = frozenset(
    {SET_VRING_ADDR, SET_VRING_BASE, SET_VRING_ENABLE, SET_VRING_KICK, SET_VRING_CALL}
    | {SET_VRING_ERR, GET_VRING_BASE}
)


class Prelude:
    """One VMM's settings, and whether it has gone beyond them."""

    def __init__(self) -> None:
        self._settings: dict[int, Message] = {}  # in the order in which they came first
        self._waiting: Message | None = None  # what the VMM wants an answer to
        self._rings: set[int] = set()
        self._is_started = False
        self._is_strange = False

    @property
    def is_all(self) -> bool:
        """Tell whether another storage daemon can be brought to where this one is."""
        return not self._is_started and not self._is_strange

    def said(self, message: Message) -> None:
        """Take note of what the VMM says."""
        request = message.request
        if request in _SETTINGS and not message.fds:
            self._settings[request] = _copy(message, message.flags & ~NEED_REPLY)
        elif request in _STARTS:
            self._is_started = True
        elif request in _RINGS and self._is_started:
            self._of_ring(message)
        elif request not in _ASKED:
            self._is_strange = True
        if request in _ASKED or message.flags & NEED_REPLY:
            self._waiting = _copy(message, message.flags)

    def answered(self, message: Message) -> None:
        """Take note of what the storage daemon says."""
        self._waiting = None
        if message.is_reply(GET_VRING_BASE) and len(message.payload) >= _INDEX.size:
            self._rings.discard(_INDEX.unpack_from(message.payload)[0])
            self._is_started = bool(self._rings)

    def again(self) -> list[Message]:
        """Return what brings another storage daemon there, an open question last."""
        settings = [_copy(each, each.flags) for each in self._settings.values()]
        question = [_copy(self._waiting, self._waiting.flags)] if self._waiting else []
        return settings + question

    def _of_ring(self, message: Message) -> None:
        if message.request == SET_VRING_KICK and len(message.payload) >= _INDEX.size:
            self._rings.add(_INDEX.unpack_from(message.payload)[0] & RING_MASK)


def _copy(message: Message, flags: int) -> Message:
    return Message(message.request, message.payload, (), flags)
