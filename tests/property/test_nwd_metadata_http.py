"""Whatever bytes come: a request that is plainly right, a refusal, or a wait for more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chv.nwd.metadata import HOSTS
from chv.nwd.metadata_http import HEAD_BYTES_MAX, READING, Reader, Refused, Request, respond

PIECES = st.sampled_from(
    [
        *(b"GET ", b"HEAD ", b"PUT ", b"/", b"/meta-data", b" HTTP/1.1", b" HTTP/1.0", b" HTTP/9"),
        *(b"\r\n", b"\r", b"\n", b"\r\n\r\n", b" ", b"\t", b":", b"\0", b"\xff"),
        *(b"Host: 169.254.169.254", b"Host: a", b"X-Forwarded-For: 1", b"Content-Length: 0"),
        *(b"Transfer-Encoding: chunked", b"A: " + b"b" * 3000),
    ]
)
STREAMS = st.lists(PIECES | st.binary(max_size=8), max_size=30)


def outcome(pieces: list[bytes]) -> Request | int | None:
    """The request, the status of the refusal, or None for one that is not whole."""
    reader = Reader(HOSTS)
    try:
        for piece in pieces:
            request = reader.feed(piece)
            if request is not None:
                return request
    except Refused as refusal:
        respond(refusal.status, str(refusal).encode(), "text/plain")  # every status has a name
        return refusal.status
    return None


@given(STREAMS)
def test_nothing_but_a_request_or_a_refusal_comes_of_it(pieces: list[bytes]) -> None:
    found = outcome(pieces)
    if isinstance(found, Request):
        assert found.method in READING
        assert found.path.startswith("/")
        assert found.path.isascii()
        assert found.path.isprintable()
    if found is None:
        assert len(b"".join(pieces)) <= HEAD_BYTES_MAX + 4


@given(STREAMS, st.integers(1, 7))
def test_how_a_stream_is_cut_does_not_matter_while_it_is_small(
    pieces: list[bytes], size: int
) -> None:
    whole = b"".join(pieces)[:HEAD_BYTES_MAX]
    cut = [whole[at : at + size] for at in range(0, len(whole), size)]
    assert outcome([whole]) == outcome(cut)
