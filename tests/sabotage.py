"""Breakages on purpose, of a live node: what appears there is broken as soon as it is seen.

A thread looks for new networks and storage daemons of one instance every few milliseconds, and
breaks each in one way. At the end what was stopped is let go on, so that it can be ended.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from chv.common.process import scan
from tests.integration.live_node import LiveNode

EVERY_S = 0.01
NFT_S_MAX = 10.0
# What libc does for fdatasync on x86-64: `mov $75, %eax; syscall`; and what makes it -EIO instead:
# `mov $-5, %rax`, which has as many bytes.
FDATASYNC = bytes.fromhex("b84b0000000f05")
FAILS = bytes.fromhex("48c7c0fbffffff")

Break = Callable[[LiveNode, set[object]], None]


@contextlib.contextmanager
def broken(node: LiveNode, how: Break) -> Iterator[None]:
    """Break the node in one way for the length of the block."""
    done: set[object] = set()
    over = threading.Event()
    errors: list[Exception] = []

    def watch() -> None:
        while not over.wait(EVERY_S):
            try:
                how(node, done)
            except (OSError, subprocess.SubprocessError) as error:
                errors.append(error)  # it was gone before it could be broken; else the test says

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for pid in done:
            if isinstance(pid, int):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
    assert done, f"nothing was there to be broken; errors: {errors}"


def dhcp_stands(node: LiveNode, done: set[object]) -> None:
    """Every dnsmasq stands still; it is never let go on while the network is there."""
    for pid in workers(node, "dnsmasq"):
        if pid in done:
            continue
        os.kill(pid, signal.SIGSTOP)
        done.add(pid)


def flush_fails(node: LiveNode, done: set[object]) -> None:
    """Every fdatasync of a storage daemon fails with EIO."""
    for pid in workers(node, "qsd"):
        if pid not in done and patch_fdatasync(pid):
            done.add(pid)


def rules(text: str) -> Break:
    """Rules in a table of their own, in every network's namespace."""

    def load(node: LiveNode, done: set[object]) -> None:
        for name in networks(node):
            if name in done:
                continue
            nft(name, f"table inet broken {{\n{text}\n}}")
            done.add(name)

    return load


def opened(node: LiveNode, done: set[object]) -> None:
    """The gateway's rules let everything in, however often they are put right."""
    for name in networks(node):
        listed = nft(name, "list chain inet chv input")
        if "broken" not in listed:
            nft(name, 'insert rule inet chv input accept comment "broken"')
            done.add(name)


def networks(node: LiveNode) -> set[str]:
    """Return the names of the namespaces of the node's networks."""
    return {path.name for path in Path("/run/netns").glob(f"chv-{node.dev.layout.instance}-*")}


def workers(node: LiveNode, kind: str) -> set[int]:
    """Return the pids of the node's workers of a kind."""
    return {worker.pid for worker in scan(f"{node.dev.layout.worker_prefix}{kind}:")}


def nft(netns: str, text: str) -> str:
    """Run nft in a namespace."""
    argv = ["ip", "netns", "exec", netns, "nft", "-f", "-"]
    done = subprocess.run(
        argv, input=text + "\n", capture_output=True, text=True, check=True, timeout=NFT_S_MAX
    )
    return done.stdout


def patch_fdatasync(pid: int) -> bool:
    """Overwrite fdatasync in the libc of a running process; False where it is not loaded yet."""
    name = ctypes.util.find_library("c") or "libc.so.6"
    pattern = re.compile(rf"^([0-9a-f]+)-([0-9a-f]+) r-xp .*/{re.escape(name)}$", re.MULTILINE)
    found = pattern.search(Path(f"/proc/{pid}/maps").read_text())
    if found is None:
        return False
    start, end = int(found[1], 16), int(found[2], 16)
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(start)
        code = memory.read(end - start)
        places = [match.start() for match in re.finditer(re.escape(FDATASYNC), code)]
        assert places, f"no fdatasync in {name}"
        for place in places:
            memory.seek(start + place)
            memory.write(FAILS)
    return True
