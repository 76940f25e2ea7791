"""What becomes of sightings: a leak is certain after two looks, and only then."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chv.agent.leaks import KINDS, LeakBook, Look, leak_id, unexplained
from chv.common.wire.types import CensusItem

SETTLE_S = 10.0
ALL = frozenset({"agent", "stord", "nwd"})


def stray(
    name: str = "x", kind: str = "file", identity: str = "inode 1", owner: str = ""
) -> CensusItem:
    return CensusItem(kind=kind, name=name, identity=identity, owner=owner, known=False)


def look(*items: CensusItem, source: str = "stord", read: frozenset[str] = ALL) -> Look:
    unread = dict.fromkeys(ALL - read, "it hangs")
    return Look(tuple((source, item) for item in items), read, unread)


def names(book: LeakBook) -> list[str]:
    return [each.item.name for each in book.leaks()]


def test_one_look_makes_no_leak_and_two_that_are_apart_do() -> None:
    book = LeakBook(SETTLE_S)
    book.note(look(stray()), (), 0.0, "t0")
    assert names(book) == []
    assert book.watching == 1
    book.note(look(stray()), (), SETTLE_S - 1, "t1")
    assert names(book) == []
    book.note(look(stray()), (), SETTLE_S, "t2")
    assert names(book) == ["x"]
    assert book.watching == 0
    assert book.leaks()[0].since == "t0"


def test_another_thing_under_the_same_name_begins_anew() -> None:
    book = LeakBook(SETTLE_S)
    book.note(look(stray(identity="inode 1")), (), 0.0, "t0")
    book.note(look(stray(identity="inode 2")), (), 20.0, "t1")
    assert names(book) == []
    book.note(look(stray(identity="inode 2")), (), 40.0, "t2")
    (leak,) = book.leaks()
    assert leak.since == "t1"
    assert leak.id == leak_id("stord", stray(identity="inode 2"))


def test_what_has_an_operation_under_way_is_no_leak() -> None:
    book = LeakBook(SETTLE_S)
    for at_s in (0.0, 20.0, 40.0):
        book.note(look(stray(owner="vm")), {"vm"}, at_s, "t")
    assert (names(book), book.watching) == ([], 0)
    book.note(look(stray(owner="vm")), (), 60.0, "t")
    assert names(book) == []


def test_what_is_gone_or_explained_is_forgotten() -> None:
    book = LeakBook(SETTLE_S)
    for at_s in (0.0, 20.0):
        book.note(look(stray("a"), stray("b")), (), at_s, "t")
    assert names(book) == ["a", "b"]
    book.note(look(stray("a"), CensusItem(kind="file", name="a")), (), 40.0, "t")
    assert names(book) == []
    assert book.counts() == dict.fromkeys(KINDS, 0)


def test_a_source_that_does_not_answer_neither_forgets_nor_makes_leaks() -> None:
    book = LeakBook(SETTLE_S)
    book.note(look(stray("a")), (), 0.0, "t")
    book.note(look(stray("a"), stray("young")), (), 20.0, "t")
    silent = look(read=ALL - {"stord"})
    for at_s in (40.0, 60.0):
        book.note(silent, (), at_s, "t")
    assert names(book) == ["a"]
    assert book.unread == {"stord": "it hangs"}
    assert book.watching == 1


def test_what_one_daemon_does_not_know_may_be_anothers() -> None:
    socket = stray("/run/api.sock", kind="socket")
    known = CensusItem(kind="socket", name="/run/api.sock")
    assert unexplained([("stord", socket), ("agent", known)]) == []


def test_counts_have_every_kind() -> None:
    book = LeakBook(0.0)
    for at_s in (0.0, 1.0):
        book.note(look(stray("a"), stray("b"), stray("t", kind="nft")), (), at_s, "t")
    assert book.counts() == dict.fromkeys(KINDS, 0) | {"file": 2, "nft": 1}
    (table,) = (each for each in book.leaks() if each.item.kind == "nft")
    book.forget(table.id)
    assert book.counts() == dict.fromkeys(KINDS, 0) | {"file": 2}


ITEMS = st.lists(
    st.builds(
        stray,
        name=st.sampled_from("ab"),
        kind=st.sampled_from(KINDS),
        identity=st.sampled_from(("1", "2")),
        owner=st.sampled_from(("", "vm")),
    ),
    max_size=4,
)
LOOKS = st.lists(
    st.tuples(ITEMS, st.booleans(), st.booleans(), st.integers(min_value=0, max_value=15)),
    max_size=8,
)


@given(LOOKS)
def test_every_leak_was_seen_in_each_look_for_as_long_as_it_takes(
    looks: list[tuple[list[CensusItem], bool, bool, int]],
) -> None:
    """An independent account: walk back from the last look that could be read."""
    book, now_s = LeakBook(SETTLE_S), 0.0
    read: list[tuple[float, set[str]]] = []
    for items, is_busy, answers, wait_s in looks:
        now_s += wait_s
        busy = {"vm"} if is_busy else set()
        given = look(*items, read=ALL if answers else ALL - {"stord"})
        book.note(given, busy, now_s, str(now_s))
        if answers:
            seen = {leak_id("stord", each) for each in items if each.owner not in busy}
            read.append((now_s, seen))
        for leak in book.leaks():
            assert _stood_s(leak.id, read) >= SETTLE_S


def _stood_s(key: str, read: list[tuple[float, set[str]]]) -> float:
    """How long it was seen without a gap, up to the last look that its source answered."""
    last_s = first_s = read[-1][0]
    for at_s, seen in reversed(read):
        if key not in seen:
            break
        first_s = at_s
    return last_s - first_s


@pytest.mark.parametrize("field", ["kind", "name", "identity"])
def test_ids_tell_things_apart(field: str) -> None:
    first = leak_id("stord", stray())
    other = {"kind": "socket", "name": "y", "identity": "inode 2"}
    assert leak_id("stord", stray(**{field: other[field]})) != first
    assert leak_id("nwd", stray()) != first
    assert leak_id("stord", stray()) == first
