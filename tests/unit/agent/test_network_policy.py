"""Security groups, exposures and interfaces in the agent: admission, what nwd is told, status."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from chv.common.errors import (
    ChvError,
    FailedPrecondition,
    InUse,
    InvalidArgument,
)
from chv.common.wire import agent as api
from chv.common.wire.nwd_policy import Direction, NetworkEvent
from tests.helpers import wait_until
from tests.sim.bench import (
    Bench,
    bare,
    everything,
    image,
    manifest,
    network,
    open_bench,
    vm,
    volume,
)
from tests.sim.virtual import simulated

NIC = {"name": "eth0", "network": "net"}


def group(name: str = "web", *peers: str, **spec: Any) -> dict[str, Any]:
    rule: dict[str, Any] = {"protocol": "TCP", "ports": ["80"], "securityGroups": list(peers)}
    if not peers:
        rule = {**rule, "cidrs": ["0.0.0.0/0"]}
    return manifest("SecurityGroup", name, {"ingress": [rule], **spec})


def exposure(name: str = "site", *vms: str, **spec: Any) -> dict[str, Any]:
    body = {
        "network": "net",
        "addresses": ["192.0.2.7"],
        "port": 80,
        "sources": ["0.0.0.0/0"],
        "targets": [{"virtualMachine": each} for each in vms or ("web",)],
    }
    return manifest("Exposure", name, {**body, **spec})


def member(name: str = "web", *groups: str, **interface: Any) -> dict[str, Any]:
    nic = {**NIC, "securityGroups": list(groups), **interface}
    return bare(name, interfaces=[nic])


async def refused(bench: Bench, error: type[ChvError], *objects: dict[str, Any]) -> ChvError:
    with pytest.raises(error) as caught:
        await bench.apply(*objects)
    return caught.value


def uid(bench: Bench, kind: str, name: str) -> str:
    return str(bench.get(kind, name).metadata.uid)


async def settled(bench: Bench, *objects: dict[str, Any]) -> None:
    """Apply, and wait until all operations have succeeded."""
    for result in (await bench.apply(*objects)).results:
        if result.operation_id:
            done = await bench.final(result.operation_id)
            assert done.state == "Succeeded", done


def ready(bench: Bench, name: str) -> str:
    """Return what a group's condition says."""
    return str(bench.get("SecurityGroup", name).status.conditions[0].message)


def metadata(bench: Bench) -> Any:
    """Return what nwd was last told to serve to the only NIC."""
    (nic,) = bench.machine.host.nwd.nics.values()
    return nic.metadata


# --- groups


@simulated
async def test_groups_that_name_each_other_come_and_go() -> None:
    async with open_bench() as bench:
        await settled(bench, group("web", "db", "web"), group("db", "web"))
        nwd = bench.machine.host.nwd
        web, db = uid(bench, "SecurityGroup", "web"), uid(bench, "SecurityGroup", "db")
        assert nwd.groups[web].group.rules[0].groups == [db, web]
        assert nwd.groups[web].group.rules[0].direction is Direction.INGRESS
        await bench.final((await bench.delete("SecurityGroup", "db")).id)
        await wait_until(lambda: nwd.groups[web].group.rules[0].groups == [web])
        await wait_until(lambda: "db" in ready(bench, "web"))
        await settled(bench, group("db", "web"))
        new = uid(bench, "SecurityGroup", "db")
        await wait_until(lambda: nwd.groups[web].group.rules[0].groups == [new, web])
        for name in ("web", "db"):
            await bench.final((await bench.delete("SecurityGroup", name)).id)
        assert nwd.groups == {}


@simulated
async def test_a_rule_whose_peers_are_gone_allows_nothing() -> None:
    async with open_bench() as bench:
        await settled(bench, group("web", "db"), group("db"))
        await bench.final((await bench.delete("SecurityGroup", "db")).id)
        nwd, web = bench.machine.host.nwd, uid(bench, "SecurityGroup", "web")
        await wait_until(lambda: nwd.groups[web].group.rules == [])


@simulated
async def test_an_unknown_group_is_refused_where_it_is_named() -> None:
    async with open_bench() as bench:
        await settled(bench, image(), network())
        error = await refused(bench, InvalidArgument, member("web", "nope"))
        assert error.field == "spec.interfaces[0].securityGroups[0]"
        error = await refused(bench, InvalidArgument, group("web", "nope"))
        assert error.field == "spec.ingress[0].securityGroups[0]"


