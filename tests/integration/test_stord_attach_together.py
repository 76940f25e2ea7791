"""Several volumes attached in one call: one start, and an outcome for each of them."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from chv.common.errors import InvalidArgument
from chv.common.ids import short_uid
from chv.common.wire import stord as wire
from tests.integration.stord_classes_helpers import nbd_server, open_class, spec
from tests.integration.stord_helpers import IDS, Node, needs_qsd, open_node
from tests.integration.vhost_client import VhostDisk

pytestmark = [pytest.mark.root, needs_qsd]


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with open_node() as node:
        yield node


async def volumes(node: Node, *formats: str) -> list[str]:
    ids = [IDS.uid() for _ in formats]
    for volume_id, format_ in zip(ids, formats, strict=True):
        await node.open(volume_id, format=format_)
    return ids


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def attachment(outcome: wire.AttachOutcome) -> wire.AttachmentInfo:
    assert outcome.error is None
    assert outcome.attachment is not None
    return outcome.attachment


def works(info: wire.AttachmentInfo) -> None:
    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.write_back
        assert disk.write(0, b"d" * 512) == 0
        assert disk.read(0, 512) == b"d" * 512


async def test_all_disks_of_a_vm_are_on_the_command_line_of_one_storage_daemon(node: Node) -> None:
    ids, vm = await volumes(node, "qcow2", "raw", "qcow2"), IDS.uid()

    outcomes = await node.attach_all(ids, vm)

    infos = [attachment(outcomes[volume_id]) for volume_id in ids]
    (pid,) = {info.backend_pid for info in infos}
    assert all(f"e-{short_uid(volume_id)}" in command_line(pid) for volume_id in ids)
    for info in infos:
        works(info)
    for volume_id in ids:
        await node.detach(volume_id, vm)
    assert node.workers() == []
    assert node.run_files() == []


async def test_the_same_call_again_gets_the_same_answer_and_touches_nothing(node: Node) -> None:
    ids, vm = await volumes(node, "qcow2", "raw"), IDS.uid()
    first = await node.attach_all(ids, vm)
    assert await node.attach_all(ids, vm) == first
    assert await node.attach(ids[0], vm) == first[ids[0]].attachment


@pytest.mark.parametrize("bad", [0, 1, 2])
async def test_one_volume_that_does_not_open_is_named_and_the_others_are_served(
    node: Node, bad: int
) -> None:
    ids, vm = await volumes(node, "qcow2", "qcow2", "qcow2"), IDS.uid()
    path = node.layout.volume(ids[bad]) / "disk.qcow2"
    with path.open("r+b") as file:  # a feature that no QEMU knows: found when it is opened
        file.seek(72)
        file.write(b"\xff" * 8)

    outcomes = await node.attach_all(ids, vm)

    error = outcomes[ids[bad]].error
    assert error is not None
    assert outcomes[ids[bad]].attachment is None
    for volume_id in ids:
        if volume_id != ids[bad]:
            works(attachment(outcomes[volume_id]))
    held = {each.volume_id: each.attached_to for each in await node.volumes()}
    assert held == {each: vm if each != ids[bad] else "" for each in ids}


async def test_what_another_vm_has_and_what_is_stale_keeps_nothing_else_away(node: Node) -> None:
    (taken, free), missing = await volumes(node, "raw", "raw"), IDS.uid()
    await node.attach(taken, IDS.uid(), slot=1)

    outcomes = await node.attach_all([taken, missing, free], IDS.uid())

    refusals = [outcomes[each].error for each in (taken, missing)]
    assert [each.code for each in refusals if each is not None] == ["IN_USE", "NOT_FOUND"]
    works(attachment(outcomes[free]))
    newer = await node.attach_all([free], IDS.uid(), generation=2)
    assert newer[free].error is not None


async def test_disks_that_come_later_join_those_that_are_served(node: Node) -> None:
    ids, vm = await volumes(node, "qcow2", "qcow2", "raw"), IDS.uid()
    first = await node.attach(ids[0], vm)
    with VhostDisk(Path(first.export_path)) as disk:
        outcomes = await node.attach_all(ids, vm)
        assert {attachment(each).backend_pid for each in outcomes.values()} == {first.backend_pid}
        assert disk.write(0, b"d" * 512) == 0


async def test_two_calls_that_name_the_same_volumes_in_another_order_both_end(node: Node) -> None:
    ids, vm = await volumes(node, "qcow2", "qcow2", "qcow2"), IDS.uid()
    answers: list[dict[str, wire.AttachOutcome]] = []

    async def attach(order: list[str]) -> None:
        answers.append(await node.attach_all(order, vm))

    with anyio.fail_after(20):
        async with anyio.create_task_group() as calls:
            calls.start_soon(attach, ids)
            calls.start_soon(attach, ids[::-1])

    assert answers[0] == answers[1]
    assert len([item for item in await node.census() if item.kind == "process"]) == 1


async def test_a_volume_that_is_named_twice_is_refused(node: Node) -> None:
    (volume_id,) = await volumes(node, "raw")
    with pytest.raises(InvalidArgument, match="twice"):
        await node.attach_all([volume_id, volume_id], IDS.uid())


async def test_with_all_disks_known_no_proxy_is_started_that_would_serve_nobody() -> None:
    async with open_node(storage='proxy = "auto"') as node:
        ids, vm = await volumes(node, "raw", "qcow2"), IDS.uid()
        mixed = await node.attach_all(ids, vm)
        assert [attachment(each).proxy_pid for each in mixed.values()] == [0, 0]
        ids, vm = await volumes(node, "raw", "raw"), IDS.uid()
        plain = [attachment(each) for each in (await node.attach_all(ids, vm, slot=1)).values()]
        assert len({each.proxy_pid for each in plain} - {0}) == 2
        assert {each.crash_class for each in plain} == {wire.CrashClass.KEEP_VM}
        for info in plain:
            works(info)


async def test_disks_with_a_key_and_disks_on_a_server_come_with_the_others_by_the_monitor() -> None:
    with tempfile.TemporaryDirectory(prefix="chv-together-") as name:
        place = Path(name)
        place.chmod(0o711)
        path = place / "nbd.sock"
        async with open_node(storage=f'remotes = ["nbd+unix://{path}"]') as node:
            node.add_key("default/disk", b"a-key-of-the-disk-0123456789")
            keyed, remote, vm = IDS.uid(), IDS.uid(), IDS.uid()
            plain = await volumes(node, "qcow2", "raw")
            await node.open(keyed, format="qcow2", key="default/disk")
            async with nbd_server(place / "disk", path):
                export = wire.NbdPlace(socket=str(path), export="vol")
                await open_class(node, remote, spec("nbd", nbd=export))
                ids = [keyed, *plain, remote]
                infos = [attachment(each) for each in (await node.attach_all(ids, vm)).values()]
                assert len({info.backend_pid for info in infos}) == 1
                for info in infos:
                    works(info)
                for volume_id in ids:
                    await node.detach(volume_id, vm)
            outcomes = await node.attach_all(ids, vm)
            error = outcomes[remote].error
            assert error is not None
            assert error.code == "UNAVAILABLE"
            for volume_id in [keyed, *plain]:
                works(attachment(outcomes[volume_id]))
