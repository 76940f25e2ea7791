"""Everything of stord's kinds that exists on this machine for this instance. Reads only.

Nothing is taken from records but the question whether something is known.
"""

from __future__ import annotations

import stat
from pathlib import Path

from chv.common.ids import short_uid
from chv.common.layout import Layout
from chv.common.process import Provider
from chv.common.wire.types import CensusItem
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
    known = {row.worker_id for row in records.backends.values()}
    known |= {row.proxy_id for row in records.attachments.values()}
    return [
        CensusItem(
            kind="process",
            name=found.worker_id,
            owner=_owner(found.worker_id.split(":")[3], list(records.backends)),
            known=found.worker_id in known,
            detail=f"pid {found.pid} uid {found.uid} {found.executable}",
        )
        for kind in (WORKER_KIND, command.WORKER_KIND)
        for found in provider.find(f"{layout.worker_prefix}{kind}:")
    ]


def _run_files(layout: Layout, records: Records) -> list[CensusItem]:
    """Sockets of ours and the storage daemons' directories below `vm/`."""
    exports = {
        layout.export(row.vm_id, row.volume_id): row.vm_id for row in records.attachments.values()
    }
    private = {layout.qsd(vm_id): vm_id for vm_id in records.backends}
    items = []
    for directory in _children(layout.vms):
        owner = _owner(directory.name, list(records.backends))
        for path in _children(directory):
            if path.name == layout.qsd("x").name:
                known = path in private
                items.append(CensusItem(kind="file", name=str(path), owner=owner, known=known))
            elif _is_socket(path):
                known = path in exports
                items.append(CensusItem(kind="socket", name=str(path), owner=owner, known=known))
    return items


def _volumes(records: Records, files: FileBackend) -> list[CensusItem]:
    return [
        CensusItem(
            kind="file",
            name=str(files.home(name)),
            owner=name,
            known=name in records.volumes,
        )
        for name in files.found()
    ]


def _children(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _owner(short: str, vm_ids: list[str]) -> str:
    """Return the uid that a short one stands for, or the short one where no record has it."""
    return next((vm_id for vm_id in vm_ids if short_uid(vm_id) == short), short)
