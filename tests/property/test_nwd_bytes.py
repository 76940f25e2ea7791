"""Whatever bytes the kernel, a guest or a DNS sends: a reader gives values or one known error."""

from __future__ import annotations

import contextlib
import struct

from hypothesis import given
from hypothesis import strategies as st

from chv.nwd.kernel import netlink, nflog, nft_trace, packets
from chv.nwd.nft import log_prefix
from chv.nwd.resolving import answers

ATTRIBUTES = st.lists(st.tuples(st.integers(0, 20), st.binary(max_size=40)), max_size=12)
KINDS = st.sampled_from([4 << 8, 10 << 8 | 17, 10 << 8 | 16, 2, 3])


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Messages that are well-formed outside and anything inside, some cut or damaged."""
    data = b""
    for _ in range(draw(st.integers(0, 3))):
        body = draw(st.binary(min_size=4, max_size=4))
        for kind, payload in draw(ATTRIBUTES):
            body += netlink.attribute(kind, payload)
        data += netlink.message(draw(KINDS), 0, body)
    return data[: draw(st.integers(0, len(data)))] + draw(st.binary(max_size=30))


@given(messages())
def test_traces_are_read_whatever_comes(data: bytes) -> None:
    for event in nft_trace.parse(data):
        assert event.verdict.isalpha()


@given(messages())
def test_logs_are_read_whatever_comes(data: bytes) -> None:
    for logged in nflog.parse(data):
        log_prefix.parse(logged.prefix)


@given(st.binary(max_size=100))
def test_a_packet_is_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        found = packets.parse(data)
        assert found.ends.isascii()
        assert found.ends.isprintable()


@given(st.binary(max_size=300), st.sampled_from([1, 28]))
def test_an_answer_of_a_dns_is_addresses_or_nothing(data: bytes, kind: int) -> None:
    for address in answers(struct.pack("!H", kind) + data, kind):
        assert set(address) <= set("0123456789abcdef:.")
