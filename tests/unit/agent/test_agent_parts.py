"""The small parts of the agent: consequences of an end, shared lists, the start queue, watches."""

from __future__ import annotations

import gc

import anyio
import pytest

from chv.agent.conditions import condition, holds, merge
from chv.agent.listing import Listing
from chv.agent.records import Ending, EndKind, VmFacts
from chv.agent.starts import StartQueue
from chv.agent.vm.crashes import ASKED_FOR
from chv.agent.vm.exits import Consequence, Follow, consequence, describe, facts_after
from chv.agent.watch import Watch
from chv.common.errors import Unavailable
from chv.common.wire.resources import RunStrategy
from tests.sim.virtual import simulated

CRASHES = (
    EndKind.CRASH,
    EndKind.PANIC,
    EndKind.START_TIMEOUT,
    EndKind.SPAWN_FAILED,
    EndKind.STORAGE_LOST,
)


@pytest.mark.parametrize("kind", [EndKind.STOP, EndKind.RESTART, EndKind.DELETE])
@pytest.mark.parametrize("strategy", list(RunStrategy))
def test_what_was_asked_for_has_no_consequence(kind: EndKind, strategy: RunStrategy) -> None:
    assert consequence(kind, strategy, 99, 3) == Consequence(Follow.AS_WANTED)


@pytest.mark.parametrize(
    ("strategy", "follow"),
    [
        (RunStrategy.ALWAYS, Follow.RESTART),
        (RunStrategy.RERUN_ON_FAILURE, Follow.HALT),
        (RunStrategy.MANUAL, Follow.HALT),
        (RunStrategy.HALTED, Follow.AS_WANTED),
    ],
)
def test_the_guests_own_power_off(strategy: RunStrategy, follow: Follow) -> None:
    assert consequence(EndKind.GUEST_SHUTDOWN, strategy, 1, 3).follow is follow


@pytest.mark.parametrize("kind", CRASHES)
def test_a_crash_is_restarted_ever_slower_and_then_given_up(kind: EndKind) -> None:
    for strategy in (RunStrategy.ALWAYS, RunStrategy.RERUN_ON_FAILURE):
        delays = [consequence(kind, strategy, n, 20).delay_s for n in range(1, 12)]
        assert delays[0] == 0
        assert delays == sorted(delays)
        assert max(delays) == 60
        assert consequence(kind, strategy, 21, 20).follow is Follow.GIVE_UP
    assert consequence(kind, RunStrategy.MANUAL, 1, 3).follow is Follow.REST


R, A, H, M = (
    RunStrategy.RERUN_ON_FAILURE,
    RunStrategy.ALWAYS,
    RunStrategy.HALTED,
    RunStrategy.MANUAL,
)
AS_CRASHED = {A: Follow.RESTART, R: Follow.RESTART, M: Follow.REST, H: Follow.AS_WANTED}
TABLE = {
    **{kind: dict.fromkeys((A, R, M, H), Follow.AS_WANTED) for kind in ASKED_FOR},
    **dict.fromkeys(CRASHES, AS_CRASHED),
    EndKind.GUEST_SHUTDOWN: {
        A: Follow.RESTART,
        R: Follow.HALT,
        M: Follow.HALT,
        H: Follow.AS_WANTED,
    },
    EndKind.HOST_REBOOT: AS_CRASHED,
    EndKind.RESTORE_FAILED: {
        A: Follow.GIVE_UP,
        R: Follow.GIVE_UP,
        M: Follow.GIVE_UP,
        H: Follow.AS_WANTED,
    },
}


def test_the_table_of_ends_and_run_strategies_is_complete() -> None:
    assert set(TABLE) == set(EndKind)
    seen = {
        kind: {strategy: consequence(kind, strategy, 1, 3).follow for strategy in RunStrategy}
        for kind in EndKind
    }
    assert seen == TABLE


def test_a_boot_of_the_host_is_no_crash_that_counts() -> None:
    for strategy in (A, R):
        assert consequence(EndKind.HOST_REBOOT, strategy, 99, 3) == Consequence(Follow.RESTART)


def test_facts_after_an_end_hold_no_fulfilled_request() -> None:
    facts = VmFacts(
        slot=0,
        replace_worker="w",
        reset_request="op",
        storage_request="op",
        force_stop=True,
        started=True,
    )
    ending = Ending(kind=EndKind.RESTART, rung="term")
    after = facts_after(facts, ending, Consequence(Follow.AS_WANTED), (), "now")
    assert (after.replace_worker, after.reset_request, after.force_stop) == ("", "", False)
    assert after.storage_request == ""
    assert after.started
    assert after.restarts == 0  # somebody asked for it
    assert after.last_stop == "now stopped for a restart by term"


def test_every_kind_of_end_has_words() -> None:
    assert len({describe(Ending(kind=kind), "now") for kind in EndKind}) == len(EndKind)


