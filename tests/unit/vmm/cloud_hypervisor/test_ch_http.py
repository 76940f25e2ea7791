"""HTTP as the real server speaks it; the answers are recorded from v53.0."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chv.common.errors import InvalidArgument
from chv.vmm.cloud_hypervisor.http import (
    ANSWER_BYTES_MAX,
    BODY_BYTES_MAX,
    HEAD_BYTES_MAX,
    Answers,
    ProtocolError,
    Response,
    request,
)

HANDLER = "Cloud Hypervisor API"
PROTOCOL = "Firecracker API"
DONE = f"HTTP/1.1 204 \r\nServer: {HANDLER}\r\nConnection: keep-alive\r\n\r\n".encode()
NO_VM = (
    f"HTTP/1.1 404 \r\nServer: {HANDLER}\r\nConnection: keep-alive\r\n"
    "Content-Type: application/json\r\nContent-Length: 69\r\n\r\n"
    '["Error from API","The VM info is not available","VM is not created"]'
).encode()
TOO_MANY = (
    f"HTTP/1.1 503\r\nServer: {PROTOCOL}\r\nConnection: close\r\nContent-Length: 40\r\n\r\n"
    '{ "error": "Too many open connections" }'
).encode()
TOO_LONG = (
    f"HTTP/1.1 400 \r\nServer: {PROTOCOL}\r\nConnection: keep-alive\r\n"
    "Content-Type: application/json\r\nContent-Length: 110\r\n\r\n"
    '{ "error": "Invalid HTTP Method: Unsupported HTTP method.\n'
    'All previous unanswered requests will be dropped." }'
).encode()
ALL = DONE + NO_VM + DONE + TOO_LONG + TOO_MANY


def read(data: bytes, *, step: int) -> list[Response]:
    answers, seen = Answers(), []
    for start in range(0, len(data), step):
        answers.feed(data[start : start + step])
        while (answer := answers.next()) is not None:
            seen.append(answer)
    assert answers.empty
    return seen


@given(st.integers(min_value=1, max_value=len(ALL)))
def test_answers_are_the_same_however_the_bytes_arrive(step: int) -> None:
    seen = read(ALL, step=step)
    assert [answer.status for answer in seen] == [204, 404, 204, 400, 503]
    assert seen[0].body == b""
    assert seen[1].body.endswith(b'"VM is not created"]')
    assert [answer.ends_connection for answer in seen] == [False, False, False, True, True]


def test_a_success_with_no_length_has_no_body() -> None:
    data = f"HTTP/1.1 200 \r\nServer: {HANDLER}\r\nConnection: keep-alive\r\n\r\n".encode()
    assert read(data, step=len(data)) == [Response(200, HANDLER, b"")]


def test_a_reason_and_an_older_protocol_are_taken_as_well() -> None:
    assert read(b"HTTP/1.0 200 All is well\r\n\r\n", step=7)[0].status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/2 200 \r\n\r\n",
        b"HTTP/1.1 2000\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 \r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 \r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 \r\nContent-Length: 1e3\r\n\r\n",
        b"HTTP/1.1 200 \r\nTransfer-Encoding: chunked\r\n\r\n",
        f"HTTP/1.1 200 \r\nContent-Length: {ANSWER_BYTES_MAX + 1}\r\n\r\n".encode(),
        b"HTTP/1.1 200 \r\n" + b"a: b\r\n" * HEAD_BYTES_MAX,
    ],
)
def test_what_is_no_answer_ends_the_connection(data: bytes) -> None:
    answers = Answers()
    answers.feed(data)
    with pytest.raises(ProtocolError):
        answers.next()


def test_a_call_without_a_body_has_no_length_and_one_with_a_body_has_it() -> None:
    assert b"Content-Length" not in request("PUT", "vm.boot", None)
    data = request("PUT", "vm.create", b"{}")
    assert data.startswith(b"PUT /api/v1/vm.create HTTP/1.1\r\n")
    assert data.endswith(b"Content-Length: 2\r\n\r\n{}")


def test_a_body_that_the_vmm_would_not_read_whole_is_never_sent() -> None:
    assert request("PUT", "vm.create", b"x" * BODY_BYTES_MAX)
    with pytest.raises(InvalidArgument, match="51201 bytes"):
        request("PUT", "vm.create", b"x" * (BODY_BYTES_MAX + 1))


@pytest.mark.parametrize("name", ["vm.info?x=1", "vm.info/", "vm info", "vm.info\r\nHost: x", ""])
def test_a_call_is_a_plain_name(name: str) -> None:
    with pytest.raises(InvalidArgument):
        request("GET", name, None)