@simulated
async def test_a_group_with_members_stays_and_goes_with_the_last() -> None:
    async with open_bench() as bench:
        await settled(bench, image(), network(), group("web"), member("web", "web"))
        with pytest.raises(InUse) as caught:
            await bench.delete("SecurityGroup", "web")
        assert "VirtualMachine default/web" in str(caught.value)
        await wait_until(lambda: bench.get("SecurityGroup", "web").status.members == 1)
        await settled(bench, member("web"))
        await bench.final((await bench.delete("SecurityGroup", "web")).id)
        assert bench.machine.host.nwd.groups == {}


@simulated
async def test_a_group_that_is_being_deleted_takes_no_members() -> None:
    async with open_bench() as bench:
        await settled(bench, image(), network(), group("web"))
        bench.machine.host.nwd.down_until = bench.machine.clock.monotonic() + 5
        await bench.delete("SecurityGroup", "web")
        error = await refused(bench, FailedPrecondition, member("web", "web"))
        assert error.field == "spec.interfaces[0].securityGroups[0]"


@simulated
async def test_a_start_waits_for_the_groups_of_its_nics() -> None:
    async with open_bench() as bench:
        await settled(bench, image(), network())
        real = bench.machine.host.nwd._SetSecurityGroup
        bench.machine.host.nwd._SetSecurityGroup = _down  # type: ignore[method-assign,assignment]
        await bench.apply(group("web"), member("web", "web"))
        await wait_until(
            lambda: (
                bench.get("VirtualMachine", "web").status is not None
                and bench.condition("NetworkReady") == ("False", "GroupNotReady")
            ),
            timeout_s=60,
        )
        assert bench.process() is None
        bench.machine.host.nwd._SetSecurityGroup = real  # type: ignore[method-assign]
        await bench.until("VMMRunning")


def _down(_: object) -> None:
    from chv.common.errors import Unavailable

    raise Unavailable("not now")


# --- live changes


@simulated
async def test_groups_rates_bounds_and_public_address_change_under_a_running_vm() -> None:
    async with open_bench() as bench:
        net = network(publicAddresses=["192.0.2.9"])
        await settled(bench, image(), net, group("web"), member("web"))
        process = bench.process()
        change = {
            "bandwidth": {"ingress": "100Mbit", "egress": "1.5Gbit"},
            "maxConnections": 500,
            "publicAddress": "192.0.2.9",
        }
        await settled(bench, member("web", "web", **change))
        (nic,) = bench.machine.host.nwd.nics.values()
        assert nic.groups == [uid(bench, "SecurityGroup", "web")]
        last = nic.last
        assert last is not None
        assert (last.shape.ingress_bps, last.shape.egress_bps) == (100_000_000, 1_500_000_000)
        assert (last.connections_max, last.public_address) == (500, "192.0.2.9")
        assert bench.process() is process
        assert bench.condition("RestartRequired") == ("False", "AsStarted")


@simulated
@pytest.mark.parametrize(
    "change", [{"queues": 2}, {"mac": "52:54:00:00:00:09"}, {"address": "10.9.0.9"}]
)
async def test_the_rest_of_an_interface_changes_only_while_it_is_stopped(
    change: dict[str, Any],
) -> None:
    async with open_bench() as bench:
        await settled(bench, image(), network(), member("web"))
        error = await refused(bench, FailedPrecondition, member("web", **change))
        assert error.field == "spec.interfaces"
        await bench.final((await bench.act("stop")).id)
        await settled(
            bench,
            {
                **member("web", **change),
            },
        )


@simulated
async def test_a_stopped_vm_lets_go_of_a_group_that_it_no_longer_names() -> None:
    async with open_bench() as bench:
        await settled(bench, image(), network(), group("web"), group("db"), member("web", "web"))
        await bench.final((await bench.act("stop")).id)
        await settled(bench, member("web", "db"))
        deleted = await bench.final((await bench.delete("SecurityGroup", "web")).id)
        assert deleted.state == "Succeeded"
        (nic,) = bench.machine.host.nwd.nics.values()
        assert nic.groups == [uid(bench, "SecurityGroup", "db")]
        assert bench.process() is None


@simulated
async def test_addresses_that_the_network_cannot_give_are_refused() -> None:
    async with open_bench() as bench:
        await settled(bench, image(), network(), network("six", subnet6="fd00:9::/64"))
        for interface, part in (
            ({"address6": "fd00:9::5"}, "address6"),
            ({"network": "six", "address6": "fd00:8::5"}, "address6"),
            ({"network": "six", "address6": "fd00:9::1"}, "address6"),
            ({"publicAddress": "192.0.2.9"}, "publicAddress"),
        ):
            error = await refused(bench, InvalidArgument, member("web", **interface))
            assert error.field == f"spec.interfaces[0].{part}"
        await settled(bench, member("web", network="six", address6="fd00:9::5"))
        other = member("other", network="six", address6="fd00:9::5")
        assert (await refused(bench, InUse, other)).field == "spec.interfaces[0].address6"


