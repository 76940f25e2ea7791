"""How stord is asked to serve the disks of a VM, and what its answers mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from chv.agent.context import Context
from chv.agent.vm.steps import AttachVolumeStep
from chv.common.errors import ErrorData, NotFound, from_data
from chv.common.layout import Layout
from chv.common.wire import stord
from chv.common.wire.types import CallMeta


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """The VM for which its disks are served. `network`: one of its disks needs the node's."""

    vm_id: str
    slot: int
    layout: Layout
    network: bool


async def attach(
    context: Context, vm: Asker, volumes: Sequence[AttachVolumeStep], operation_id: str
) -> dict[str, stord.AttachmentInfo]:
    """Let stord serve these volumes to the VM, several of them in one call.

    What was attached stays so where another was not: the next pass asks for that alone.
    """
    meta = context.meta(operation_id, 0)
    if len(volumes) == 1:
        info = await context.stord.call(stord.ATTACH_VOLUME, _request(vm, volumes[0], meta))
        context.wake(info.volume_id)
        return {info.volume_id: info}
    reply = await context.stord.call(stord.ATTACH_VOLUMES, _request_all(vm, volumes, meta))
    infos = [each.attachment for each in reply.outcomes if each.attachment is not None]
    for info in infos:
        context.wake(info.volume_id)
    raise_failures(reply.outcomes)
    return {info.volume_id: info for info in infos}


async def detach(context: Context, vm_uid: str, volume_uid: str, operation_id: str) -> None:
    """Let stord stop serving a volume to the VM; fine where it does not."""
    stored = context.stored(volume_uid)
    generation = stored.resource.metadata.generation if stored else 0
    request = stord.DetachVolumeFromVm(
        meta=context.meta(operation_id, generation), volume_id=volume_uid, vm_id=vm_uid
    )
    with suppress(NotFound):  # that is what we want
        await context.stord.call(stord.DETACH_VOLUME, request)


def _request(vm: Asker, volume: AttachVolumeStep, meta: CallMeta) -> stord.AttachVolumeToVm:
    return stord.AttachVolumeToVm(
        meta=msgspec.structs.replace(meta, generation=volume.generation),
        volume_id=volume.volume_uid,
        vm_id=vm.vm_id,
        storage_uid=vm.layout.storage_uid(vm.slot),
        vm_gid=vm.layout.vmm_uid(vm.slot),
        read_only=volume.read_only,
        network=vm.network,
    )


def _request_all(
    vm: Asker, volumes: Sequence[AttachVolumeStep], meta: CallMeta
) -> stord.AttachVolumesToVm:
    return stord.AttachVolumesToVm(
        meta=meta,
        vm_id=vm.vm_id,
        storage_uid=vm.layout.storage_uid(vm.slot),
        vm_gid=vm.layout.vmm_uid(vm.slot),
        volumes=[
            stord.VolumeToAttach(
                volume_id=each.volume_uid, generation=each.generation, read_only=each.read_only
            )
            for each in volumes
        ],
        network=vm.network,
    )


def raise_failures(outcomes: Iterable[stord.AttachOutcome]) -> None:
    """Raise the first error, which names its volume; where there are more, it tells them all."""
    failed = [(each.volume_id, each.error) for each in outcomes if each.error is not None]
    if not failed:
        return
    volume_id, error = failed[0]
    if len(failed) > 1:
        error = msgspec.structs.replace(error, message="; ".join(_told(*each) for each in failed))
    raise from_data(msgspec.structs.replace(error, resource=error.resource or volume_id))


def _told(volume_id: str, error: ErrorData) -> str:
    return f"volume {volume_id}: {error.message}"
