"""The probe's command line: what is asked, as its words."""

from __future__ import annotations

import pytest

from chv.common.errors import InvalidArgument
from chv.probe.image import CpuPlan, DiskPlan, NetCheck, NicPlan, ProbeCommand


def test_nothing_asked_is_an_empty_line() -> None:
    assert ProbeCommand().render() == ""


def test_everything_has_its_word() -> None:
    command = ProbeCommand(
        cpu=CpuPlan(skip=("int3", "clac")),
        disks=(
            DiskPlan(kind="check", sectors=8, seed=7),
            DiskPlan(kind="writer", disk="vol-a", depth=32, every=10, window=1024, from_seq=5),
        ),
        nics=(
            NicPlan(
                nic="52:54:00:12:34:56",
                lease_ms=4000,
                timeout_ms=1500,
                checks=(
                    NetCheck(kind="ping", target="router"),
                    NetCheck(kind="tcp", target="10.0.0.1", port=81, must_fail=True),
                    NetCheck(kind="dns", target="web.probe.test"),
                ),
            ),
        ),
        end="off",
        end_after_ms=100,
        beat_ms=0,
        button="stay",
    )
    assert command.words() == [
        "cpu=all,-int3,-clac",
        "disk=check,sectors=8,seed=7",
        "disk.vol-a=writer,depth=32,every=10,window=1024,from=5",
        "net.52:54:00:12:34:56=lease=4000,timeout=1500,ping:router,!tcp:10.0.0.1:81,"
        "dns:web.probe.test",
        "end=off", "end.after=100", "beat=0", "button=stay",
    ]  # fmt: skip


def test_a_nic_without_checks_still_asks_for_a_lease() -> None:
    assert NicPlan().word() == "net=dhcp"
    assert NicPlan(nic="1", off=True).word() == "net.1=off"


def test_a_fixed_address_replaces_the_lease() -> None:
    plan = NicPlan(address="10.0.0.9/24", router="10.0.0.1", dns="10.0.0.1")
    assert plan.word() == "net=address=10.0.0.9/24,router=10.0.0.1,dns=10.0.0.1"


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        (DiskPlan(kind="check", disk="a b"), "disk"),
        (DiskPlan(kind="writer", depth=33), "disk.depth"),
        (DiskPlan(kind="check", sectors=-1), "disk.sectors"),
        (NicPlan(checks=(NetCheck(kind="ping", target="ten"),)), "net.target"),
        (NicPlan(checks=(NetCheck(kind="tcp", target="10.0.0.1"),)), "net.port"),
        (NicPlan(checks=(NetCheck(kind="ping", target="10.0.0.1", port=3),)), "net.port"),
        (NicPlan(checks=(NetCheck(kind="udp", target="10.0.0.1", port=0),)), "net.port"),
        (NicPlan(checks=(NetCheck(kind="dns", target="a,b"),)), "net.target"),
        (NicPlan(address="10.0.0.9"), "net.address"),
        (CpuPlan(only=("POPCNT",)), "cpu.only"),
        (CpuPlan(only=("popcnt",), skip=("int3",)), "cpu.skip"),
    ],
)
def test_what_the_guest_cannot_read_is_refused(
    plan: DiskPlan | NicPlan | CpuPlan, field: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        plan.word()
    assert refused.value.field == field


def test_more_checks_than_the_guest_keeps_are_refused() -> None:
    many = tuple(NetCheck(kind="tcp", target="10.0.0.100", port=9999) for _ in range(30))
    with pytest.raises(InvalidArgument, match="characters of checks"):
        NicPlan(checks=many).word()


def test_a_line_longer_than_the_guest_reads_is_refused() -> None:
    plans = tuple(DiskPlan(kind="check", disk=str(i), sectors=8, seed=2**60) for i in range(80))
    with pytest.raises(InvalidArgument, match="characters"):
        ProbeCommand(disks=plans).render()