@simulated
async def test_metadata_is_told_where_the_network_serves_it_and_never_the_host_key() -> None:
    async with open_bench() as bench:
        await settled(bench, image(), network(), member("web"))
        (nic,) = bench.machine.host.nwd.nics.values()
        assert nic.metadata is None
        await settled(bench, network(metadata=True))
        told = await wait_until(lambda: metadata(bench), timeout_s=30)
        assert (told.name, told.namespace, told.hostname) == ("web", "default", "web")
        assert "host" not in told.user_data
        generation = nic.generation
        await settled(bench, {**member("web"), "spec": {**member("web")["spec"],
                      "cloudInit": {"userData": "#cloud-config\nruncmd: [date]\n"}}})  # fmt: skip
        await wait_until(lambda: "runcmd" in metadata(bench).user_data, timeout_s=30)
        assert nic.generation > generation
        await settled(bench, network(metadata=False))
        await wait_until(lambda: metadata(bench) is None, timeout_s=30)
        assert bench.process() is not None


# --- networks


@simulated
async def test_l2_changes_only_while_no_vm_runs_and_subnet6_never() -> None:
    async with open_bench() as bench:
        await settled(bench, *everything())
        error = await refused(bench, FailedPrecondition, network(l2="Open"))
        assert error.field == "spec.l2"
        error = await refused(bench, InvalidArgument, network(subnet6="fd00:9::/64"))
        assert error.field == "spec.subnet6"
        await bench.final((await bench.act("stop")).id)
        await settled(bench, network(l2="Open"))


@simulated
async def test_a_public_address_has_one_network_and_is_kept_while_it_is_used() -> None:
    async with open_bench() as bench:
        public = network(publicAddresses=["192.0.2.9", "192.0.2.10"])
        await settled(bench, image(), public, member("web", publicAddress="192.0.2.9"))
        error = await refused(bench, InUse, network("other", publicAddresses=["192.0.2.10"]))
        assert error.field == "spec.publicAddresses[0]"
        error = await refused(bench, InUse, network(publicAddresses=["192.0.2.10"]))
        assert "VirtualMachine default/web" in str(error)
        await settled(bench, network(publicAddresses=["192.0.2.9"]))


@simulated
async def test_a_public_address_comes_with_its_network_in_one_request() -> None:
    async with open_bench() as bench:
        await settled(bench, image(), network(), member("web"))
        nwd = bench.machine.host.nwd
        real = nwd._EnsureNetworkTopology
        nwd._EnsureNetworkTopology = _down  # type: ignore[method-assign,assignment]
        public = network(publicAddresses=["192.0.2.9"])
        await bench.apply(public, member("web", publicAddress="192.0.2.9"))
        await wait_until(lambda: bench.condition("NetworkReady")[0] != "True", timeout_s=60)
        (nic,) = nwd.nics.values()
        assert nic.last is not None
        assert nic.last.public_address == ""  # not before the network has it
        nwd._EnsureNetworkTopology = real  # type: ignore[method-assign]
        await wait_until(lambda: _public(bench) == "192.0.2.9", timeout_s=60)


def _public(bench: Bench) -> str:
    (nic,) = bench.machine.host.nwd.nics.values()
    return nic.last.public_address if nic.last is not None else ""


# --- exposures


@simulated
async def test_an_exposure_shows_how_its_targets_are() -> None:
    async with open_bench() as bench:
        await settled(bench, image(), network(), member("web"), member("two"),
                      exposure("site", "web", "two"))  # fmt: skip
        status = (await bench.until("Ready", "site", "Exposure")).status
        assert [t.virtual_machine for t in status.targets] == ["web", "two"]

        def states() -> list[str]:
            return [t.state for t in bench.get("Exposure", "site").status.targets]

        await wait_until(lambda: states() == ["healthy", "healthy"], timeout_s=10)
        await bench.final((await bench.act("stop", "two")).id)
        await wait_until(lambda: states() == ["healthy", "unhealthy"], timeout_s=10)


@simulated
async def test_targets_that_nobody_checks_are_said_to_be_so() -> None:
    async with open_bench() as bench:
        await settled(bench, image(), network(), member("web"),
                      exposure("site", "web", healthCheck={"protocol": "None"}))  # fmt: skip
        told = "1 of 1 targets attached, not checked"
        await wait_until(
            lambda: bench.get("Exposure", "site").status.conditions[0].evidence == told,
            timeout_s=10,
        )


