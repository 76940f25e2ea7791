"""A volume from a backup: the chain of files is checked, then copied into the new, empty volume.

The files are opened in the order that `backup.json` gives, with formats declared; what their own
headers say of others was refused before. Each may have a key of its own, as may the volume.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio.to_thread

from chv.common.errors import InvalidArgument, NotFound, PermissionDenied
from chv.common.wire.stord import VolumeBackend
from chv.stord import backup_files
from chv.stord.backup_files import Entry
from chv.stord.cancelling import cancellable
from chv.stord.jobs import JobControl
from chv.stord.overlays import read_keys
from chv.stord.qsd import graph
from chv.stord.records import Volume
from chv.stord.takeover import padding_bytes, reads_zeros
from chv.stord.tools import Call, Fresh, check_reachable
from chv.stord.work import Parts


class Restores:
    """Fills volumes from backups."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def check(self, spec: VolumeBackend) -> tuple[Path, list[Entry]]:
        """Return the directory and the backups that the spec needs, or refuse it; blocks."""
        source = spec.backup
        assert source is not None
        directory = backup_files.resolve_target(source.target, self._parts.storage.backup_paths)
        manifest = backup_files.load(directory)
        if manifest is None:
            raise NotFound(
                f"{source.target!r} holds no {backup_files.MANIFEST}", field="backend.backup.target"
            )
        entries = backup_files.chain(manifest, source.sequence)
        needed = max(entry.size_bytes for entry in entries)
        if spec.size_bytes < needed:
            raise InvalidArgument(
                f"{spec.size_bytes} bytes are less than the {needed} of the backup",
                field="backend.size_bytes",
                hint=f"at least {needed}",
            )
        for entry in entries:
            _check_key(entry, spec)
        return directory, entries

    async def fill(self, control: JobControl, row: Volume) -> None:
        """Copy the state of the backup into the volume, which is new."""
        directory, entries = await anyio.to_thread.run_sync(self.check, row.backend)
        files = []
        for index, entry in enumerate(entries):
            await control.progress(index, len(entries), f"checking backup {entry.sequence}")
            control.refuse_cancelled()
            verify = partial(backup_files.verify, directory, entry)
            check_reachable(await anyio.to_thread.run_sync(verify))
            files.append(backup_files.file_of(directory, entry.sequence))
        await control.progress(0, entries[-1].size_bytes, "copying")
        target = await anyio.to_thread.run_sync(
            self._parts.disks.layer, row.volume_id, row.layers[0].number
        )
        names = {entry.key for entry in entries if entry.key} | ({row.key} if row.key else set())
        call = Call(
            owns=tuple(self._parts.disks.paths(row.volume_id)),
            reads=tuple(files),
            keys=await read_keys(self._parts.layout, row.volume_id, names),
            volume_id=row.volume_id,
        )
        node = graph.image_node(target, graph.secret_id(row.volume_id, target.key))
        if target.format == "qcow2":
            node["backing"] = None
        source = source_node(row.volume_id, list(zip(entries, files, strict=True)))
        fresh = Fresh(
            zeros=reads_zeros(row.backend),
            padding_bytes=padding_bytes(row.backend, entries[-1].size_bytes),
        )
        convert = self._parts.tools.convert
        copying = partial(convert, source, node, call, control.percent, fresh=fresh)
        async with self._parts.disks.reach(row.volume_id):
            await cancellable(control, copying)


def _check_key(entry: Entry, spec: VolumeBackend) -> None:
    """An encrypted backup goes to an encrypted volume of the tenant whose key it has, only.

    `backup.json` names the key: it must not open to one tenant what another has encrypted.
    """
    if not entry.key:
        return
    tenant = entry.key.partition("/")[0]
    if spec.encryption is None or spec.encryption.key.partition("/")[0] != tenant:
        raise PermissionDenied(
            f"backup {entry.sequence} is encrypted with a key of namespace {tenant}",
            field="backend.encryption",
            hint=f"restore it into a volume of {tenant} that has encryption.key",
        )


def source_node(volume_id: str, files: list[tuple[Entry, Path]]) -> graph.Node:
    """Describe the chain of backups as one disk."""
    below: graph.Node | None = None
    for entry, path in files:
        layer = graph.LayerNode(
            number=0,
            format="qcow2",
            protocol=graph.Protocol(driver="file", options={"filename": str(path)}, direct=False),
            key=entry.key or "",
        )
        node = graph.image_node(layer, graph.secret_id(volume_id, layer.key))
        below = node | {"backing": below}
    assert below is not None
    return below
