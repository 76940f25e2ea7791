"""Who starts when, and who is stopped when the node is drained: so many at a time, in order. Pure.

`StartQueue` bounds how many start at a time, first come, first served. `Order` is one round in
which all VMs of the node start (or stop): one level of priority after the other. A level is over
when each of its VMs has got there and its delay has passed, has dropped out, or has had its time:
nobody is waited for without end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


class StartQueue:
    """First come, first served. `wake` is called for those who moved up."""

    def __init__(self, slots: int, wake: Callable[[str], None]) -> None:
        self._slots = slots
        self._wake = wake
        self._starting: list[str] = []  # the first `_slots` have a slot, the others wait
        self._asked: set[str] = set()  # of these, for whom a person waits

    def enter(self, uid: str, *, first: bool = False) -> int:
        """Return 0 where `uid` may start now, else its position in the queue, from 1.

        `first`: before all that wait, since a person waits for it; but after others of that kind.
        """
        if first and uid not in self._asked:
            self._asked.add(uid)
            if uid in self._starting[self._slots :]:
                self._starting.remove(uid)
        if uid not in self._starting:
            self._starting.insert(self._place(first=first), uid)
        return max(0, self._starting.index(uid) - self._slots + 1)

    def _place(self, *, first: bool) -> int:
        if not first:
            return len(self._starting)
        before = sum(each in self._asked for each in self._starting[self._slots :])
        return min(self._slots + before, len(self._starting))

    def leave(self, uid: str) -> None:
        """Give up the slot or the place in the queue. Not there: no effect."""
        if uid not in self._starting:
            return
        self._starting.remove(uid)
        self._asked.discard(uid)
        for waiting in self._starting[max(0, self._slots - 1) :]:
            self._wake(waiting)

    @property
    def waiting(self) -> int:
        """How many wait for a slot."""
        return max(0, len(self._starting) - self._slots)


@dataclass(frozen=True, slots=True)
class Rank:
    """A VM in an order. `wait_s`: for how long its level is held up by it at most."""

    title: str
    priority: int  # as its spec has it
    level: int  # higher ones come first
    wait_s: float
    delay_s: float = 0.0  # after it has got there


@dataclass(frozen=True, slots=True)
class Turn:
    """Whom one waits for. `position`: from 1, among those who have not got there."""

    rank: Rank
    others: int  # of its level that are waited for as well
    delayed: bool  # it has got there, and only its delay has not passed
    position: int
    retry_s: float

    @property
    def whom(self) -> str:
        """Return it in words."""
        more = f" and {self.others} more" if self.others else ""
        return f"VM {self.rank.title} (priority {self.rank.priority}){more}"


@dataclass
class _Round:
    waiting: set[str] = field(default_factory=set)  # not let go yet
    left: set[str] = field(default_factory=set)  # not got there yet
    there: dict[str, float] = field(default_factory=dict)  # since when
    opened: dict[int, float] = field(default_factory=dict)  # level -> since when it is its turn


class Order:
    """See the module. `rank` says how a VM stands by now, None where it is no more."""

    def __init__(self, rank: Callable[[str], Rank | None], wake: Callable[[str], None]) -> None:
        self._rank = rank
        self._wake = wake
        self._round = _Round()

    def begin(self, uids: Iterable[str]) -> None:
        """Begin a round of these; an earlier one is over."""
        self._round = _Round()
        self._round.waiting = set(uids)
        self._round.left = set(self._round.waiting)

    def arrived(self, uid: str, now_s: float) -> None:
        """Note that it has got there. Not of this round, or noted: no effect."""
        if uid in self._round.left:
            self._round.left.discard(uid)
            self._round.there[uid] = now_s
            self._let_go(uid)

    def drop(self, uid: str) -> None:
        """Wait for it no more: it is not wanted, or will not get there."""
        if uid in self._round.left:
            self._round.left.discard(uid)
            self._let_go(uid)

    def exempt(self, uid: str) -> None:
        """Let it go at once, whoever is before it."""
        self._round.waiting.discard(uid)

    def turn(self, uid: str, now_s: float) -> Turn | None:
        """Return whom it waits for; None where it may go, from then on for the whole round."""
        mine = self._rank(uid)
        if uid not in self._round.waiting or mine is None:
            return None
        for level, members in self._levels():
            opened = self._round.opened.setdefault(level, now_s)
            if level <= mine.level:
                break
            left = {each: self._left_s(each, rank, now_s - opened, now_s) for each, rank in members}
            due = [(each, left_s) for each, left_s in left.items() if left_s > 0]
            if due:
                return self._turn(due, mine)
        self._round.waiting.discard(uid)
        return None

    def _levels(self) -> list[tuple[int, list[tuple[str, Rank]]]]:
        found: dict[int, list[tuple[str, Rank]]] = {}
        for uid in sorted(self._round.left | self._round.there.keys()):
            rank = self._rank(uid)
            if rank is not None:
                found.setdefault(rank.level, []).append((uid, rank))
        return sorted(found.items(), reverse=True)

    def _left_s(self, uid: str, rank: Rank, open_s: float, now_s: float) -> float:
        there = self._round.there.get(uid)
        return rank.wait_s - open_s if there is None else rank.delay_s - (now_s - there)

    def _turn(self, due: list[tuple[str, float]], mine: Rank) -> Turn:
        # Rather one that has not got there yet than one whose delay has not passed.
        first = min((each for each, _ in due), key=lambda each: each in self._round.there)
        rank = self._rank(first)
        assert rank is not None
        ranks = (self._rank(each) for each in self._round.left)
        before = sum(each is not None and each.level > mine.level for each in ranks)
        return Turn(
            rank=rank,
            others=len(due) - 1,
            delayed=first in self._round.there,
            position=before + 1,
            retry_s=max(left_s for _, left_s in due) + 0.01,
        )

    def _let_go(self, uid: str) -> None:
        self._round.waiting.discard(uid)
        for waiting in sorted(self._round.waiting):
            self._wake(waiting)
