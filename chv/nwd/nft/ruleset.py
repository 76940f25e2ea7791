"""Loads rules through libnftables in this process: one transaction a call, or nothing changed.

A libnftables context stays in the namespace of the thread that made it, and costs 2 ms and a
netlink socket that keeps the namespace alive: a few are kept, and `forget` drops one before its
namespace is removed. One call at a time: the library shares tables between contexts. Fails with
Internal, for refused rules are a bug of ours; the rules before them then stay in force.
"""

from __future__ import annotations

import socket
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, MutableSequence, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import anyio
import anyio.to_thread
import msgspec
from nftables import Nftables

from chv.common import logs
from chv.common.errors import Internal
from chv.nwd.kernel import conntrack, netns, nft_generation, nft_tables
from chv.nwd.nft.standing import in_place
from chv.nwd.nft.text import Ruleset

log = logs.get(__name__)
CONTEXTS_MAX = 32
SHOWN_CHARACTERS_MAX = 400


class Applied(msgspec.Struct, frozen=True):
    """What we last loaded into a namespace, and how to see whether it still stands."""

    inode: int
    generation: int
    digest: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The same with what it was, for small changes; not kept across a restart.

    `is_busy`: whether connections were tracked when it stood.
    """

    applied: Applied
    ruleset: Ruleset
    is_busy: bool = True


@dataclass(frozen=True, slots=True)
class _Context:
    """What asks and changes rules in one namespace, from any thread."""

    inode: int
    nft: Nftables
    asker: socket.socket  # for netfilter

    def close(self) -> None:
        """Let go of the namespace; the library's own context goes with the last reference."""
        self.asker.close()


