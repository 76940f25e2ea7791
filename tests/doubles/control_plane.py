"""A small control plane in a process of its own, by JSON-RPC over a Unix socket; and its client.

`python -m tests.doubles.control_plane SOCKET` serves nodes and the test on one socket. A node lists
all that is wanted, then asks for what is newer than what it knows; too old a question is answered
with `expired`, as an API server's 410 does. Nothing is kept over the end of the process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio

from chv.agent.upstream.port import Session
from chv.common.errors import Unavailable
from chv.common.rpc import Method, Server, connect
from chv.common.wire.types import Done, Empty, Message, Reply
from chv.common.wire.upstream import Report, ReportKind, Wanted

LOG_MAX = 8  # changes that are remembered for those who ask
WAIT_S = 0.5


class WantedList(Reply):
    """All that is wanted, and the version of it."""

    version: int
    objects: tuple[Wanted, ...] = ()


class After(Message):
    """What a node knows."""

    version: int


class News(Reply):
    """What is newer; `expired`: too much is, list again."""

    version: int
    objects: tuple[Wanted, ...] = ()
    expired: bool = False


class Reports(Message):
    """From a node, in order."""

    reports: tuple[Report, ...]


class Want(Message):
    """By the test. `remember`: it is what is wanted by now, and not only said."""

    wanted: Wanted
    remember: bool = True


class Cut(Message):
    """By the test: nodes get no answer. `lossy`: reports are taken, and not answered."""

    cut: bool
    lossy: bool = False


class Told(Reply):
    """All reports that came."""

    reports: tuple[Report, ...] = ()


LIST_WANTED = Method("ListWanted", Empty, WantedList, mutating=False)
NEXT_WANTED = Method("NextWanted", After, News, mutating=False)
TAKE_REPORTS = Method("TakeReports", Reports, Done)
WANT = Method("Want", Want, Done)
CUT = Method("Cut", Cut, Done)
GET_TOLD = Method("GetTold", Empty, Told, mutating=False)
METHODS = (LIST_WANTED, NEXT_WANTED, TAKE_REPORTS, WANT, CUT, GET_TOLD)


class ControlPlane:
    """What the process serves."""

    def __init__(self) -> None:
        self._wanted: dict[str, Wanted] = {}
        self._log: list[Wanted] = []
        self._version = 0
        self._reports: list[Report] = []
        self._cut = Cut(cut=False)
        self._changed = anyio.Event()

    def register(self, server: Server) -> None:
        server.add(LIST_WANTED, self._list)
        server.add(NEXT_WANTED, self._next)
        server.add(TAKE_REPORTS, self._take)
        server.add(WANT, self._want)
        server.add(CUT, self._set_cut)
        server.add(GET_TOLD, self._told)

    async def _list(self, request: Empty) -> WantedList:
        self._answer()
        return WantedList(version=self._version, objects=tuple(self._wanted.values()))

    async def _next(self, request: After) -> News:
        self._answer()
        with anyio.move_on_after(WAIT_S):
            while request.version == self._version:
                await self._changed.wait()
        self._answer()
        missed = self._version - request.version
        if missed > len(self._log):
            return News(version=self._version, expired=True)
        return News(version=self._version, objects=tuple(self._log[len(self._log) - missed :]))

    async def _take(self, request: Reports) -> Done:
        self._answer()
        self._reports += request.reports
        gone = {report.uid for report in request.reports if report.kind is ReportKind.GONE}
        for uid in gone & {uid for uid, each in self._wanted.items() if each.deleting}:
            del self._wanted[uid]
        if self._cut.lossy:
            raise Unavailable("the answer is lost")
        return Done()

    async def _want(self, request: Want) -> Done:
        if request.remember:
            self._wanted[request.wanted.uid] = request.wanted
        self._log = [*self._log, request.wanted][-LOG_MAX:]
        self._version += 1
        self._tell()
        return Done()

    async def _set_cut(self, request: Cut) -> Done:
        self._cut = request
        self._tell()
        return Done()

    async def _told(self, request: Empty) -> Told:
        return Told(reports=tuple(self._reports))

    def _answer(self) -> None:
        if self._cut.cut:
            raise Unavailable("the plane is cut off")

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class RpcUpstream:
    """The agent's port to such a plane."""

    embedded = False

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    async def follow(self, session: Session) -> None:
        async with connect(self._socket) as client:
            version = -1
            while True:
                if version < 0:
                    listed = await client.call(LIST_WANTED, Empty())
                    await session.relist(listed.objects)
                    version = listed.version
                news = await client.call(NEXT_WANTED, After(version=version))
                session.contact()
                for wanted in news.objects:
                    await session.change(wanted)
                version = -1 if news.expired else news.version

    async def report(self, reports: tuple[Report, ...]) -> None:
        async with connect(self._socket) as client:
            await client.call(TAKE_REPORTS, Reports(reports=reports))


async def _serve(socket: Path) -> None:
    server = Server("plane", METHODS, allow_uids=frozenset({os.getuid()}))
    ControlPlane().register(server)
    await server.serve(socket)


if __name__ == "__main__":
    anyio.run(_serve, Path(sys.argv[1]))
