"""What is refused is refused as a whole, with field, value and fix; what is accepted is durable."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import anyio
import pytest

from chv.agent.mutations import INLINE_CHARACTERS_MAX
from chv.common.errors import (
    ChvError,
    Conflict,
    FailedPrecondition,
    InUse,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from chv.common.wire import agent as api
from tests.sim.bench import (
    Bench,
    bare,
    everything,
    image,
    network,
    open_bench,
    vm,
    volume,
)
from tests.sim.virtual import simulated

KERNEL = {"path": "/k", "sha256": "d" * 64}
DISK = {"path": "/d", "sha256": "d" * 64, "format": "raw"}


async def refused(bench: Bench, error: type[ChvError], *objects: dict[str, Any]) -> ChvError:
    """The whole request is refused and has changed nothing."""
    before = bench.machine.store.tables.snapshot()
    with pytest.raises(error) as caught:
        await bench.apply(*objects)
    after = bench.machine.store.tables.snapshot()
    assert [o.resource.metadata for o in after.objects] == [
        o.resource.metadata for o in before.objects
    ]
    return caught.value


@simulated
async def test_objects_are_applied_in_the_order_of_their_kinds() -> None:
    async with open_bench() as bench:
        reply = await bench.apply(*everything())
        kinds = [result.kind for result in reply.results]
        assert kinds == ["Image", "Network", "Volume", "VirtualMachine"]
        assert {result.action for result in reply.results} == {"created"}


@simulated
async def test_the_same_again_changes_nothing() -> None:
    async with open_bench() as bench:
        first = await bench.apply(*everything())
        again = await bench.apply(*everything())
        assert {result.action for result in again.results} == {"unchanged"}
        assert [r.generation for r in again.results] == [r.generation for r in first.results]
        begun = {result.operation_id for result in first.results}
        assert {result.operation_id for result in again.results} <= begun  # joined, none is new
        for operation_id in begun:
            await bench.final(operation_id)
        later = await bench.apply(*everything())
        assert not any(result.operation_id for result in later.results)


@simulated
async def test_generation_counts_changes_of_spec_alone() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), bare())
        labelled = bare()
        labelled["metadata"]["labels"] = {"tier": "front"}
        (result,) = (await bench.apply(labelled)).results
        assert (result.action, result.generation) == ("configured", 1)
        (result,) = (await bench.apply(bare(cpus=2))).results
        assert (result.action, result.generation) == ("configured", 2)


@simulated
async def test_status_in_a_file_is_ignored() -> None:
    async with open_bench() as bench:
        forged = bare(runStrategy="Halted")
        forged["status"] = {"phase": "Running", "nonsense": True}
        forged["metadata"]["managedFields"] = [{"manager": "kubectl"}]
        await bench.apply(image(), forged)
        await bench.until("phase=Stopped")


@simulated
async def test_a_dry_run_says_what_would_be_and_stores_nothing() -> None:
    async with open_bench() as bench:
        reply = await bench.apply(*everything(), dry_run=True)
        assert [result.action for result in reply.results] == ["created"] * 4
        assert not bench.machine.store.tables.objects


@simulated
async def test_one_bad_object_refuses_the_whole_request() -> None:
    async with open_bench() as bench:
        error = await refused(bench, InvalidArgument, *everything(memory=1024))
        assert error.field == "spec.memory"
        assert "1024" in error.message
        assert "1024Mi" in error.hint


@simulated
async def test_an_object_given_twice_is_refused() -> None:
    async with open_bench() as bench:
        error = await refused(bench, InvalidArgument, image(), image())
        assert "twice" in error.message


@simulated
async def test_missing_references_name_field_and_fix() -> None:
    async with open_bench() as bench:
        for objects, field in (
            ([bare()], "spec.boot.image"),
            ([image(), network(), vm()], "spec.disks[0].volume"),
            ([image(), volume(), vm()], "spec.interfaces[0].network"),
            ([volume(source={"image": "nowhere"})], "spec.source.image"),
        ):
            error = await refused(bench, InvalidArgument, *objects)
            assert error.field == field
            assert "same file" in error.hint


@simulated
async def test_a_reference_does_not_cross_namespaces() -> None:
    async with open_bench() as bench:
        elsewhere = image()
        elsewhere["metadata"]["namespace"] = "other"
        await refused(bench, InvalidArgument, elsewhere, bare())


@simulated
async def test_a_volume_belongs_to_one_vm_and_the_holder_is_named() -> None:
    async with open_bench() as bench:
        await bench.apply(*everything())
        error = await refused(bench, InUse, vm("second", interfaces=[]))
        assert "default/web" in error.message
        assert error.field == "spec.disks[0].volume"


@simulated
async def test_two_newcomers_cannot_share_a_volume_either() -> None:
    async with open_bench() as bench:
        await refused(bench, InUse, *everything(), vm("second"))


@simulated
async def test_an_address_belongs_to_one_vm() -> None:
    async with open_bench() as bench:
        nic = {"name": "eth0", "network": "net", "address": "10.9.0.7"}
        await bench.apply(image(), network(), bare(interfaces=[nic]))
        error = await refused(bench, InUse, bare("second", interfaces=[nic]))
        assert "10.9.0.7" in error.message


@simulated
async def test_an_address_outside_of_the_network_or_the_gateways_is_refused() -> None:
    async with open_bench() as bench:
        for address in ("10.8.0.7", "10.9.0.1", "10.9.0.255"):
            nic = {"name": "eth0", "network": "net", "address": address}
            error = await refused(
                bench, InvalidArgument, image(), network(), bare(interfaces=[nic])
            )
            assert error.field == "spec.interfaces[0].address"


@simulated
async def test_a_network_over_the_uplink_is_refused_by_the_network_daemon() -> None:
    async with open_bench() as bench:
        error = await refused(bench, InvalidArgument, network(subnet="192.0.2.0/25"))
        assert error.resource == "Network default/net"
        assert "uplink" in error.message


@simulated
async def test_what_is_fixed_at_creation_does_not_change() -> None:
    async with open_bench() as bench:
        await bench.apply(*everything())
        for changed, field in (
            (volume(source={"image": "tiny"}), "spec.source"),
            (volume(accessMode="ReadOnlyMany", source={"image": "tiny"}), "spec.source"),
            (volume(size="32Mi"), "spec.size"),
            (network(subnet="10.8.0.0/24"), "spec.subnet"),
        ):
            error = await refused(bench, InvalidArgument, changed)
            assert error.field == field


@simulated
async def test_disks_and_nics_go_at_once_and_a_start_is_without_them() -> None:
    async with open_bench() as bench:
        reply = await bench.apply(*everything())
        await bench.final(reply.results[-1].operation_id)
        process = bench.process()
        reply = await bench.apply(vm(disks=[], interfaces=[]))
        await bench.final(reply.results[0].operation_id)
        assert process is not None
        assert bench.process() is process
        assert (process.disks, process.nics) == ({}, set())
        assert not bench.machine.host.nwd.nics
        await bench.final((await bench.act("stop", force=True)).id)
        reply = await bench.apply(vm(disks=[], interfaces=[], runStrategy="Always"))
        await bench.final(reply.results[0].operation_id)
        await anyio.sleep(1)
        assert not bench.machine.host.nwd.nics
        process = bench.process()
        assert process is not None
        assert len(process.config.disks) == 1  # the seed


@simulated
async def test_a_chosen_vmm_is_fixed_and_told_in_the_words_of_the_manifest() -> None:
    async with open_bench() as bench:
        reply = await bench.apply(image(), bare())
        await bench.final(reply.results[-1].operation_id)
        error = await refused(bench, InvalidArgument, bare(vmm="qemu"))
        assert error.field == "spec.vmm"
        assert error.message == "'qemu' instead of 'auto': it is fixed since the first start"


@simulated
async def test_an_mtu_changes_only_while_no_vm_runs_on_the_network() -> None:
    async with open_bench() as bench:
        reply = await bench.apply(*everything())
        await bench.final(reply.results[-1].operation_id)
        error = await refused(bench, FailedPrecondition, network(mtu=1400))
        assert error.field == "spec.mtu"
        assert "VirtualMachine default/web" in error.message
        assert "chv stop web" in error.hint
        await bench.apply(network(uplink="None"))  # at once
        await bench.final((await bench.act("stop", force=True)).id)
        reply = await bench.apply(network(uplink="None", mtu=1400))
        assert (await bench.final(reply.results[0].operation_id)).state == "Succeeded"


@simulated
async def test_a_volume_grows_under_its_running_vm() -> None:
    async with open_bench() as bench:
        reply = await bench.apply(*everything())
        await bench.final(reply.results[-1].operation_id)
        reply = await bench.apply(volume(size="128Mi"))
        assert (await bench.final(reply.results[0].operation_id)).state == "Succeeded"
        (grown,) = bench.machine.host.stord.volumes.values()
        assert grown.backend.size_bytes == 128 << 20


@simulated
async def test_a_resource_version_makes_apply_compare_and_set() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), bare())
        seen = bench.get("VirtualMachine", "web").metadata.resource_version
        await bench.apply(bare(cpus=2))
        stale = bare(cpus=3)
        stale["metadata"]["resourceVersion"] = seen
        error = await refused(bench, Conflict, stale)
        assert error.field == "metadata.resourceVersion"


@simulated
async def test_a_uid_of_an_earlier_object_of_that_name_is_refused() -> None:
    async with open_bench() as bench:
        await bench.apply(image())
        old = image()
        old["metadata"]["uid"] = bench.get("Image", "tiny").metadata.uid
        await bench.final((await bench.delete("Image", "tiny")).id)
        await refused(bench, Conflict, old)
        await bench.apply(image())
        await refused(bench, Conflict, old)


@simulated
async def test_what_is_being_deleted_cannot_be_applied_or_referred_to() -> None:
    async with open_bench() as bench:
        reply = await bench.apply(*everything())
        await bench.final(reply.results[-1].operation_id)
        process = bench.process()
        assert process is not None
        process.obedient = False
        await bench.delete("VirtualMachine", "web")
        error = await refused(bench, FailedPrecondition, vm(cpus=2))
        assert "wait" in error.hint
        await bench.delete("Volume", "data")
        await refused(bench, FailedPrecondition, vm("second", interfaces=[]))


@simulated
async def test_what_is_in_use_cannot_be_deleted_and_the_user_is_named() -> None:
    async with open_bench() as bench:
        await bench.apply(*everything())
        for kind, name in (("Image", "tiny"), ("Network", "net"), ("Volume", "data")):
            with pytest.raises(InUse, match=": it is used by VirtualMachine default/web"):
                await bench.delete(kind, name)


@simulated
async def test_an_image_in_use_does_not_change() -> None:
    async with open_bench() as bench:
        await bench.apply(*everything())
        error = await refused(bench, InUse, image(kernel=KERNEL))
        assert "another name" in error.hint


@simulated
async def test_an_image_without_the_needed_part_is_refused() -> None:
    async with open_bench() as bench:
        error = await refused(bench, InvalidArgument, image(disk=DISK), bare())
        assert "no kernel" in error.message
        from_image = volume(source={"image": "tiny"})
        error = await refused(bench, InvalidArgument, image(kernel=KERNEL), from_image)
        assert "no disk" in error.message


@simulated
async def test_as_many_vms_as_the_limit_says_and_no_more() -> None:
    async with open_bench(vms_max=2) as bench:
        await bench.apply(image(), bare("one"), bare("two"))
        await refused(bench, ResourceExhausted, bare("three"))
        await bench.final((await bench.delete("VirtualMachine", "one")).id)
        await bench.apply(bare("three"))
        slots = {o.facts.slot for o in bench.machine.store.tables.objects.values() if o.facts}
        assert slots == {0, 1}


@simulated
async def test_a_key_replays_the_reply_and_refuses_another_request() -> None:
    async with open_bench() as bench:
        first = await bench.apply(image(), bare(), idempotency_key="k")
        again = await bench.apply(image(), bare(), idempotency_key="k")
        assert again == first
        with pytest.raises(Conflict, match="another request"):
            await bench.apply(image("other"), idempotency_key="k")


@simulated
async def test_deleting_again_joins_and_deleting_nothing_is_not_found() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), bare())
        first = await bench.delete("VirtualMachine", "web")
        assert (await bench.delete("VirtualMachine", "web")).id == first.id
        with pytest.raises(NotFound):
            await bench.delete("Volume", "nothing")


@simulated
async def test_an_owned_object_goes_with_its_owner() -> None:
    async with open_bench() as bench:
        reply = await bench.apply(image(), volume(), bare())
        owner = reply.results[-1]
        owned = volume()
        owned["metadata"]["ownerReferences"] = [
            {
                "apiVersion": owned["apiVersion"],
                "kind": "VirtualMachine",
                "name": "web",
                "uid": owner.uid,
            }
        ]
        await bench.apply(owned)
        await bench.delete("VirtualMachine", "web")
        await bench.until("deleted", "data", "Volume")
        assert not bench.machine.host.stord.volumes


@simulated
async def test_an_image_is_imported_and_defined_in_one_call() -> None:
    async with open_bench() as bench:
        request = api.ImportImage(name="disk", path="/images/disk.raw", requester="test")
        reply = await bench.engine.import_image(request)
        await bench.final(reply.operation_id)
        spec = bench.get("Image", "disk").spec
        assert spec.disk.sha256 == reply.sha256
        assert bench.get("Image", "disk").status.phase == "Ready"


@simulated
async def test_kernels_and_initramfs_are_taken_for_what_they_are_declared_to_be() -> None:
    async with open_bench() as bench:
        for artifact, sha256 in (("kernel", "a" * 64), ("initramfs", "b" * 64)):
            request = api.ImportImage(
                name="linux", artifact=artifact, path="/f", sha256=sha256, requester="test"
            )
            assert (await bench.engine.import_image(request)).sha256 == sha256
            assert bench.machine.host.artifacts[sha256].format == artifact
        status = (await bench.until("Ready", "linux", "Image")).status
        assert (status.kernel.format, status.initramfs.format) == ("kernel", "initramfs")


@simulated
async def test_a_disk_format_is_refused_for_what_is_no_disk() -> None:
    async with open_bench() as bench:
        request = api.ImportImage(
            name="linux", artifact="kernel", path="/f", format="qcow2", requester="test"
        )
        with pytest.raises(InvalidArgument, match="no disk") as caught:
            await bench.engine.import_image(request)
        assert caught.value.field == "format"
        assert not bench.machine.host.artifacts


@simulated
async def test_an_import_that_is_refused_leaves_no_artifact() -> None:
    async with open_bench() as bench:
        request = api.ImportImage(
            name="bad", artifact="initramfs", path="/images/initrd", requester="test"
        )
        with pytest.raises(InvalidArgument, match="kernel"):
            await bench.engine.import_image(request)
        assert not bench.machine.host.artifacts


@simulated
async def test_a_missing_image_file_fails_the_image_and_a_new_spec_heals_it() -> None:
    async with open_bench() as bench:
        bad = image("disk", disk={**DISK, "path": "/images/missing"})
        reply = await bench.apply(bad)
        operation = await bench.final(reply.results[0].operation_id)
        assert operation.state is api.OperationState.FAILED
        assert operation.error is not None
        assert operation.error.code == "INVALID_ARGUMENT"
        assert bench.get("Image", "disk").status.phase == "Failed"
        reply = await bench.apply(image("disk", disk=DISK))
        assert (await bench.final(reply.results[0].operation_id)).state == "Succeeded"


@simulated
async def test_on_a_full_disk_nothing_new_is_taken_and_everything_can_still_go() -> None:
    async def shortage() -> str:
        return "/state has 7 bytes free"

    async with open_bench() as bench:
        await bench.apply(*everything())
        await bench.until("SSHReady")
        with patch.object(bench.machine.store, "shortage", shortage):
            for objects in ([network("other")], [network("n", mtu=1400), bare("new")]):
                error = await refused(bench, ResourceExhausted, *objects)
                assert "/state has 7 bytes free" in error.message
                assert error.hint
            again = await bench.apply(*everything())
            assert {result.action for result in again.results} == {"unchanged"}
            await bench.final((await bench.act("stop")).id)
            await bench.final((await bench.delete("VirtualMachine", "web")).id)
        await bench.apply(network("other"))


@simulated
async def test_user_data_that_no_guest_could_get_is_refused_at_once() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), bare(cloudInit={"userData": "runcmd: [ls]"}))
        for text in ("a: x\0y", "a: [unclosed", "ssh_keys: {}", "#!/bin/sh\n", "- a list"):
            for name in ("web", "new"):
                changed = bare(name, cloudInit={"userData": text})
                error = await refused(bench, InvalidArgument, changed)
                assert error.field == "spec.cloudInit.userData", text
                assert error.resource == f"VirtualMachine default/{name}"


async def test_long_user_data_is_checked_too() -> None:
    async with open_bench() as bench:
        text = "a: [" + "x," * INLINE_CHARACTERS_MAX
        error = await refused(bench, InvalidArgument, image(), bare(cloudInit={"userData": text}))
        assert error.field == "spec.cloudInit.userData"
