"""`fit` says how many go in, what binds, and what would be needed; more room never means fewer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chv.agent.resources.fit import Room, Wish, fit

NAMES = ("memory", "vcpus", "disk /a", "disk /b")
NEEDS = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 50), max_size=4)
LEFT = st.dictionaries(st.sampled_from(NAMES), st.integers(-10, 500), max_size=4)
WISHES = st.lists(st.builds(Wish, st.integers(1, 30), NEEDS), min_size=1, max_size=4)


def total(wish: Wish, resource: str) -> int:
    return wish.needs.get(resource, 0)


@given(WISHES, LEFT)
def test_what_fits_is_never_more_than_there_is(wishes: list[Wish], left: dict[str, int]) -> None:
    results = fit(wishes, Room(left))
    for resource, there in left.items():
        taken = sum(
            total(wish, resource) * result.fits
            for wish, result in zip(wishes, results, strict=True)
        )
        assert taken <= max(0, there)
    assert all(0 <= result.fits <= result.asked for result in results)


@given(WISHES, LEFT)
def test_one_more_would_not_have_fitted(wishes: list[Wish], left: dict[str, int]) -> None:
    rest = dict(left)
    for wish, result in zip(wishes, fit(wishes, Room(left)), strict=True):
        if result.fits < result.asked:
            need = total(wish, result.binds)
            assert need * (result.fits + 1) > max(0, rest[result.binds])
            assert result.lacking[result.binds] > 0
        for resource in rest:
            rest[resource] -= total(wish, resource) * result.fits


@given(st.builds(Wish, st.integers(1, 30), NEEDS), LEFT, LEFT)
def test_more_room_never_means_fewer(
    wish: Wish, left: dict[str, int], more: dict[str, int]
) -> None:
    grown = {name: size + max(0, more.get(name, 0)) for name, size in left.items()}
    assert fit([wish], Room(grown))[0].fits >= fit([wish], Room(left))[0].fits


@given(st.integers(1, 30), NEEDS, NEEDS, LEFT)
def test_larger_vms_never_fit_more_often(
    count: int, needs: dict[str, int], more: dict[str, int], left: dict[str, int]
) -> None:
    larger = {name: needs.get(name, 0) + more.get(name, 0) for name in needs | more}
    small = fit([Wish(count, needs)], Room(left))[0]
    large = fit([Wish(count, larger)], Room(left))[0]
    assert large.fits <= small.fits


@given(WISHES, LEFT)
def test_with_what_is_lacking_all_of_a_kind_fit(wishes: list[Wish], left: dict[str, int]) -> None:
    wish = wishes[0]
    lacking = fit([wish], Room(left))[0].lacking
    enough = {name: max(0, size) + lacking.get(name, 0) for name, size in left.items()}
    result = fit([wish], Room(enough))[0]
    assert (result.fits, result.lacking) == (wish.count, {})


def test_the_first_to_run_out_binds_also_where_all_fit() -> None:
    room = Room({"memory": 100, "vcpus": 30})
    (result,) = fit([Wish(3, {"memory": 20, "vcpus": 4})], room)
    assert (result.fits, result.binds, result.lacking) == (3, "memory", {})
    assert [(need.resource, need.fits) for need in result.needs] == [("memory", 5), ("vcpus", 7)]


def test_what_has_no_limit_does_not_bind() -> None:
    (result,) = fit([Wish(1000, {"vcpus": 64})], Room({}))
    assert (result.fits, result.binds, result.needs) == (1000, "", [])
