"""Who has what in a network is what the NICs of it say, whatever came and went."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chv.common.ids import Ids
from chv.nwd.kept import ROUND_S, Followed, Kept, Recent
from chv.nwd.members import Members
from chv.nwd.records import Nic

IDS = Ids()
VM = IDS.uid()


def nic(number: int, nic_id: str = "", name: str = "one", **more: Any) -> Nic:
    return Nic(
        nic_id=nic_id or IDS.uid(),
        network_id="n",
        vm_id=VM,
        generation=1,
        hostname=name,
        mac=f"02:00:00:00:00:{number:02x}",
        address=f"10.0.0.{number}",
        address6=f"fd00::{number:x}" if number % 2 else "",
        owner_uid=1,
        guest_ports=[],
        boot_id="b",
        **more,
    )


def test_members_of_groups_are_counted_and_the_tuple_of_all_stays_the_same_until_a_change() -> None:
    members = Members()
    first, second = nic(1, groups=["a", "b", "a"]), nic(2, groups=["a"], unswept=True)
    members.put(first)
    members.put(second)
    assert members.groups == {"a": 2, "b": 1}
    assert members.unswept == {second.nic_id}
    both = members.all
    assert both == (first, second)
    assert members.all is both
    members.put(msgspec.structs.replace(second, groups=["b"], unswept=False))
    assert members.groups == {"a": 1, "b": 2}
    assert not members.unswept
    assert members.all is not both
    members.drop(first.nic_id)
    assert members.groups == {"b": 1}


CHANGES = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.sampled_from("ab")), max_size=40)


@given(CHANGES)
def test_the_index_is_that_of_the_nics_that_are_there(
    changes: list[tuple[int, bool, str]],
) -> None:
    ids = [IDS.uid() for _ in range(6)]
    members, model = Members(), dict[str, Nic]()
    for number, (which, stays, name) in enumerate(changes, 1):
        if stays:  # a new row in the place of the old one, with other addresses
            row = nic(number, ids[which], name)
            members.put(row)
            model[row.nic_id] = row
        else:
            members.drop(ids[which])
            model.pop(ids[which], None)
    assert members.nics == model
    assert members.owners == {text: row.nic_id for row in model.values() for text in row.addresses}
    assert members.macs == {row.mac: row.nic_id for row in model.values()}
    for name in "ab":
        same = {row.nic_id for row in model.values() if row.hostname == name}
        assert {row.nic_id for row in members.named(name)} == same
    for uid in ids:
        assert members.with_tap_of(uid) == (uid if uid in model else None)


def test_a_tap_of_the_same_name_is_found() -> None:
    members = Members()
    row = nic(1, "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee")
    members.put(row)
    assert members.with_tap_of("aaaaaaaa-bbbb-4ccc-8ddd-000000000000") == row.nic_id


def test_what_is_kept_is_made_anew_when_a_source_changes() -> None:
    made: list[Nic] = []

    def make(row: Nic) -> str:
        made.append(row)
        return row.hostname

    kept: Kept[str] = Kept()
    first = nic(1)
    other = msgspec.structs.replace(first, hostname="two")
    assert [kept.get("a", (first,), make), kept.get("b", (other,), make)] == ["one", "two"]
    assert [kept.get("a", (first,), make), kept.get("b", (other,), make)] == ["one", "two"]
    assert made == [first, other], "the second time nothing is made"
    assert kept.get("a", (other,), make) == "two"
    assert kept.get("a", (first,), make) == "one"


def test_what_nobody_asks_for_is_forgotten_and_what_is_asked_for_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr("chv.nwd.kept.time.monotonic", lambda: now_s)
    recent: Recent[str, int] = Recent()
    recent.put("stays", 1)
    for number in range(1000):
        now_s += ROUND_S / 10
        recent.put(f"goes {number}", number)
        assert recent.get("stays") == 1
    assert len(recent) <= 2 * 11 + 2
    assert recent.get("goes 0") is None


def test_what_is_followed_tells_what_went_and_what_came_in_order() -> None:
    followed: Followed[Nic] = Followed()
    rows = [nic(number) for number in range(1, 6)]
    assert followed.follow(rows[:4]) == ([], [id(row) for row in rows[:4]])
    assert followed.follow(rows[:4]) == ([], [])
    went, came = followed.follow(rows[1:])
    assert (went, came) == ([id(rows[0])], [id(rows[4])])
    assert list(followed.sources.values()) == rows[1:]
    alike = msgspec.structs.replace(rows[1])
    went, came = followed.follow([alike])
    assert set(went) == {id(row) for row in rows[1:]}, "one of the same content is another one"
    assert came == [id(alike)]
