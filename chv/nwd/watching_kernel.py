"""Sees what others do to our networks, and lets it be repaired within moments.

Two netlink sockets a namespace, the host's among them, wait in one epoll that one task reads. What
they tell is gathered, and after a moment judged under the network's lock (`drift` says why); a
network that is not as wanted is converged. Where somebody keeps undoing that, looks come later and
later, and `fights` says so. All of this only shortens the wait for the resync: a socket that cannot
be opened or breaks is logged and tried again by the next pass, and never ends anything.

An open socket keeps a namespace alive, so `stop` comes before the namespace goes.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import anyio
import anyio.abc
import anyio.to_thread

from chv.common import logs
from chv.common.clock import Clock
from chv.common.errors import ChvError
from chv.nwd import runfiles
from chv.nwd.drift import Pace, Tidings, follow_name, judge
from chv.nwd.host import Host
from chv.nwd.kernel import link_events, links, netns, netns_events, nft_events
from chv.nwd.kernel.link_events import (
    AddressNews,
    ForwardingNews,
    Heard,
    LinkNews,
    News,
    RouteNews,
)
from chv.nwd.locks import NetworkLocks
from chv.nwd.parts import Parts
from chv.nwd.records import Network

log = logs.get(__name__)
HOST = ""  # the key of the host's own place
LOOK_S_MAX = 1.0
READ_AFTER_S = 0.05
Converge = Callable[[str], Awaitable[None]]  # the caller holds the network's lock


@dataclass(eq=False)
class _Place:
    """The sockets of one namespace; `inode` tells which. `names`: of its links, by number."""

    inode: int
    rules: socket.socket
    links: socket.socket
    names: dict[int, str]
    heard: Heard = field(default_factory=Heard)
    broken: bool = False

    def close(self) -> None:
        """Let go of the namespace."""
        self.rules.close()
        self.links.close()


@dataclass(eq=False)
class _Case:
    """What is known of one network, or of the host, and whether a look is on its way."""

    told: Tidings = field(default_factory=Tidings)
    looks: Pace = field(default_factory=Pace)
    repairs: Pace = field(default_factory=Pace)
    pending: bool = False

    def wait_s(self, now_s: float) -> float:
        """Return how long news are gathered: what is in order is looked at every second at most."""
        return max(self.repairs.wait_s(now_s), min(LOOK_S_MAX, self.looks.wait_s(now_s)))

    def gathered(self) -> Tidings:
        """Return what was told so far and begin anew."""
        told, self.told = self.told, Tidings()
        return told


class KernelWatch:
    """The watchers of every network and of the host. `run` lives as long as the daemon."""

    def __init__(
        self, parts: Parts, host: Host, locks: NetworkLocks, clock: Clock, converge: Converge
    ) -> None:
        self._parts = parts
        self._host = host
        self._locks = locks
        self._clock = clock
        self._converge = converge
        self._places: dict[str, _Place] = {}
        self._by_fd: dict[int, str] = {}
        self._cases: dict[str, _Case] = {}
        self._epoll = select.epoll()
        self._names = -1  # the watch over names of namespaces
        self._tasks: anyio.abc.TaskGroup | None = None
        self._prefix = parts.layout.uplink("")
        self.on_addresses: Callable[[], None] = lambda: None  # those of the node are others now

    def fights(self, network_id: str = HOST) -> str:
        """Return what keeps being undone in a network, in words; empty where it is calm."""
        case, now_s = self._cases.get(network_id), self._clock.monotonic()
        if case is None or not case.repairs.is_fight(now_s):
            return ""
        return (
            "something else keeps changing it, and it is repaired again and again"
            f" ({case.repairs.recent(now_s)} times in the last minute)"
        )

    def warnings(self) -> list[str]:
        """Return every fight, with what it is over."""
        found = {uid: self.fights(uid) for uid in (HOST, *self._parts.records.networks)}
        names = {uid: f"network {uid}" if uid else "the host's table" for uid in found}
        return [f"Fought over: {names[uid]}: {text}" for uid, text in found.items() if text]

    # --- places
    async def follow(self, network: Network) -> None:
        """Watch a network that stands; the caller holds its lock. A failure is logged alone."""
        await self._follow(network.network_id, self._parts.netns_path(network.network_id))

    async def follow_host(self) -> None:
        """Watch the host's side."""
        await self._follow(HOST, netns.OWN)
        if self._names < 0:
            try:
                self._names = netns_events.open_watch()
            except OSError as error:
                log.debug("names_not_watched", error=str(error))
                return
            self._epoll.register(self._names, select.EPOLLIN)

    async def _follow(self, key: str, path: str) -> None:
        known = self._places.get(key)
        try:
            inode = await anyio.to_thread.run_sync(netns.inode, path)
            if known is not None and known.inode == inode and not known.broken:
                return
            self.stop(key)
            place = await netns.inside(path, partial(_open, inode))
        except (ChvError, OSError) as error:
            log.warning("changes_not_watched", network_id=key, error=error)
            return
        self._places[key] = place
        for each in (place.rules, place.links):
            self._by_fd[each.fileno()] = key
            self._epoll.register(each, select.EPOLLIN)

    def stop(self, network_id: str) -> None:
        """Watch a network no longer; nothing of it is open afterwards."""
        place = self._places.pop(network_id, None)
        if place is None:
            return
        for each in (place.rules, place.links):
            self._epoll.unregister(each)
            del self._by_fd[each.fileno()]
        place.close()

    def forget(self, network_id: str) -> None:
        """The network is gone for good."""
        self.stop(network_id)
        self._cases.pop(network_id, None)

    # --- reading
    async def run(self) -> None:
        """Read what comes, and let networks be looked at."""
        await self.follow_host()
        await self._host.look_at_addresses()  # so that the first change is seen as one
        async with anyio.create_task_group() as self._tasks:
            for early in list(self._cases):
                self._wake(early)  # what was told before this began
            while True:
                await anyio.wait_readable(self._epoll)
                for fd, _ in self._epoll.poll(0):
                    if fd == self._names:
                        self._read_names()
                    key = self._by_fd.get(fd)
                    if key is not None:
                        self._read(key)
                # One attach of ours is a dozen messages: a wake for each would hold it up.
                await anyio.sleep(READ_AFTER_S)

    def _read(self, key: str) -> None:
        """Take in everything that waits in the sockets of a place."""
        place = self._places.get(key)
        if place is None or place.broken:
            return
        try:
            generation, lost_rules = nft_events.receive(place.rules)
            lost_links = place.heard.receive(place.links)
        except OSError as error:
            log.warning("watch_broken", network_id=key, error=error)
            place.broken = True  # opened again by the next pass
            for each in (place.rules, place.links):
                self._epoll.modify(each, 0)
            self._case(key).told.lost = True
            self._wake(key)
            return
        self._take(key, place, generation, lost=lost_rules or lost_links)

    def _read_names(self) -> None:
        """Take in which namespaces have lost their names; ours go after their records do."""
        try:
            gone = netns_events.receive(self._names)
        except OSError as error:
            log.warning("names_watch_broken", error=error)
            self._epoll.unregister(self._names)
            os.close(self._names)
            self._names = -1  # opened again by the resync
            return
        for network_id in self._parts.records.networks:
            if "" in gone or self._parts.layout.netns(network_id) in gone:
                self._case(network_id).told.gone = True
                self._wake(network_id)

    def _take(self, key: str, place: _Place, generation: int, *, lost: bool) -> None:
        told = self._case(key).told
        told.generation = max(told.generation, generation)
        told.lost = told.lost or lost
        wake = bool(generation) or lost
        if key != HOST:
            wake = wake or bool(place.heard)  # taken apart when it is judged
        else:
            for each in place.heard.news():
                wake = self._take_host(each, place.names) or wake
        if wake:
            self._wake(key)

    def _take_host(self, news: News, names: dict[int, str]) -> bool:
        """Hand news of an uplink to its network; True where they are of the host itself."""
        if isinstance(news, LinkNews):
            name = names.get(news.link.index, news.link.name)  # a rename: what it was
            follow_name(names, news)
        elif isinstance(news, AddressNews):
            name = names.get(news.link, "")
        elif isinstance(news, RouteNews):
            name = names.get(news.route.link, "")
        else:
            return self._take_forwarding(news)
        if not name.startswith(self._prefix):
            return isinstance(news, AddressNews)
        network_id = self._owner(name)
        if network_id:
            self._case(network_id).told.take_host(news, name)
            self._wake(network_id)
        return False

    def _take_forwarding(self, news: News) -> bool:
        if isinstance(news, ForwardingNews) and not news.on:
            self._case(HOST).told.forwarding[news.family] = False
            return True
        return False

    def _owner(self, uplink: str) -> str:
        known = self._parts.records.networks
        return next((uid for uid in known if self._parts.layout.uplink(uid) == uplink), "")

    # --- judging
    def _case(self, key: str) -> _Case:
        return self._cases.setdefault(key, _Case())

    def _wake(self, key: str) -> None:
        case = self._case(key)
        if case.pending or self._tasks is None:
            return
        case.pending = True
        look = self._look_at_host if key == HOST else partial(self._look, key)
        self._tasks.start_soon(self._later, key, case, look)

    async def _later(self, key: str, case: _Case, look: Callable[[], Awaitable[None]]) -> None:
        try:
            await self._clock.sleep(case.wait_s(self._clock.monotonic()))
        finally:
            case.pending = False  # what comes from here on asks for another look
        try:
            await look()
        except Exception as error:  # noqa: BLE001  the firewall of one network
            log.warning("change_not_repaired", network_id=key, error=error)

    def _is_own_doing(self, network_id: str) -> bool:
        """Tell whether nothing was told but rules, and those no newer than what we loaded."""
        told, loaded = self._case(network_id).told, self._parts.loaded.get(network_id)
        place = self._places.get(network_id)
        return (
            loaded is not None
            and not (place is not None and place.heard)
            and told.generation <= loaded.applied.generation
            and told == Tidings(generation=told.generation)
        )

    async def _look(self, network_id: str) -> None:
        if self._is_own_doing(network_id):
            self._case(network_id).gathered()
            return  # after each change of ours: no reason to look at a thousand NICs
        async with self._locks.hold(network_id):
            self._read(network_id)  # what we did ourselves has been told by now, all of it
            self._read(HOST)
            case = self._case(network_id)
            told = self._told(network_id, case)
            row = self._parts.records.networks.get(network_id)
            if row is None or not self._parts.is_due(row):
                return
            desired = self._parts.blueprint(row).desired
            generation = await self._generation(network_id)
            wrong = judge(desired, told, generation)
            if not wrong:
                return
            case.looks.note(self._clock.monotonic())
            case.repairs.note(self._clock.monotonic())
            log.info("changed_by_others", network_id=network_id, what=wrong)
            await self._converge(network_id)
        self._tell_fight(network_id, case)

    def _tell_fight(self, key: str, case: _Case) -> None:
        if case.repairs.is_fight(self._clock.monotonic()):
            log.warning("fought_over", network_id=key, why=self.fights(key))

    def _told(self, network_id: str, case: _Case) -> Tidings:
        """Return all that was told of a network, taken apart."""
        place = self._places.get(network_id)
        if place is not None:
            for each in place.heard.news():
                case.told.take(each, place.names)
        return case.gathered()

    async def _generation(self, network_id: str) -> int:
        """Return the generation of the rules that we loaded last."""
        loaded = self._parts.loaded.get(network_id)
        if loaded is not None:
            return loaded.applied.generation
        directory = self._parts.layout.network_run(network_id)
        noted = await anyio.to_thread.run_sync(runfiles.applied_rules, directory)
        return noted.generation if noted is not None else 0

    async def _look_at_host(self) -> None:
        case = self._case(HOST)
        self._read(HOST)
        told = case.gathered()
        if await self._host.look_at_addresses():
            log.info("node_addresses_changed", addresses=sorted(self._host.addresses or ()))
            self.on_addresses()
        if told.lost:
            self._doubt_all()
        is_changed = told.generation > await self._host.generation()
        if not (is_changed or told.lost or told.forwarding):
            return
        case.looks.note(self._clock.monotonic())
        if await self._host.converge():
            case.repairs.note(self._clock.monotonic())
            log.info("changed_by_others", network_id=HOST, what=["the host's table"])
            self._tell_fight(HOST, case)

    def _doubt_all(self) -> None:
        """What was lost may have been of any network's uplink."""
        for network_id in self._parts.records.networks:
            self._case(network_id).told.lost = True
            self._wake(network_id)


def _open(inode: int) -> _Place:
    """In the namespace: open its sockets; what is there is read after they listen."""
    rules = nft_events.open_socket()
    try:
        listener = link_events.open_socket()
    except BaseException:
        rules.close()
        raise
    try:
        names = {link.index: link.name for link in links.read_all().values()}
    except BaseException:
        rules.close()
        listener.close()
        raise
    return _Place(inode, rules, listener, names)
