"""Loads rules through libnftables in this process: one transaction a call, or nothing changed.

A libnftables context stays in the namespace of the thread that made it, and costs 2 ms and a
netlink socket that keeps the namespace alive: a few are kept, and `forget` drops one before its
namespace is removed. One call at a time: the library shares tables between contexts. Fails with
Internal, for refused rules are a bug of ours; the rules before them then stay in force.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import anyio.to_thread
import msgspec
from nftables import Nftables

from chv.common.errors import Internal
from chv.nwd.kernel import netns, nft_generation
from chv.nwd.nft.text import Ruleset, SetKey

CONTEXTS_MAX = 16
SHOWN_CHARACTERS_MAX = 400


class Applied(msgspec.Struct, frozen=True):
    """What we last loaded into a namespace, and how to see whether it still stands."""

    inode: int
    generation: int
    digest: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The same with the elements, for incremental changes; not kept across a restart."""

    applied: Applied
    frame_digest: str
    elements: Mapping[SetKey, frozenset[str]]


class Nft:
    """All access to nft of this process."""

    def __init__(self) -> None:
        self._contexts: OrderedDict[str, tuple[int, Nftables]] = OrderedDict()
        self._lock = threading.Lock()

    async def load(self, path: str, wanted: Ruleset, before: Loaded | None) -> Loaded | None:
        """Load a ruleset; None when somebody else changed rules meanwhile: load it again."""
        return await anyio.to_thread.run_sync(self._load, path, wanted, before)

    async def remove(self, path: str, ruleset: Ruleset) -> None:
        """Remove our tables."""
        await anyio.to_thread.run_sync(self._run, path, ruleset.removal())

    async def list(self, path: str, command: str) -> str:
        """Return what `list ...` prints; empty where the thing is not there."""
        return await anyio.to_thread.run_sync(self._list, path, command, False)

    async def list_json(self, path: str, command: str) -> str:
        """Return the same as JSON text."""
        return await anyio.to_thread.run_sync(self._list, path, command, True)

    def forget(self, path: str) -> None:
        """Drop the context of a namespace that is about to go."""
        with self._lock:
            self._contexts.pop(path, None)

    def _load(self, path: str, wanted: Ruleset, before: Loaded | None) -> Loaded | None:
        with self._lock:
            inode = netns.inode(path)
            generation = netns.call_in(path, nft_generation.read)
            text = _transaction(wanted, before, (inode, generation))
            if text:
                self._command(path, inode, text)
                expected, generation = generation + 1, netns.call_in(path, nft_generation.read)
                if generation != expected:
                    return None
        applied = Applied(inode, generation, wanted.digest)
        return Loaded(applied, wanted.frame_digest, dict(wanted.elements))

    def _run(self, path: str, text: str) -> None:
        with self._lock:
            self._command(path, netns.inode(path), text)

    def _list(self, path: str, command: str, as_json: bool) -> str:
        with self._lock:
            context = self._context(path, netns.inode(path))
            context.set_json_output(as_json)
            context.set_stateless_output(True)
            try:
                code, output, _ = context.cmd(command)
            finally:
                context.set_json_output(False)
        return "" if code else str(output)

    def _command(self, path: str, inode: int, text: str) -> None:
        code, _, error = self._context(path, inode).cmd(text)
        if code:
            raise Internal(
                f"nft refused the rules: {error.strip()[:SHOWN_CHARACTERS_MAX]}", resource=path
            )

    def _context(self, path: str, inode: int) -> Nftables:
        known = self._contexts.get(path)
        if known is None or known[0] != inode:
            known = (inode, netns.call_in(path, Nftables))
            self._contexts[path] = known
        self._contexts.move_to_end(path)
        while len(self._contexts) > CONTEXTS_MAX:
            self._contexts.popitem(last=False)
        return known[1]


def _transaction(wanted: Ruleset, before: Loaded | None, now: tuple[int, int]) -> str:
    """Return the smallest transaction: elements only, when we know what stands there."""
    if before is None or (before.applied.inode, before.applied.generation) != now:
        return wanted.replacement()
    if before.frame_digest != wanted.frame_digest:
        return wanted.replacement()
    return wanted.difference(before.elements)
