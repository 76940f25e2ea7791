"""CHV's RPC against grpc.aio over a Unix socket, in one run: only the ratios mean anything.

Both serve the same typed call with a deadline, server and client in processes of their own, in
interleaved rounds: latency with one caller, calls a second with 32. grpc gets real protobuf
messages, whose classes are made from a descriptor at start, so that no code generator is needed.
Run a part by hand: `python -m benchmarks.rpc chv|grpc serve|call SOCKET`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import anyio
import msgspec

ROOT = Path(__file__).parents[1]
ROUNDS = 7
WARM_UP_CALLS = 300
CALLS = 1500
CALLERS = 32
TIMEOUT_S = 10.0
START_TIMEOUT_S = 20.0
# An attach-a-disk request in shape and size.
REQUEST: dict[str, Any] = {
    "operation_id": "op-0123456789ab",
    "generation": 42,
    "vm_uid": "6f9619ff-8b86-4d01-b42d-00cf4fc964ff",
    "volume_uid": "7f9619ff-8b86-4d01-b42d-00cf4fc964ff",
    "path": "/var/lib/chv/abc123/volumes/7f9619ff-8b86-4d01-b42d-00cf4fc964ff/disk.qcow2",
    "read_only": False,
    "tags": ["tenant=default", "class=file", "cache=writeback"],
}
REPLY: dict[str, Any] = {
    "socket": "/run/chv/abc123/vm/6f9619ff8b/7f9619ff8b.sock",
    "generation": 42,
}
Text = Annotated[str, msgspec.Meta(max_length=256)]


class Attach(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The request as CHV's wire schema would have it."""

    operation_id: Text
    generation: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    vm_uid: Text
    volume_uid: Text
    path: Text
    read_only: bool
    tags: Annotated[list[Text], msgspec.Meta(max_length=16)]


class Attached(msgspec.Struct, frozen=True, kw_only=True):
    """The reply."""

    socket: str
    generation: int


# --- CHV


async def chv_serve(path: str) -> None:
    """Serve with every guard on: uid check, limits, deadline, validation both ways."""
    from chv.common.rpc import Server

    method = _method()

    async def attach(params: Attach) -> Attached:
        return Attached(socket=REPLY["socket"], generation=params.generation)

    server = Server("bench", [method], allow_uids=frozenset({os.getuid()}))
    server.add(method, attach)
    await server.serve(Path(path))


async def chv_call(path: str) -> dict[str, float]:
    """Be the client of one round."""
    from chv.common.rpc import connect

    method = _method()
    async with connect(path) as client:
        return await _measure(lambda: client.call(method, Attach(**REQUEST)))


def _method() -> Any:
    from chv.common.rpc import Method

    return Method("Attach", Attach, Attached, timeout_s=TIMEOUT_S)


# --- grpc


