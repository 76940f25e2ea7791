"""Everything of stord's kinds that exists on this machine for this instance. Reads only.

Nothing is taken from records but the question whether something is known.
"""

from __future__ import annotations

from chv.common import evidence
from chv.common.ids import short_uid
from chv.common.layout import Layout
from chv.common.process import Provider
from chv.common.wire.types import CensusItem
from chv.stord.backends.disk_files import NEW, OLD
from chv.stord.backends.file import FileBackend
from chv.stord.proxy import command
from chv.stord.records import Records
from chv.stord.work import WORKER_KIND


def census(
    layout: Layout, records: Records, provider: Provider, files: FileBackend
) -> list[CensusItem]:
    """Return storage daemons, proxies, export sockets, private and volume directories."""
    return [
        *_processes(layout, records, provider),
        *_run_files(layout, records),
        *_volumes(records, files),
    ]


def _processes(layout: Layout, records: Records, provider: Provider) -> list[CensusItem]:
    # Looked for first: what is started meanwhile has its record before it is there.
    found = [
        each
        for kind in (WORKER_KIND, command.WORKER_KIND)
        for each in provider.find(f"{layout.worker_prefix}{kind}:")
    ]
    known = {row.worker_id for row in list(records.backends.values())}
    known |= {row.proxy_id for row in list(records.attachments.values())}
    return [
        evidence.process_item(
            each,
            owner=_owner(each.worker_id.split(":")[3], list(records.backends)),
            known=each.worker_id in known,
        )
        for each in found
    ]


def _run_files(layout: Layout, records: Records) -> list[CensusItem]:
    """Sockets of ours and the storage daemons' directories below `vm/`."""
    found = [
        (directory, evidence.children(directory)) for directory in evidence.children(layout.vms)
    ]
    exports = {
        layout.export(row.vm_id, row.volume_id) for row in list(records.attachments.values())
    }
    vm_ids = list(records.backends)
    private = {layout.qsd(vm_id) for vm_id in vm_ids}
    items = []
    for directory, paths in found:
        owner = _owner(directory.name, vm_ids)
        for path in paths:
            if path.name == layout.qsd("x").name:
                known = path in private
                items.append(evidence.path_item("file", path, owner=owner, known=known))
            elif evidence.is_socket(path):
                known = path in exports
                items.append(evidence.path_item("socket", path, owner=owner, known=known))
    return items


def _volumes(records: Records, files: FileBackend) -> list[CensusItem]:
    names = files.found()
    return [
        evidence.path_item(
            "file", files.home(name), owner=owner, known=owner in records.volumes, data=True
        )
        for name in names
        # What is being built or removed stands beside the volume under its name with a suffix.
        for owner in (name.removesuffix(NEW).removesuffix(OLD),)
    ]


def _owner(short: str, vm_ids: list[str]) -> str:
    """Return the uid that a short one stands for, or the short one where no record has it."""
    return next((vm_id for vm_id in vm_ids if short_uid(vm_id) == short), short)