@pytest.mark.parametrize(
    ("kind", "rung", "told"),
    [
        (EndKind.STOP, "acpi", "stopped by acpi"),
        (EndKind.GUEST_SHUTDOWN, "quit", "GuestShutdown: the guest powered off"),
        (
            EndKind.PANIC,
            "kill",
            "GuestPanicked: the guest's kernel panicked; its VMM was ended by kill",
        ),
        (EndKind.CRASH, "", "Crash: the VMM ended by itself"),
    ],
)
def test_the_rung_is_told_as_what_it_did(kind: EndKind, rung: str, told: str) -> None:
    assert describe(Ending(kind=kind, rung=rung), "now") == f"now {told}"


def test_a_condition_keeps_its_moment_until_its_status_changes() -> None:
    first = merge([], [condition("Ready", True, "Up")], 1, "t1")
    same = merge(first, [condition("Ready", True, "Still")], 2, "t2")
    assert (same[0].last_transition_time, same[0].last_probe_time) == ("t1", "t2")
    changed = merge(same, [condition("Ready", None, "Silent")], 2, "t3")
    assert changed[0].last_transition_time == "t3"
    assert holds(changed, "Ready", "Unknown")


def test_the_start_queue_is_first_come_first_served() -> None:
    woken: list[str] = []
    queue = StartQueue(2, woken.append)
    assert [queue.enter(name) for name in "abcd"] == [0, 0, 1, 2]
    assert queue.enter("c") == 1
    assert queue.waiting == 2
    queue.leave("a")
    assert woken == ["c", "d"]
    assert [queue.enter("c"), queue.enter("d")] == [0, 1]
    queue.leave("nobody")


@simulated
async def test_those_who_ask_while_a_list_is_fetched_share_the_next_one() -> None:
    fetched = 0
    seen: list[int] = []

    async def fetch() -> int:
        nonlocal fetched
        fetched += 1
        number = fetched
        await anyio.sleep(1)
        return number

    listing = Listing(fetch)

    async def ask() -> None:
        seen.append(await listing.fresh())

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await anyio.sleep(0.5)
        for _ in range(20):  # the call under way may not know what these have done
            group.start_soon(ask)
    assert fetched == 2
    assert sorted(seen) == [1] + [2] * 20


@simulated
async def test_a_failed_list_fails_for_all_who_shared_it_and_is_tried_anew() -> None:
    calls = 0

    async def fetch() -> int:
        nonlocal calls
        calls += 1
        await anyio.sleep(1)
        if calls == 1:
            raise Unavailable("down")
        return 7

    listing = Listing(fetch)
    with pytest.raises(Unavailable, match="down"):
        await listing.fresh()
    assert await listing.fresh() == 7


@simulated
async def test_who_leaves_while_fetching_does_not_keep_the_others_waiting() -> None:
    async def fetch() -> int:
        await anyio.sleep(5)
        return 1

    listing = Listing(fetch)

    async def wait_for_it() -> None:
        with pytest.raises(Unavailable, match="given up"):
            await listing.fresh()

    async with anyio.create_task_group() as group:
        blocker = anyio.CancelScope()

        async def lead() -> None:
            with blocker:
                await listing.fresh()

        async def first() -> None:
            assert await listing.fresh() == 1

        group.start_soon(first)
        await anyio.sleep(0.1)
        group.start_soon(lead)
        await anyio.sleep(0.1)
        group.start_soon(wait_for_it)
        await anyio.sleep(0.1)
        blocker.cancel()
    assert await listing.fresh() == 1


@simulated
async def test_a_watch_wakes_those_who_wait_and_only_them() -> None:
    watch = Watch()
    mine, other = watch.event("mine"), watch.event("other")
    watch.notify("mine")
    assert mine.is_set()
    assert not other.is_set()
    assert not watch.event("mine").is_set()
    watch.notify_all()
    assert other.is_set()


@simulated
async def test_nothing_is_left_of_who_has_ceased_to_wait() -> None:
    watch = Watch()
    for number in range(100):
        with anyio.move_on_after(0.1):
            await watch.event(f"object {number}").wait()
    gc.collect()
    assert len(list(watch._events)) <= 1


def test_those_for_whom_a_person_waits_keep_their_order_before_the_others() -> None:
    queue = StartQueue(1, lambda uid: None)
    assert queue.enter("runs") == 0
    assert queue.enter("boot") == 1
    assert [queue.enter(each, first=True) for each in ("a", "b")] == [1, 2]
    assert queue.enter("boot", first=True) == 3
    assert [queue.enter(each, first=True) for each in ("b", "a", "boot")] == [2, 1, 3]
    queue.leave("runs")
    assert [queue.enter(each, first=True) for each in ("a", "b")] == [0, 1]
