"""The text form of metrics, what is counted of operations, and the server's manners."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from chv.agent import metrics_sample, metrics_server
from chv.agent.links import DaemonLink
from chv.agent.metrics_operations import OperationCounts
from chv.agent.metrics_sample import STALE_S, Sampler, process_use
from chv.agent.metrics_server import HEAD_BYTES_MAX, MetricsServer
from chv.agent.metrics_text import Family, Histogram, number, render
from chv.agent.records import PutOperation
from chv.agent.tables import Tables
from chv.common.process import procfs
from chv.common.rpc import Method
from chv.common.wire.agent import Operation, OperationState, OperationStep
from chv.common.wire.nwd_policy import NicStats, NicStatsReply
from chv.common.wire.stord import StorageMetrics


def test_unknown_is_absent_and_an_empty_family_too() -> None:
    family = Family("a", "gauge", "A.")
    family.add(None, vm="x")
    assert render([family]) == "\n"
    family.add(0, vm="y")
    assert render([family]) == '# HELP a A.\n# TYPE a gauge\na{vm="y"} 0\n'


def test_labels_are_escaped() -> None:
    family = Family("a", "gauge", "A.")
    family.add(1.5, vm='q"\\\n')
    assert 'a{vm="q\\"\\\\\\n"} 1.5' in render([family])


def test_numbers() -> None:
    assert [number(each) for each in (0, 1.0, 0.25, math.inf)] == ["0", "1", "0.25", "+Inf"]


def test_a_histogram_is_cumulative_and_its_bounds_inclusive() -> None:
    histogram = Histogram((0.1, 1))
    for seconds in (0.1, 0.5, 7):
        histogram.observe(seconds, verb="stop")
    lines = render([histogram.family("t", "T.")]).splitlines()
    assert lines[2:] == [
        't_bucket{verb="stop",le="0.1"} 1',
        't_bucket{verb="stop",le="1"} 2',
        't_bucket{verb="stop",le="+Inf"} 3',
        't_sum{verb="stop"} 7.6',
        't_count{verb="stop"} 3',
    ]


def operation(state: OperationState, steps: list[OperationStep]) -> Operation:
    return Operation(
        id="op-1", verb="start", kind="VirtualMachine", namespace="default", name="vm", uid="u",
        generation=1, requester="me", state=state, created_at="2026-01-01T00:00:00.000Z",
        started_at="2026-01-01T00:00:00.020Z", ended_at="2026-01-01T00:00:03.000Z", steps=steps,
    )  # fmt: skip


def test_an_operation_is_counted_once_with_its_phases() -> None:
    step = OperationStep(
        name="AttachVolume 1234", started_at="2026-01-01T00:00:00.100Z",
        ended_at="2026-01-01T00:00:00.500Z", outcome="done",
    )  # fmt: skip
    counts, tables = OperationCounts(), Tables()
    for state in (OperationState.RUNNING, OperationState.SUCCEEDED):
        counts.committed(tables, (PutOperation(operation=operation(state, [step])),))
    text = render(counts.families())
    ended = 'chv_operations_total{kind="VirtualMachine",verb="start",outcome="Succeeded"} 1'
    assert ended.lower() in text.lower()
    assert 'chv_operation_phase_seconds_sum{verb="start",phase="AttachVolume"} 0.5' in text
    assert 'chv_operation_phase_seconds_sum{verb="start",phase="Done"} 3' in text
    assert "1234" not in text


def test_the_use_of_a_process_is_its_own() -> None:
    known = procfs.stat(os.getpid())
    assert known is not None
    use = process_use(os.getpid(), known.start_time)
    assert use is not None
    assert use.user_s > 0
    assert use.resident_bytes > 1 << 20
    assert process_use(os.getpid(), known.start_time + 1) is None


async def asked(path: Path, request: bytes) -> bytes:
    async with await anyio.connect_unix(path) as stream:
        await stream.send(request)
        answer = b""
        try:
            while True:
                answer += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return answer


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"200 OK"),
        (b"GET /metrics?a=b HTTP/1.0\r\n\r\n", b"200 OK"),
        (b"GET /other HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405 Method Not Allowed"),
        (b"\xff\x00\r\n\r\n", b"400 Bad Request"),
        (b"a" * HEAD_BYTES_MAX, b"400 Bad Request"),
    ],
)
def test_the_server_answers(tmp_path: Path, request_: bytes, status: bytes) -> None:
    path = tmp_path / "metrics.sock"

    async def run() -> bytes:
        async with anyio.create_task_group() as tasks:
            await tasks.start(MetricsServer(lambda: "a 1\n").serve, path)
            with socket.socket(socket.AF_UNIX) as silent:  # one who never asks holds nobody up
                silent.connect(str(path))
                answer = await asked(path, request_)
            tasks.cancel_scope.cancel()
        return answer

    answer = anyio.run(run)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert answer.endswith(b"a 1\n") == (status == b"200 OK")
    assert not path.exists()


def test_metrics_go_over_tcp_where_that_is_configured_and_wait_for_the_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_server, "RETRY_S", 0.02)

    async def run() -> bytes:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = ("127.0.0.1", taken.getsockname()[1])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(MetricsServer(lambda: "a 1\n").serve_tcp, address)
                await anyio.sleep(0.05)
                taken.close()
                answer = await _scraped(address)
                tasks.cancel_scope.cancel()
        return answer

    answer = anyio.run(run)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.endswith(b"a 1\n")


async def _scraped(address: tuple[str, int]) -> bytes:
    while True:
        try:
            stream = await anyio.connect_tcp(*address)
        except OSError:
            await anyio.sleep(0.02)
            continue
        async with stream:
            await stream.send(b"GET /metrics HTTP/1.1\r\n\r\n")
            data = b""
            with contextlib.suppress(anyio.EndOfStream):
                while True:
                    data += await stream.receive()
        return data


class SetClock:
    """A clock that stands where it is set."""

    moment_s = 1000.0

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.moment_s, UTC)

    def monotonic(self) -> float:
        return self.moment_s

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(seconds)


class Daemon:
    """Answers, until it hangs."""

    hangs = False

    def __init__(self, answer: object) -> None:
        self._answer = answer

    async def call(self, method: Method[Any, Any], params: object) -> object:
        if self.hangs:
            await anyio.sleep_forever()
        return self._answer


def test_counters_of_a_hung_daemon_go_away_and_others_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_sample, "ASK_TIMEOUT_S", 0.01)
    nwd = Daemon(NicStatsReply(nics=[NicStats(nic_id="nic")]))
    daemons = {"nwd": nwd, "stord": Daemon(StorageMetrics())}
    clock = SetClock()
    sampler = Sampler(Tables, cast("Callable[[str], DaemonLink]", daemons.__getitem__), clock)
    assert sampler.storage() is None
    anyio.run(sampler.sample)
    assert list(sampler.nics()) == ["nic"]
    nwd.hangs = True
    clock.moment_s += STALE_S - 1
    anyio.run(sampler.sample)
    assert list(sampler.nics()) == ["nic"]
    clock.moment_s += 1
    assert sampler.nics() == {}
    assert sampler.storage() == StorageMetrics()
    assert sampler.ages_s() == {"proc": 1, "nwd": STALE_S, "stord": 1}
