"""The framer finds the same frames, and the same end, however the bytes are cut."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chv.common.rpc import FRAME_BYTES_MAX, FrameTooLong, LineFramer

LIMIT_BYTES = 12
streams = st.lists(st.sampled_from([b"\n", b"a", b"bc", b"\xff\x00", b"{}"]), max_size=60).map(
    b"".join
)


def frames_of(data: bytes, cuts: list[int]) -> tuple[list[bytes], str, int]:
    """Feed `data` cut at `cuts`; return the frames, the error's text and what is held back."""
    framer = LineFramer(LIMIT_BYTES)
    frames: list[bytes] = []
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    try:
        for start, end in pairwise(edges):
            frames.extend(framer.feed(data[start:end]))
    except FrameTooLong as error:
        # extend() loses nothing: list.extend keeps what the generator gave before it raised.
        return frames, str(error), 0
    return frames, "", framer.pending_bytes


@settings(max_examples=1000)
@given(streams, st.lists(st.integers(0, 120), max_size=30))
def test_frames_and_errors_do_not_depend_on_how_the_bytes_are_cut(
    data: bytes, cuts: list[int]
) -> None:
    assert frames_of(data, cuts) == frames_of(data, [])


@settings(max_examples=500)
@given(streams)
def test_frames_are_the_lines_up_to_the_first_that_is_too_long(data: bytes) -> None:
    *lines, rest = data.split(b"\n")
    expected: list[bytes] = []
    for line in lines:
        if len(line) > LIMIT_BYTES:
            break
        expected.append(line)
    too_long = any(len(line) > LIMIT_BYTES for line in [*lines, rest])
    frames, error, held_bytes = frames_of(data, list(range(len(data))))
    assert frames == expected
    assert bool(error) is too_long
    assert too_long or held_bytes == len(rest)


def test_a_frame_of_exactly_the_limit_passes_and_one_byte_more_does_not() -> None:
    assert list(LineFramer().feed(b"x" * FRAME_BYTES_MAX + b"\n")) == [b"x" * FRAME_BYTES_MAX]
    with pytest.raises(FrameTooLong, match="1048576 bytes"):
        list(LineFramer().feed(b"x" * (FRAME_BYTES_MAX + 1)))


def seconds_to_dribble(size_bytes: int) -> float:
    framer = LineFramer()
    started = time.perf_counter()
    for _ in range(size_bytes):
        list(framer.feed(b"x"))
    frames = list(framer.feed(b"\n"))
    assert [len(frame) for frame in frames] == [size_bytes]
    return time.perf_counter() - started


def test_one_byte_at_a_time_costs_linear_time() -> None:
    small = min(seconds_to_dribble(1 << 14) for _ in range(3))
    large = min(seconds_to_dribble(1 << 18) for _ in range(2))
    # 16 times the bytes: quadratic work would take 256 times as long.
    assert large / small < 80
