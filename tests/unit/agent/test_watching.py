"""What is seen of packets, by names: who is asked, what is refused, what a follower gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chv.agent.links import DaemonLink
from chv.agent.network.directory import Directory, NamedNic
from chv.agent.network.watching import Watching
from chv.common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from chv.common.rpc import Method
from chv.common.wire import agent_watch as api
from chv.common.wire import nwd_policy as nwd
from chv.common.wire.types import Done

LAN, WAN = "6f1b2c3d-0000-4000-8000-000000000001", "6f1b2c3d-0000-4000-8000-000000000002"
GROUP = "01234567-0000-4000-8000-000000000003"


def uid(number: int) -> str:
    return f"6f1b2c3d-0000-4000-8000-{number:012d}"


def nic(number: int, vm: str, interface: str, network: str, *addresses: str) -> NamedNic:
    network_id = LAN if network == "lan" else WAN
    return NamedNic(uid(number), "default", vm, interface, network, network_id, addresses)


NICS = [
    nic(10, "web", "eth0", "lan", "10.7.0.2", "fd07::2"),
    nic(11, "web", "eth1", "wan", "10.8.0.2"),
    nic(12, "db", "eth0", "wan", "10.8.0.3"),
    nic(13, "db", "eth1", "lan", "10.7.0.3"),
    nic(14, "new", "eth0", "lan"),
]
DIRECTORY = Directory(
    nics=NICS,
    networks={("default", "lan"): LAN, ("default", "wan"): WAN},
    groups={GROUP: "front"},
    rules={GROUP: ["ingress[0]", "egress[0]"]},
    vms=frozenset({("default", "web"), ("default", "db"), ("default", "new"), ("default", "x")}),
)


class Nwd(DaemonLink):
    """Answers from a list per method, and remembers what it was asked."""

    def __init__(self, **answers: Any) -> None:
        super().__init__("nwd")
        self.answers = answers
        self.asked: list[Any] = []

    async def call(self, method: Method[Any, Any], params: Any) -> Any:
        self.asked.append(params)
        answer = self.answers[method.name].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def call_fds(self, method: Method[Any, Any], params: Any) -> Any:
        return await self.call(method, params), [7]


def watching(link: Nwd) -> Watching:
    return Watching(link, lambda _: DIRECTORY)


def caller(peer_uid: int = 0) -> Any:
    emitted: list[Any] = []

    async def emit(event: Any) -> None:
        emitted.append(event)

    return SimpleNamespace(peer_uid=peer_uid, emit=emit, emitted=emitted)


PATH = nwd.PathReply(verdict="delivered", decided_by="because", steps=[])


@pytest.mark.parametrize(
    ("host", "destination", "says"),
    [
        ("1.1.1.1", "1.1.1.1", ""),
        ("FD07::0:2", "fd07::2", ""),
        ("db", "10.7.0.3", "VM db, interface eth1"),
        ("DB.", "10.7.0.3", "VM db, interface eth1"),
        ("shop.example", "192.0.2.9", "the DNS of network lan"),
        ("new", "192.0.2.9", "the DNS of network lan"),
    ],
)
async def test_a_host_is_an_address_a_vm_or_a_name(host: str, destination: str, says: str) -> None:
    link = Nwd(
        ExplainPath=[PATH], ResolveName=[nwd.ResolvedName(addresses=["192.0.2.9", "2001:db8::9"])]
    )
    request = api.ExplainVm(name="web", host=host, port=443)
    reply = await watching(link).explain(request)
    assert (reply.destination, reply.resolved) == (destination, says)
    asked = link.asked[-1]
    assert (asked.nic_id, asked.destination, asked.port) == (uid(10), destination, 443)


@pytest.mark.parametrize("host", ["a\x1b[2J", "a b", "-x", "a\n", "x" * 64, "a..b", "$(id)", "é"])
async def test_what_is_no_name_is_refused_before_anybody_is_asked(host: str) -> None:
    link = Nwd()
    with pytest.raises(InvalidArgument) as refusal:
        await watching(link).explain(api.ExplainVm(name="web", host=host, port=1))
    assert link.asked == []
    assert "\x1b" not in str(refusal.value)
    assert "\n" not in str(refusal.value)


async def test_a_port_is_needed_where_there_are_ports() -> None:
    with pytest.raises(InvalidArgument, match=r"1\.1\.1\.1:PORT, or --proto icmp"):
        await watching(Nwd()).explain(api.ExplainVm(name="web", host="1.1.1.1"))
    link = Nwd(ExplainPath=[PATH])
    await watching(link).explain(api.ExplainVm(name="web", host="1.1.1.1", protocol="icmp"))
    assert link.asked[0].protocol is nwd.IpProtocol.ICMP


@pytest.mark.parametrize(
    ("name", "interface", "error"),
    [("nobody", "", NotFound), ("web", "eth9", NotFound), ("x", "", FailedPrecondition)],
)
async def test_a_vm_or_interface_that_is_not_there_is_said(
    name: str, interface: str, error: type[Exception]
) -> None:
    request = api.ExplainVm(name=name, interface=interface, host="1.1.1.1", port=1)
    with pytest.raises(error):
        await watching(Nwd()).explain(request)


async def test_a_nic_that_is_not_attached_is_said_of_its_vm() -> None:
    link = Nwd(ExplainPath=[NotFound("there is no such NIC")], OpenCapture=[NotFound("none")])
    with pytest.raises(FailedPrecondition, match="interface eth0 of VM web is not attached"):
        await watching(link).explain(api.ExplainVm(name="web", host="1.1.1.1", port=1))
    with pytest.raises(FailedPrecondition, match="not attached"):
        await watching(link).open_capture(api.OpenVmCapture(name="web"), caller())
    link = Nwd(ExplainPath=[FailedPrecondition("nobody holds its tap", resource=uid(10))])
    with pytest.raises(FailedPrecondition, match="VirtualMachine default/web: nobody"):
        await watching(link).explain(api.ExplainVm(name="web", host="1.1.1.1", port=1))


async def test_a_vm_that_is_on_another_network_alone_is_said_to_be() -> None:
    request = api.ExplainVm(name="web", interface="eth0", host="far", port=1)
    far = Directory(
        nics=[*NICS, nic(15, "far", "eth0", "wan", "10.8.0.9")],
        networks=DIRECTORY.networks,
        groups={},
        rules={},
        vms=DIRECTORY.vms,
    )
    reply = await Watching(Nwd(ExplainPath=[PATH]), lambda _: far).explain(request)
    assert reply.resolved == "VM far, interface eth0 on network wan, which is another one"


async def test_a_capture_is_for_root_alone() -> None:
    link = Nwd(OpenCapture=[Done()])
    request = api.OpenVmCapture(name="web", interface="eth1")
    with pytest.raises(PermissionDenied, match="uid 1000"):
        await watching(link).open_capture(request, caller(1000))
    assert link.asked == []
    reply = await watching(link).open_capture(request, caller(0))
    assert (reply.result.network, list(reply.fds)) == ("wan", [7])
    assert link.asked[0].nic_id == uid(11)


async def test_statistics_are_of_those_that_were_asked_for() -> None:
    def answers() -> Nwd:
        return Nwd(
            GetNicStats=[
                nwd.NicStatsReply(nics=[nwd.NicStats(nic_id=each.nic_id) for each in NICS])
            ]
        )

    of_network = await watching(answers()).stats(api.GetNetStats(network="wan"))
    assert [(each.vm, each.interface) for each in of_network.nics] == [
        ("web", "eth1"),
        ("db", "eth0"),
    ]
    of_vm = await watching(answers()).stats(api.GetNetStats(vm="db"))
    assert [each.interface for each in of_vm.nics] == ["eth0", "eth1"]
    with pytest.raises(NotFound):
        await watching(answers()).stats(api.GetNetStats(network="none"))


async def test_nics_without_any_are_nobodys_question() -> None:
    empty = Directory([], {("default", "lan"): LAN}, {}, {}, frozenset())
    link = Nwd()
    found = await Watching(link, lambda _: empty).stats(api.GetNetStats(network="lan"))
    assert found.nics == []
    assert link.asked == [], "an empty list would mean all"


# --- logs
def entry(number: int, nic_id: str = uid(10)) -> nwd.LogEntry:
    return nwd.LogEntry(
        time=str(number), network_id=LAN, group_id=GROUP, rule=1, verdict="allowed", nic_id=nic_id
    )


def page(*numbers: int, after: int, lost: int = 0) -> nwd.NetworkLogReply:
    return nwd.NetworkLogReply(entries=[entry(each) for each in numbers], next=after, lost=lost)


async def test_the_end_of_a_log_comes_with_names() -> None:
    link = Nwd(GetNetworkLog=[page(1, 2, after=3)])
    context = caller()
    await watching(link).read_log(api.ReadNetworkLog(network="lan", vm="web", tail=5), context)
    (chunk,) = context.emitted
    assert [each.time for each in chunk.entries] == ["1", "2"]
    assert chunk.names == {GROUP: "front", uid(10): "web/eth0", f"{GROUP}:1": "egress[0]"}
    assert (link.asked[0].nic_id, link.asked[0].lines_max) == (uid(10), 5)


async def test_a_follower_goes_on_over_a_restart_and_counts_loss_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("chv.agent.network.watching.POLL_S", 0.001)
    link = Nwd(
        GetNetworkLog=[
            page(1, after=2, lost=4),
            Unavailable("away"),
            page(after=2, lost=4),
            page(2, 3, after=4, lost=9),
            page(4, after=5, lost=0),
        ]
    )
    context = caller()
    request = api.ReadNetworkLog(network="lan", tail=0, follow=True)
    with pytest.raises(IndexError):  # there are no more answers
        await watching(link).read_log(request, context)
    assert [[each.time for each in chunk.entries] for chunk in context.emitted] == [
        [],
        ["2", "3"],
        ["4"],
    ]
    assert [chunk.lost for chunk in context.emitted] == [4, 5, 0]
    assert [each.after for each in link.asked] == [0, 2, 2, 2, 4, 5]


async def test_a_vm_that_is_not_on_the_network_has_no_log_there() -> None:
    with pytest.raises(NotFound, match="has no interface on network lan"):
        await watching(Nwd()).read_log(
            api.ReadNetworkLog(network="lan", vm="web", interface="eth1"), caller()
        )