@simulated
async def test_a_deleted_target_is_absent_and_its_successor_takes_over() -> None:
    async with open_bench() as bench:
        await settled(bench, image(), network(), member("web"), exposure())
        nwd = bench.machine.host.nwd
        first = next(iter(nwd.exposures.values())).exposure.targets
        await bench.final((await bench.delete("VirtualMachine", "web")).id)
        (target,) = bench.get("Exposure", "site").status.targets
        await wait_until(
            lambda: bench.get("Exposure", "site").status.targets[0].state == "absent", timeout_s=10
        )
        await settled(bench, member("web"))
        await wait_until(
            lambda: (
                len(next(iter(nwd.exposures.values())).exposure.targets) == 1
                and next(iter(nwd.exposures.values())).exposure.targets != first
            ),
            timeout_s=10,
        )
        assert target.virtual_machine == "web"


@simulated
async def test_targets_are_vms_of_the_namespace_on_that_network() -> None:
    async with open_bench() as bench:
        await settled(bench, image(), network(), network("other"), bare("bare"))
        both = [{"name": f"eth{n}", "network": "net"} for n in range(2)]
        await settled(bench, bare("both", interfaces=both))
        assert (await refused(bench, InvalidArgument, exposure("x", "nope"))).field == (
            "spec.targets[0].virtualMachine"
        )
        assert (await refused(bench, InvalidArgument, exposure("x", "bare"))).field == (
            "spec.targets[0].virtualMachine"
        )
        error = await refused(bench, InvalidArgument, exposure("x", "both"))
        assert error.field == "spec.targets[0].interface"
        assert error.hint == "one of eth0, eth1"
        target = {"virtualMachine": "both", "interface": "eth2"}
        error = await refused(bench, InvalidArgument, exposure("x", targets=[target]))
        assert error.field == "spec.targets[0].interface"
        target = {"virtualMachine": "both", "interface": "eth1"}
        await settled(bench, exposure("x", targets=[target]))


@simulated
async def test_one_port_of_an_address_is_exposed_once() -> None:
    async with open_bench() as bench:
        await settled(bench, image(), network(), network("other"), member("web"))
        await settled(bench, exposure("a", endPort=90))
        error = await refused(bench, InUse, exposure("b", port=85))
        assert error.field == "spec.addresses[0]"
        assert "Exposure default/a" in str(error)
        # Another protocol, another port; and inside of a subnet each network is its own world.
        await settled(bench, exposure("b", port=85, protocol="UDP"), exposure("c", port=91))
        inside = {"addresses": ["10.9.0.200"], "targets": []}
        await settled(bench, exposure("d", **inside))
        await settled(bench, exposure("e", network="other", **inside))
        await refused(bench, InUse, exposure("f", **inside))
        error = await refused(bench, InvalidArgument, exposure("g", addresses=["10.9.0.1"]))
        assert error.field == "spec.addresses[0]"


@simulated
async def test_a_guest_and_an_exposure_never_have_one_address() -> None:
    async with open_bench() as bench:
        await settled(bench, image(), network(), member("web"))
        given = bench.get("VirtualMachine", "web").status.interfaces[0].address
        error = await refused(bench, InUse, exposure("site", addresses=["192.0.2.7", given]))
        assert error.field == "spec.addresses[1]"
        assert "web" in error.message
        free = ".".join([*given.split(".")[:3], "77"])
        await settled(bench, exposure("site", addresses=[free]))
        error = await refused(bench, InUse, member("other", address=free))
        assert error.field == "spec.interfaces[0].address"
        assert "site" in error.message


@simulated
async def test_what_nwd_refuses_fails_once_and_is_tried_again_when_its_network_changes() -> None:
    async with open_bench() as bench:
        await settled(bench, network())
        nwd, asked = bench.machine.host.nwd, []

        def refuse(request: Any) -> None:
            asked.append(request)
            raise InvalidArgument("no such address", field="exposure.addresses[0]")

        real, nwd._SetExposure = nwd._SetExposure, refuse  # type: ignore[method-assign,assignment]
        (result,) = (await bench.apply(exposure(targets=[]))).results
        assert (await bench.final(result.operation_id)).state == "Failed"
        assert bench.get("Exposure", "site").status.phase == "Failed"
        await anyio.sleep(100)  # of virtual time
        assert len(asked) == 1
        request = api.ListOperations(active_only=True)
        assert (await bench.engine.list_operations(request)).operations == []
        nwd._SetExposure = real  # type: ignore[method-assign]
        await settled(bench, network(publicAddresses=["192.0.2.7"]))
        await wait_until(lambda: bench.get("Exposure", "site").status.phase == "Ready")


