"""The probe guest on a cable: lease, names, targets that are there and targets that are not."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio.to_thread
import pytest

from chv.probe.device_events import Check, Lease, LeaseLate, Nic
from chv.probe.events import Done
from chv.probe.image import NetCheck, NicPlan, ProbeCommand
from tests import probe_network
from tests import probe_rig as rig

pytestmark = pytest.mark.root

NET = "10.99.0"
MAC = "52:54:00:12:34:56"
HOST = NetCheck(kind="ping", target=f"{NET}.1")


Boot = Callable[[ProbeCommand], Awaitable[rig.Machine]]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def cable(stack: ExitStack, tmp_path: Path) -> int:
    """A tap in a namespace of its own with dnsmasq and servers behind it; the VMM's end."""
    if os.geteuid() != 0:
        pytest.skip("needs root: a network namespace")
    return stack.enter_context(probe_network.opened(tmp_path, NET))


def checks(*more: NetCheck) -> ProbeCommand:
    return ProbeCommand(nics=(NicPlan(timeout_ms=1500, checks=more),))


async def test_a_nic_gets_a_lease_and_reaches_what_is_there(
    on_cable: Boot,
) -> None:
    machine = await on_cable(
        checks(
            NetCheck(kind="ping", target="router"),
            NetCheck(kind="tcp", target=f"{NET}.1", port=53),
            NetCheck(kind="echo", target=f"{NET}.1", port=7),
            NetCheck(kind="udp", target=f"{NET}.1", port=7),
            NetCheck(kind="dns", target="web.probe.test"),
        )
    )
    assert (await machine.serial.wait(Nic)).mac == MAC
    lease = await machine.serial.wait(Lease)
    assert (lease.router, lease.domain, lease.mtu) == (f"{NET}.1", "probe.test", 1400)
    await machine.serial.wait(Done)
    results = {check.kind: check.result for check in machine.serial.all(Check)}
    assert results == {"ping": "ok", "tcp": "open", "echo": "echo", "udp": "echo", "dns": "ok"}
    name = next(check for check in machine.serial.all(Check) if check.kind == "dns")
    assert name.addr == f"{NET}.7"
    answered = await anyio.to_thread.run_sync(probe_network.ping, lease.addr)
    assert answered


async def test_what_is_not_there_is_told_apart(
    on_cable: Boot,
) -> None:
    machine = await on_cable(
        checks(
            NetCheck(kind="tcp", target=f"{NET}.1", port=81),
            NetCheck(kind="udp", target=f"{NET}.1", port=9, must_fail=True),
            NetCheck(kind="dns", target="nope.probe.test"),
            NetCheck(kind="tcp", target=f"{NET}.200", port=80, must_fail=True),
        )
    )
    done = await machine.serial.wait(Done)
    seen = [(check.result, check.ok) for check in machine.serial.all(Check)]
    assert seen == [
        ("refused", False), ("refused", True), ("nxdomain", False), ("no-arp", True),
    ]  # fmt: skip
    assert (done.passed, done.failed) == (2, 2)


async def test_a_check_can_be_asked_for_later(
    on_cable: Boot,
) -> None:
    machine = await on_cable(ProbeCommand())
    await machine.serial.wait(Lease)
    machine.serial.type(NicPlan(nic=MAC, checks=(HOST,)).word())
    assert (await machine.serial.wait(Check)).ok


async def test_without_dhcp_a_lease_is_late_and_checks_fail(
    on_cable: Boot,
) -> None:
    probe_network.silence_dhcp()
    command = ProbeCommand(nics=(NicPlan(lease_ms=500, checks=(HOST,)),))
    machine = await on_cable(command)
    assert (await machine.serial.wait(LeaseLate)).waited_us >= 500_000
    assert (await machine.serial.wait(Check)).result == "no-lease"


async def test_a_fixed_address_needs_no_dhcp(
    on_cable: Boot,
) -> None:
    probe_network.silence_dhcp()
    plan = NicPlan(address=f"{NET}.20/24", checks=(HOST,))
    machine = await on_cable(ProbeCommand(nics=(plan,)))
    assert (await machine.serial.wait(Check)).ok
    assert machine.serial.all(Lease) == []


@pytest.fixture(params=["qemu", "cloud-hypervisor"])
def on_cable(request: pytest.FixtureRequest, stack: ExitStack, tmp_path: Path, cable: int) -> Boot:
    """Boots the probe with one NIC on the cable."""

    async def on_qemu(command: ProbeCommand) -> rig.Machine:
        return await rig.qemu(
            stack, tmp_path, command, "-netdev", f"tap,id=n,fd={cable},vhost=off", "-device",
            f"virtio-net-pci,netdev=n,mac={MAC},romfile=,bus=port3", fds=[cable],
        )  # fmt: skip

    async def on_cloud_hypervisor(command: ProbeCommand) -> rig.Machine:
        return await rig.cloud_hypervisor(
            stack, tmp_path, command, nic={"mac": MAC, "id": "n0", "num_queues": 2}, tap=cable
        )

    return on_qemu if request.param == "qemu" else on_cloud_hypervisor
