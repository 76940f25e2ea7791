"""How many deaths of its workers a VM is kept through, and what is remembered of them."""

from __future__ import annotations

from chv.stord.records import Backend, BackendPhase
from chv.stord.restarts import DEATHS_MAX, TOGETHER_S, WINDOW_S, Deaths, begun, finished

DAEMON, PROXY = "storage daemon", "proxy"


def test_one_death_more_than_allowed_within_the_window_is_too_many() -> None:
    deaths = Deaths()
    told = [deaths.note("vm", DAEMON, float(index)) for index in range(DEATHS_MAX + 2)]
    assert told == [True] * DEATHS_MAX + [False, False]


def test_deaths_out_of_the_window_and_of_other_vms_do_not_count() -> None:
    deaths = Deaths()
    for index in range(DEATHS_MAX * 3):
        assert deaths.note("vm", DAEMON, index * WINDOW_S / DEATHS_MAX)
        assert deaths.note(f"vm{index}", DAEMON, 0.0)


def test_a_proxy_and_its_storage_daemon_that_die_together_count_once() -> None:
    deaths = Deaths()
    for index in range(DEATHS_MAX):
        assert deaths.note("vm", PROXY, index * 10.0)
        assert deaths.note("vm", DAEMON, index * 10.0 + TOGETHER_S / 2)
    assert not deaths.note("vm", DAEMON, DEATHS_MAX * 10.0)


def test_both_dying_over_and_over_within_moments_are_too_many_all_the_same() -> None:
    deaths = Deaths()
    told = [deaths.note("vm", who, index * 0.1) for index in range(20) for who in (DAEMON, PROXY)]
    assert not told[-1]


def test_a_vm_that_was_reset_starts_anew() -> None:
    deaths = Deaths()
    for index in range(DEATHS_MAX + 1):
        deaths.note("vm", DAEMON, float(index))
    deaths.forget("vm")
    assert deaths.note("vm", DAEMON, 9.0)


def test_a_restart_is_counted_and_told_as_what_it_was() -> None:
    row = Backend(vm_id="vm", storage_uid=1, vm_gid=1, boot_id="b", phase=BackendPhase.SERVING)
    under_way = begun(row, "T1")
    assert (under_way.phase, under_way.losses) == (BackendPhase.RESTARTING, 1)
    done = finished(under_way, "T2")
    assert (done.phase, done.losses) == (BackendPhase.SERVING, 1)
    assert done.last_loss == (
        "T1: the storage daemon ended; restarted under the VM, served again T2"
    )
    assert finished(done, "T3") == done
