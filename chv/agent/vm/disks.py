"""How stord is asked to serve the disks of a VM, and what its answers mean. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from chv.agent.vm.steps import AttachVolumeStep
from chv.common.errors import ErrorData, from_data
from chv.common.layout import Layout
from chv.common.wire import stord
from chv.common.wire.types import CallMeta


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """The VM for which its disks are served. `network`: one of its disks needs the node's."""

    vm_id: str
    slot: int
    layout: Layout
    network: bool


def attach_request(vm: Asker, volume: AttachVolumeStep, meta: CallMeta) -> stord.AttachVolumeToVm:
    """Return the request for one volume."""
    return stord.AttachVolumeToVm(
        meta=msgspec.structs.replace(meta, generation=volume.generation),
        volume_id=volume.volume_uid,
        vm_id=vm.vm_id,
        storage_uid=vm.layout.storage_uid(vm.slot),
        vm_gid=vm.layout.vmm_uid(vm.slot),
        read_only=volume.read_only,
        network=vm.network,
    )


def attach_all_request(
    vm: Asker, volumes: Sequence[AttachVolumeStep], meta: CallMeta
) -> stord.AttachVolumesToVm:
    """Return the request for several."""
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