@simulated
async def test_an_address_that_is_nobodys_is_refused_at_apply() -> None:
    async with open_bench() as bench:
        await settled(bench, network(publicAddresses=["192.0.2.99"]))
        mixed = ["10.9.0.200", "192.0.2.99", "192.0.2.7", "203.0.113.5"]
        error = await refused(bench, InvalidArgument, exposure(targets=[], addresses=mixed))
        assert (error.field, error.resource) == ("spec.addresses[3]", "Exposure default/site")
        assert "203.0.113.5" in error.message
        bad = exposure(targets=[], addresses=["192.0.2.300"])
        assert "192.0.2.300" in str(await refused(bench, InvalidArgument, bad))
        await settled(bench, exposure(targets=[], addresses=mixed[:3]))


@simulated
async def test_a_node_that_lost_an_address_still_takes_the_exposure_that_has_it() -> None:
    async with open_bench() as bench:
        await settled(bench, network(), exposure(targets=[]))
        asked = []

        def refuse(request: Any) -> None:
            asked.append(request)
            raise InvalidArgument("gone", field="exposure.addresses[0]")

        nwd = bench.machine.host.nwd
        nwd._CheckExposure = refuse  # type: ignore[method-assign,assignment]
        await settled(bench, exposure(targets=[], sources=["10.0.0.0/8"]))
        assert asked == []
        await refused(bench, InvalidArgument, exposure(targets=[], port=81))


@simulated
async def test_a_network_without_an_uplink_exposes_nothing_of_the_node() -> None:
    async with open_bench() as bench:
        none = network(uplink="None")
        error = await refused(bench, InvalidArgument, none, exposure(targets=[]))
        assert error.field == "spec.addresses[0]"
        assert "no uplink" in error.message


@simulated
async def test_what_failed_is_tried_again_when_nwd_says_that_the_node_has_changed() -> None:
    async with open_bench() as bench:
        await settled(bench, network())
        nwd = bench.machine.host.nwd

        def refuse(_: Any) -> None:
            raise InvalidArgument("no such address", field="exposure.addresses[0]")

        real, nwd._SetExposure = nwd._SetExposure, refuse  # type: ignore[method-assign,assignment]
        (result,) = (await bench.apply(exposure(targets=[]))).results
        assert (await bench.final(result.operation_id)).state == "Failed"
        nwd._SetExposure = real  # type: ignore[method-assign]
        bench.engine.notify_network_event(
            NetworkEvent(kind="exposure", uid=uid(bench, "Exposure", "site"))
        )
        await anyio.sleep(5)  # of virtual time
        assert bench.get("Exposure", "site").status.phase == "Failed", "nothing is new"
        bench.engine.notify_network_event(NetworkEvent(kind="node"))
        await wait_until(lambda: bench.get("Exposure", "site").status.phase == "Ready")


@simulated
async def test_a_group_with_members_says_how_they_let_go_of_it() -> None:
    async with open_bench() as bench:
        await settled(bench, image(), network(), group(), member("web", "web"))
        with pytest.raises(InUse) as caught:
            await bench.delete("SecurityGroup", "web")
        assert "securityGroups of web" in caught.value.hint
        assert "delete" not in caught.value.hint
        await settled(bench, member("web"))
        await bench.final((await bench.delete("SecurityGroup", "web")).id)


@simulated
async def test_a_network_stays_while_an_exposure_is_on_it() -> None:
    async with open_bench() as bench:
        await settled(bench, network(), exposure(targets=[]))
        with pytest.raises(InUse):
            await bench.delete("Network", "net")
        error = await refused(bench, InvalidArgument, network("o"), exposure(network="o"))
        assert error.field == "spec.network"
        await bench.final((await bench.delete("Exposure", "site")).id)
        await bench.final((await bench.delete("Network", "net")).id)
        assert bench.machine.host.nwd.exposures == {}


@simulated
async def test_the_whole_file_is_deleted_in_reverse_order() -> None:
    async with open_bench() as bench:
        objects = [image(), group("web", "web"), network(), volume(),
                   vm(interfaces=[{**NIC, "securityGroups": ["web"]}]), exposure()]  # fmt: skip
        await settled(bench, *objects)
        for each in reversed(objects):
            operation = await bench.delete(each["kind"], each["metadata"]["name"])
            assert (await bench.final(operation.id)).state == "Succeeded"
        nwd = bench.machine.host.nwd
        assert (nwd.groups, nwd.exposures, nwd.nics, nwd.networks) == ({}, {}, {}, {})
