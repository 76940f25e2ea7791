"""The few vhost-user messages that set an export's write cache before a VMM can connect.

A fresh export tells the guest "write through" while the storage daemon caches, so the guest
never flushes and fsync'ed data dies with the daemon. Writing 1 to the `wce` byte of the config
space before the first client makes every later client see "write back". The value lives as long
as the export, so every new export is primed. Fails with Internal where the peer does not agree.
"""

from __future__ import annotations

import struct
from pathlib import Path

import anyio
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.buffered import BufferedByteReceiveStream

from chv.common.errors import DeadlineExceeded, Internal, Unavailable
from chv.stord.qsd.peer import check_peer

HEADER = struct.Struct("<III")
CONFIG_HEADER = struct.Struct("<III")
VERSION = 0x1
REPLY = 0x4
GET_FEATURES, SET_OWNER, GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES = 1, 3, 15, 16
GET_CONFIG, SET_CONFIG = 24, 25
PROTOCOL_CONFIG = 1 << 9
FEATURE_PROTOCOL = 1 << 30
# struct virtio_blk_config: capacity is the first u64, wce the byte at 32.
CONFIG_BYTES = 36
WCE_OFFSET = 32
PAYLOAD_BYTES_MAX = 4096
PRIME_TIMEOUT_S = 5.0
SECTOR_BYTES = 512


# In this order; each is handled before the next is read, so nothing has to be waited for.
CONVERSATION: tuple[tuple[int, bytes], ...] = (
    (SET_OWNER, b""),
    (GET_FEATURES, b""),
    (GET_PROTOCOL_FEATURES, b""),
    (SET_PROTOCOL_FEATURES, struct.pack("<Q", PROTOCOL_CONFIG)),
    (SET_CONFIG, CONFIG_HEADER.pack(WCE_OFFSET, 1, 0) + b"\x01"),
    (GET_CONFIG, CONFIG_HEADER.pack(0, CONFIG_BYTES, 0) + bytes(CONFIG_BYTES)),
)


class Session:
    """One connection as the master side. Requests that carry descriptors are not made here."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._reader = BufferedByteReceiveStream(stream)

    async def send(self, *messages: tuple[int, bytes]) -> None:
        """Send messages, all at once."""
        await self._stream.send(
            b"".join(
                HEADER.pack(request, VERSION, len(payload)) + payload
                for request, payload in messages
            )
        )

    async def reply(self, request: int) -> bytes:
        """Return the payload of the next reply, which must be to this request."""
        header = await self._reader.receive_exactly(HEADER.size)
        answered, flags, size = HEADER.unpack(header)
        if answered != request or not flags & REPLY or size > PAYLOAD_BYTES_MAX:
            raise Internal(
                f"vhost-user request {request} was answered by {answered}/{flags}/{size}"
            )
        return await self._reader.receive_exactly(size)

    async def set_write_cache(self) -> bytes:
        """Turn the write cache on; return the first bytes of virtio_blk_config after that."""
        await self.send(*CONVERSATION)
        (features,) = struct.unpack("<Q", await self.reply(GET_FEATURES))
        if not features & FEATURE_PROTOCOL:
            raise Internal("the export offers no vhost-user protocol features")
        (protocol,) = struct.unpack("<Q", await self.reply(GET_PROTOCOL_FEATURES))
        if not protocol & PROTOCOL_CONFIG:
            raise Internal("the export offers no access to its config space")
        payload = await self.reply(GET_CONFIG)
        if len(payload) != CONFIG_HEADER.size + CONFIG_BYTES:
            raise Internal(f"the export answered {len(payload)} bytes of config space")
        return payload[CONFIG_HEADER.size :]


async def prime(path: Path, uid: int) -> int:
    """Turn the write cache of the export at `path` on, verify, return the capacity in bytes.

    `uid` is who must be listening: the directory of the socket belongs to the storage daemon,
    which could have put anything there.
    """
    try:
        with anyio.fail_after(PRIME_TIMEOUT_S):
            return await _prime(path, uid)
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"the export at {path} did not answer within {PRIME_TIMEOUT_S} s"
        ) from error
    except (OSError, anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError) as error:
        raise Unavailable(f"the export at {path} closed while it was primed: {error!r}") from error


async def _prime(path: Path, uid: int) -> int:
    async with await anyio.connect_unix(path) as stream:
        check_peer(stream.extra(SocketAttribute.raw_socket), path, uid)  # noqa: S610  no SQL here
        config = await Session(stream).set_write_cache()
    if config[WCE_OFFSET] != 1:
        raise Internal(f"the export at {path} does not keep its write cache on")
    (sectors,) = struct.unpack_from("<Q", config)
    return int(sectors) * SECTOR_BYTES