class Nft:
    """All access to nft of this process."""

    def __init__(self) -> None:
        self._contexts: OrderedDict[str, _Context] = OrderedDict()
        self._lock = threading.Lock()

    async def load(
        self,
        path: str,
        wanted: Ruleset,
        before: Loaded | None,
        note: Callable[[Applied], None] = lambda _: None,
    ) -> Loaded | None:
        """Load a ruleset; None when somebody else changed rules meanwhile: load it again.

        `note` is called with what stands now, in the thread that loaded it.
        """
        return await anyio.to_thread.run_sync(self.load_now, path, wanted, before, note)

    async def remove(self, path: str, ruleset: Ruleset) -> None:
        """Remove our tables."""
        await anyio.to_thread.run_sync(self._run, path, ruleset.removal())

    async def delete_table(self, path: str, family: str, handle: int) -> None:
        """Remove one table by its number, which no other of the namespace ever gets."""
        text = f"delete table {family} handle {handle}"
        await anyio.to_thread.run_sync(self._run, path, text)

    async def list(self, path: str, command: str) -> str:
        """Return what `list ...` prints; empty where the thing is not there."""
        return await anyio.to_thread.run_sync(partial(self._list, path, command))

    async def list_json(self, path: str, command: str) -> str:
        """Return the same as JSON text."""
        return await anyio.to_thread.run_sync(partial(self._list, path, command, as_json=True))

    async def list_counters(self, path: str, commands: Sequence[str]) -> str:
        """Return the same with the numbers of counters; a document a line."""

        def ask() -> str:
            ask_one = partial(self._list, path, as_json=True, stateless=False)
            return "\n".join(ask_one(command).strip() for command in commands)

        return await anyio.to_thread.run_sync(ask)

    @asynccontextmanager
    async def temporary(self, path: str, text: str) -> AsyncIterator[None]:
        """Have a table in the block that ends with it, or with this process, however that ends.

        The table has `flags owner`: the kernel removes it when the socket that made it closes,
        and nobody else can. Making it counts one generation, its end none.
        """
        held = [await anyio.to_thread.run_sync(self._hold, path, text)]
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._let_go, held)

    def _let_go(self, held: MutableSequence[Nftables]) -> None:
        with self._lock:
            held.clear()  # the last reference: the library closes its socket

    def _hold(self, path: str, text: str) -> Nftables:
        with self._lock:
            nft = netns.call_in(path, Nftables)
            code, _, error = nft.cmd(text)
        if code:
            raise Internal(
                f"nft refused a temporary table: {error.strip()[:SHOWN_CHARACTERS_MAX]}",
                resource=path,
            )
        return nft

    async def list_numbered(self, path: str, command: str) -> str:
        """Return what `list ...` prints with handles and without the elements of sets."""
        return await anyio.to_thread.run_sync(partial(self._list, path, command, numbered=True))

    def forget(self, path: str) -> None:
        """Drop the context of a namespace that is about to go."""
        with self._lock:
            context = self._contexts.pop(path, None)
            if context is not None:
                context.close()

    def load_now(
        self,
        path: str,
        wanted: Ruleset,
        before: Loaded | None,
        note: Callable[[Applied], None],
    ) -> Loaded | None:
        """Do the same in this thread."""
        with self._lock:
            context = self._context(path)
            generation = nft_generation.read_from(context.asker)
            if self._change(path, context, wanted, _known(before, (context.inode, generation))):
                expected = generation + 1
                generation = nft_generation.read_from(context.asker)
                if generation != expected:
                    return None
            is_busy = conntrack.count(context.asker) > 0
        applied = Applied(context.inode, generation, wanted.digest)
        note(applied)
        return Loaded(applied, wanted, is_busy)

    def _change(self, path: str, context: _Context, wanted: Ruleset, known: Ruleset | None) -> bool:
        """Run the smallest transaction that we can tell; False where there is nothing to change."""
        if known is not None:
            text = wanted.difference(known)
            if text:
                self._command(path, context, text)
            return bool(text)
        text = in_place(wanted, nft_tables.read(context.asker, wanted.tables))
        if text:
            code, _, error = context.nft.cmd(text)
            if not code:
                return True
            log.warning("tables_replaced", path=path, error=error.strip()[:SHOWN_CHARACTERS_MAX])
        self._command(path, context, wanted.replacement())
        return True

    def _run(self, path: str, text: str) -> None:
        with self._lock:
            self._command(path, self._context(path), text)

    def _list(
        self,
        path: str,
        command: str,
        *,
        as_json: bool = False,
        stateless: bool = True,
        numbered: bool = False,
    ) -> str:
        with self._lock:
            nft = self._context(path).nft
            nft.set_json_output(as_json)
            nft.set_stateless_output(stateless)
            nft.set_handle_output(numbered)
            nft.set_terse_output(numbered)
            try:
                code, output, _ = nft.cmd(command)
            finally:
                nft.set_json_output(False)
                nft.set_handle_output(False)
                nft.set_terse_output(False)
        return "" if code else str(output)

    def _command(self, path: str, context: _Context, text: str) -> None:
        code, _, error = context.nft.cmd(text)
        if code:
            raise Internal(
                f"nft refused the rules: {error.strip()[:SHOWN_CHARACTERS_MAX]}", resource=path
            )

    def _context(self, path: str) -> _Context:
        inode = netns.inode(path)
        known = self._contexts.pop(path, None)
        if known is not None and known.inode != inode:
            known.close()
            known = None
        if known is None:
            known = netns.call_in(path, lambda: _make_context(inode))
        self._contexts[path] = known  # the last one used
        while len(self._contexts) > CONTEXTS_MAX:
            self._contexts.popitem(last=False)[1].close()
        return known


def _make_context(inode: int) -> _Context:
    return _Context(inode, Nftables(), nft_generation.open_socket())


def _known(before: Loaded | None, now: tuple[int, int]) -> Ruleset | None:
    """Return what stands there, if nobody has changed any rule since we loaded it."""
    if before is None or (before.applied.inode, before.applied.generation) != now:
        return None
    return before.ruleset
