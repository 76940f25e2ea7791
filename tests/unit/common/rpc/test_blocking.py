"""The blocking client: same envelopes and errors as the asynchronous one, no descriptor lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.from_thread
import msgspec
import pytest

from chv.common.errors import (
    DeadlineExceeded,
    Internal,
    NotFound,
    OutcomeUnknown,
    Unavailable,
)
from chv.common.rpc import CallContext, Method, Server, WithFds
from chv.common.rpc.blocking import BlockingClient


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str = ""


class Answer(msgspec.Struct, frozen=True):
    text: str = ""


ECHO = Method("Echo", Ask, Answer, mutating=False)
FAIL = Method("Fail", Ask, Answer)
SLEEP = Method("Sleep", Ask, Answer, timeout_s=0.2, mutating=False)
CHANGE = Method("Change", Ask, Answer)
OPEN = Method("Open", Ask, Answer, mutating=False, fds=1)
WATCH = Method("Watch", Ask, Answer, mutating=False, events=Answer)
METHODS = (ECHO, FAIL, SLEEP, CHANGE, OPEN, WATCH)


async def echo(ask: Ask) -> Answer:
    return Answer(ask.text)


async def fail(ask: Ask) -> Answer:
    raise NotFound(f"no {ask.text}", field="text", hint="look elsewhere")


async def sleep(ask: Ask) -> Answer:
    await anyio.sleep(30)
    return Answer()


async def open_pipe(ask: Ask) -> WithFds[Answer]:
    reader, writer = os.pipe()
    os.write(writer, b"through the socket")
    os.close(writer)
    return WithFds(Answer(), [reader])


async def watch(ask: Ask, context: CallContext) -> Answer:
    for number in range(3):
        await context.emit(Answer(str(number)))
    return Answer("end")


@pytest.fixture
def socket_path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "s.sock"
    server = Server("test", METHODS, allow_uids=frozenset({os.geteuid()}))
    for method, handler in (
        (ECHO, echo), (FAIL, fail), (SLEEP, sleep), (CHANGE, sleep), (OPEN, open_pipe),
        (WATCH, watch),
    ):  # fmt: skip
        server.add(method, handler)
    with anyio.from_thread.start_blocking_portal() as portal:
        future, _ = portal.start_task(server.serve, path)
        yield path
        future.cancel()


def test_call_returns_the_typed_result(socket_path: Path) -> None:
    with BlockingClient(socket_path) as client:
        assert client.call(ECHO, Ask("hello")).text == "hello"
        assert client.call(ECHO, Ask("again")).text == "again"


def test_error_of_the_server_is_rebuilt_and_the_connection_goes_on(socket_path: Path) -> None:
    with BlockingClient(socket_path) as client:
        with pytest.raises(NotFound) as caught:
            client.call(FAIL, Ask("thing"))
        assert (caught.value.field, caught.value.hint) == ("text", "look elsewhere")
        assert client.call(ECHO, Ask("still")).text == "still"


def test_slow_read_is_a_passed_deadline(socket_path: Path) -> None:
    with BlockingClient(socket_path) as client, pytest.raises(DeadlineExceeded):
        client.call(SLEEP, Ask())


def test_slow_mutation_has_an_unknown_outcome(socket_path: Path) -> None:
    with BlockingClient(socket_path) as client, pytest.raises(OutcomeUnknown):
        client.call(CHANGE, Ask(), timeout_s=0.2)


def test_nobody_at_the_path_is_unavailable(tmp_path: Path) -> None:
    with BlockingClient(tmp_path / "none.sock") as client, pytest.raises(Unavailable):
        client.call(ECHO, Ask())


def test_descriptors_arrive_close_on_exec(socket_path: Path) -> None:
    with BlockingClient(socket_path) as client:
        _, fds = client.call_fds(OPEN, Ask())
    assert [os.get_inheritable(fd) for fd in fds] == [False]
    assert os.read(fds[0], 100) == b"through the socket"
    os.close(fds[0])


def test_unwanted_descriptors_are_closed(socket_path: Path) -> None:
    def open_fds() -> set[str]:
        return {entry.name for entry in Path("/proc/self/fd").iterdir()}

    with BlockingClient(socket_path) as client:
        client.call(ECHO, Ask())
        before = open_fds()
        for _ in range(20):
            client.call(OPEN, Ask())
        assert len(open_fds()) <= len(before) + 1


def test_events_come_in_order_before_the_result(socket_path: Path) -> None:
    seen: list[str] = []
    with BlockingClient(socket_path) as client:
        result = client.stream(WATCH, Ask(), lambda event: seen.append(event.text))
    assert (seen, result.text) == (["0", "1", "2"], "end")


def test_what_a_listener_raises_is_not_taken_for_the_connection(socket_path: Path) -> None:
    def closed(_: object) -> None:
        raise BrokenPipeError(32, "the reader of our output has left")

    with BlockingClient(socket_path) as client:
        with pytest.raises(BrokenPipeError):
            client.stream(WATCH, Ask(), closed)
        assert client.call(ECHO, Ask("again")).text == "again"  # on a new connection


def test_events_of_a_plain_call_are_not_its_result(socket_path: Path) -> None:
    with BlockingClient(socket_path) as client:
        assert client.call(WATCH, Ask()).text == "end"


def test_unreadable_result_closes_what_came_with_it(socket_path: Path) -> None:
    class Number(msgspec.Struct):
        text: int

    wrong: Method[Ask, Number] = Method("Echo", Ask, Number, mutating=False)
    with BlockingClient(socket_path) as client, pytest.raises(Internal, match="cannot be read"):
        client.call(wrong, Ask("x"))
