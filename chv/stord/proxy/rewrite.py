"""What the proxy changes in the messages it carries. No I/O, no descriptors opened or closed.

Two things only. The reply to GET_PROTOCOL_FEATURES gets the in-flight bit, which the storage
daemon serves without saying so. And before a VMM can read the config space of a fresh export, the
write cache is set: to on, or to what this disk's guest chose last, since a new storage daemon
would otherwise cache behind a guest that never flushes. Everything else passes as it is.
"""

from __future__ import annotations

from chv.stord.proxy.message import (
    CONFIG_HEADER,
    GET_CONFIG,
    GET_PROTOCOL_FEATURES,
    SET_CONFIG,
    SET_PROTOCOL_FEATURES,
    U64,
    Malformed,
    Message,
)

PROTOCOL_CONFIG = 1 << 9
PROTOCOL_INFLIGHT = 1 << 12
WCE_OFFSET = 32  # of the byte `wce` in struct virtio_blk_config


class WriteCache:
    """The guest's choice; lives as long as the proxy, over all sessions."""

    def __init__(self) -> None:
        self.value = 1

    def learn(self, payload: bytes) -> None:
        """Take the choice out of a SET_CONFIG, where it holds one."""
        if len(payload) < CONFIG_HEADER.size:
            return
        offset, size, _flags = CONFIG_HEADER.unpack_from(payload)
        at = CONFIG_HEADER.size + WCE_OFFSET - offset
        if offset <= WCE_OFFSET < offset + size and at < len(payload):
            self.value = int(payload[at] != 0)

    def message(self) -> Message:
        """Return the SET_CONFIG that makes the choice; it has no reply."""
        return Message(SET_CONFIG, CONFIG_HEADER.pack(WCE_OFFSET, 1, 0) + bytes([self.value]))


class Rewriter:
    """One session's changes."""

    def __init__(self, cache: WriteCache) -> None:
        self._cache = cache
        self._is_primed = False

    def to_backend(self, message: Message) -> list[Message]:
        """Return what goes to the storage daemon for a message of the VMM."""
        if message.request == GET_CONFIG:
            return [*self._prime(), message]
        if message.request == SET_PROTOCOL_FEATURES and _u64(message) & PROTOCOL_CONFIG:
            return [message, *self._prime()]
        if message.request == SET_CONFIG:
            self._cache.learn(message.payload)
        return [message]

    def to_vmm(self, message: Message) -> Message:
        """Return what goes to the VMM for a message of the storage daemon."""
        if not message.is_reply(GET_PROTOCOL_FEATURES):
            return message
        payload = U64.pack(_u64(message) | PROTOCOL_INFLIGHT)
        return Message(message.request, payload, message.fds, message.flags)

    def _prime(self) -> list[Message]:
        first, self._is_primed = not self._is_primed, True
        return [self._cache.message()] if first else []


def _u64(message: Message) -> int:
    if len(message.payload) != U64.size:
        raise Malformed(f"message {message.request} with {len(message.payload)} bytes")
    return int(U64.unpack(message.payload)[0])