def _messages() -> tuple[Any, Any]:
    """Make the protobuf classes of the same two messages."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = {str: 9, int: 3, bool: 8}  # TYPE_STRING, TYPE_INT64, TYPE_BOOL
    file = descriptor_pb2.FileDescriptorProto(name="bench.proto", package="bench", syntax="proto3")
    for name, sample in (("Attach", REQUEST), ("Attached", REPLY)):
        message = file.message_type.add(name=name)
        for number, (field, value) in enumerate(sample.items(), start=1):
            repeated = isinstance(value, list)
            kind = kinds[type(value[0] if repeated else value)]
            message.field.add(name=field, number=number, type=kind, label=3 if repeated else 1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made = [
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"bench.{name}"))
        for name in ("Attach", "Attached")
    ]
    return made[0], made[1]


async def grpc_serve(path: str) -> None:
    """Serve the same call by grpc.aio."""
    import grpc

    request_type, reply_type = _messages()

    async def attach(request: Any, _: Any) -> Any:
        return reply_type(socket=REPLY["socket"], generation=request.generation)

    handler = grpc.unary_unary_rpc_method_handler(
        attach,
        request_deserializer=request_type.FromString,
        response_serializer=reply_type.SerializeToString,
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bench.Bench", {"Attach": handler}),)
    )
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    await server.wait_for_termination()


async def grpc_call(path: str) -> dict[str, float]:
    """Be the client of one round."""
    import grpc

    request_type, reply_type = _messages()
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        attach = channel.unary_unary(
            "/bench.Bench/Attach",
            request_serializer=request_type.SerializeToString,
            response_deserializer=reply_type.FromString,
        )
        return await _measure(lambda: attach(request_type(**REQUEST), timeout=TIMEOUT_S))


# --- measuring


async def _measure(call: Callable[[], Awaitable[Any]]) -> dict[str, float]:
    for _ in range(WARM_UP_CALLS):
        assert (await call()).generation == REPLY["generation"]
    latencies_s = []
    for _ in range(CALLS):
        before = time.perf_counter()
        await call()
        latencies_s.append(time.perf_counter() - before)
    return {"calls_per_s": await _throughput(call), "p50_us": median(latencies_s) * 1e6}


async def _throughput(call: Callable[[], Awaitable[Any]]) -> float:
    """Return calls a second with CALLERS at once, where the processor is the limit."""

    async def caller() -> None:
        for _ in range(2 * CALLS // CALLERS):
            await call()

    started = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(CALLERS):
            tasks.start_soon(caller)
    return 2 * CALLS // CALLERS * CALLERS / (time.perf_counter() - started)


def _argv(system: str, role: str, path: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.rpc", system, role, str(path)]


def _rounds(directory: Path) -> dict[str, list[dict[str, float]]]:
    """Run both servers and, in turn, a fresh client of each; return what the clients saw."""
    systems = ("chv", "grpc")
    paths = {system: directory / f"{system}.sock" for system in systems}
    seen: dict[str, list[dict[str, float]]] = {system: [] for system in systems}
    servers = [subprocess.Popen(_argv(s, "serve", paths[s]), cwd=ROOT) for s in systems]
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not all(path.exists() for path in paths.values()):
            assert time.monotonic() < deadline, "a server does not come up"
            time.sleep(0.05)
        for _ in range(ROUNDS):
            for system in systems:
                argv = _argv(system, "call", paths[system])
                done = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
                seen[system].append(json.loads(done.stdout))
    finally:
        for server in servers:
            server.kill()
            server.wait()
    return seen


def run() -> list[dict[str, Any]]:
    """Return the two ratios: each round's own, so that drift cancels out, and their median."""
    with tempfile.TemporaryDirectory(prefix="chv-bench-") as directory:
        seen = _rounds(Path(directory))
    return [
        _result("rpc.calls_vs_grpc", "calls_per_s", 1.5, seen),
        _result("rpc.p50_vs_grpc", "p50_us", 0.7, seen),
    ]


def _result(
    id_: str, measure: str, budget: float, seen: dict[str, list[dict[str, float]]]
) -> dict[str, Any]:
    """Make the result of one measure; calls are to be over the budget, times under it."""
    pairs = zip(seen["chv"], seen["grpc"], strict=True)
    ratio = median(chv[measure] / grpc[measure] for chv, grpc in pairs)
    own, other = (median(r[measure] for r in seen[system]) for system in ("chv", "grpc"))
    return {
        "id": id_,
        "value": round(ratio, 2),
        "unit": "ratio",
        "budget": budget,
        "ok": ratio >= budget if measure == "calls_per_s" else ratio <= budget,
        "baseline": f"grpc.aio {other:.0f} {measure}, chv {own:.0f}",
        "runs": ROUNDS,
    }


def main() -> None:
    """Be one of the processes, or run it all."""
    if len(sys.argv) == 1:
        json.dump(run(), sys.stdout, indent=2)
        return
    system, role, path = sys.argv[1:]
    parts: dict[tuple[str, str], Callable[[str], Awaitable[Any]]] = {
        ("chv", "serve"): chv_serve,
        ("chv", "call"): chv_call,
        ("grpc", "serve"): grpc_serve,
        ("grpc", "call"): grpc_call,
    }
    result = anyio.run(partial(parts[system, role], path))
    if result:
        json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
