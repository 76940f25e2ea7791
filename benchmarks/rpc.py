"""CHV's RPC against grpc.aio over a Unix socket, in one run: only the ratios mean anything.

Both serve the same typed call with a deadline, server and client in processes of their own, in
interleaved rounds. grpc gets protobuf messages (its own `Struct`-free well-known types would be
unfair): the message class is made from a descriptor at start, so no code generator is needed.
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
ROUNDS = 5
WARM_UP_CALLS = 300
CALLS = 2000
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
    """Measure calls one after the other."""
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
    """Measure calls one after the other."""
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
    started = time.perf_counter()
    for _ in range(CALLS):
        before = time.perf_counter()
        await call()
        latencies_s.append(time.perf_counter() - before)
    elapsed_s = time.perf_counter() - started
    return {"calls_per_s": CALLS / elapsed_s, "p50_us": median(latencies_s) * 1e6}


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
    """Return the two ratios: medians of `ROUNDS` interleaved rounds."""
    with tempfile.TemporaryDirectory(prefix="chv-bench-") as directory:
        seen = _rounds(Path(directory))
    calls = {system: median(r["calls_per_s"] for r in rounds) for system, rounds in seen.items()}
    p50_us = {system: median(r["p50_us"] for r in rounds) for system, rounds in seen.items()}
    calls_ratio = calls["chv"] / calls["grpc"]
    p50_ratio = p50_us["chv"] / p50_us["grpc"]
    return [
        {
            "id": "rpc.calls_vs_grpc",
            "value": round(calls_ratio, 2),
            "unit": "ratio",
            "budget": 1.5,
            "ok": calls_ratio >= 1.5,
            "baseline": f"grpc.aio {calls['grpc']:.0f} calls/s, chv {calls['chv']:.0f}",
            "runs": ROUNDS,
        },
        {
            "id": "rpc.p50_vs_grpc",
            "value": round(p50_ratio, 2),
            "unit": "ratio",
            "budget": 0.7,
            "ok": p50_ratio <= 0.7,
            "baseline": f"grpc.aio {p50_us['grpc']:.0f} us, chv {p50_us['chv']:.0f} us",
            "runs": ROUNDS,
        },
    ]


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
