"""Encryption keys: files of this node, written whole or not at all, and never read back.

`<namespace>/<name>` is `keys/<namespace>/<name>`, 0600 in 0700 directories. What is in a file is
the passphrase, byte for byte: text, since QEMU takes nothing else. It is in no store, log, reply
or error. A key that a volume needs, or may need, is not deleted.
"""

from __future__ import annotations

import base64
import binascii
from datetime import UTC, datetime
from pathlib import Path

import anyio
import anyio.to_thread

from chv.agent.chores import Came, Chores, Task, Way, Wish
from chv.agent.context import Context
from chv.agent.records import StoredObject
from chv.agent.side_verbs import CREATE_KEY, DELETE_KEY
from chv.common import logs
from chv.common.clock import timestamp
from chv.common.errors import (
    AlreadyExists,
    Conflict,
    FailedPrecondition,
    InUse,
    InvalidArgument,
    NotFound,
)
from chv.common.files import (
    atomic_create,
    ensure_dir,
    remove_temporaries,
    resolve_inside,
    sync_directory,
)
from chv.common.ids import passphrase
from chv.common.layout import Layout
from chv.common.wire import agent as api
from chv.common.wire import stord
from chv.common.wire.resources import Volume
from chv.common.wire.types import Done, Empty

log = logs.get(__name__)

KEY_BYTES_MIN, KEY_BYTES_MAX = 16, 4096


class Keys:
    """The keys of this node. Made and destroyed as operations; no bytes of a key are recorded."""

    def __init__(self, context: Context, chores: Chores) -> None:
        self._context = context
        self._chores = chores
        self._layout = context.world.layout
        self._lock = anyio.Lock()  # a writer tidies up after those that were killed
        chores.teach(CREATE_KEY, Way(self._create))
        chores.teach(DELETE_KEY, Way(self._destroy))

    async def put(self, request: api.PutKey) -> api.KeyInfo:
        """Make a key; AlreadyExists where the name was given before."""
        value = _decoded(request.key) if request.key else passphrase().encode()
        wish = _wish(CREATE_KEY, request)
        operation, known = await self._chores.begin(
            wish, check=lambda: self._refuse_taken(request), hand=value
        )
        await self._chores.outcome(operation.id)
        if known and request.key:
            await self._refuse_another(request, value)
        return self._info(request.namespace, request.name)

    async def _create(self, task: Task) -> Came:
        operation = task.operation
        name = f"{operation.namespace}/{operation.name}"
        if task.again:  # its bytes died with the agent, or are in the file
            if not exists(self._layout, operation.namespace, operation.name):
                raise FailedPrecondition(
                    "the agent ended before it was stored", resource=f"key {name}", hint="once more"
                )
            return Came("stored")
        async with self._lock:
            await anyio.to_thread.run_sync(
                _write, self._layout.keys, operation.namespace, operation.name, task.hand
            )
        log.info("agent.key.created", key=name, requester=operation.requester)
        return Came("stored")

    def _refuse_taken(self, request: api.PutKey) -> None:
        if exists(self._layout, request.namespace, request.name):
            raise _taken(request.namespace, request.name)

    async def _refuse_another(self, request: api.PutKey, value: bytes) -> None:
        """Refuse a repeated request with other bytes: they are not what was stored."""
        path = resolve_inside(self._layout.keys, f"{request.namespace}/{request.name}")
        if await anyio.to_thread.run_sync(path.read_bytes) != value:
            raise Conflict(
                "the first request under this key had other bytes",
                resource=f"key {request.namespace}/{request.name}",
                field="idempotency_key",
                hint="use a new key for a new request",
            )

    async def delete(self, request: api.DeleteKey) -> Done:
        """Destroy a key that no volume needs."""
        # What stord has counts as well: a rotation may be half-way.
        listed = (await self._context.volumes.fresh()).volumes
        operation, _ = await self._chores.begin(
            _wish(DELETE_KEY, request),
            check=lambda: self._refuse_needed(request.namespace, request.name, listed),
        )
        await self._chores.outcome(operation.id)
        return Done()

    async def _destroy(self, task: Task) -> Came:
        namespace, name = task.operation.namespace, task.operation.name
        listed = (await self._context.volumes.fresh()).volumes
        async with self._context.ledger.writing():
            if task.again and not exists(self._layout, namespace, name):
                return Came("destroyed")
            self._refuse_needed(namespace, name, listed)
            await anyio.to_thread.run_sync(_remove, self._layout.keys, namespace, name)
        log.info("agent.key.deleted", key=f"{namespace}/{name}", requester=task.operation.requester)
        return Came("destroyed")

    def _refuse_needed(self, namespace: str, name: str, listed: list[stord.VolumeInfo]) -> None:
        if not exists(self._layout, namespace, name):
            raise NotFound(f"there is no key {namespace}/{name}")
        users = self._users(namespace, name)
        users += self._rotating(namespace, listed, f"{namespace}/{name}")
        if users:
            words = ", ".join(sorted(set(users)))
            raise InUse(
                f"volume {words} needs it, or may until its rotation is done",
                resource=f"key {namespace}/{name}",
                hint="give the volume another key, or delete it",
            )

    def unused(self) -> int:
        """Return how many keys no volume names. Blocking, but a directory is all it reads."""
        return sum(not self._users(*each) for each in _names(self._layout.keys))

    async def list_all(self, request: Empty) -> api.KeysReply:
        """Return every key by name."""
        found = await anyio.to_thread.run_sync(_names, self._layout.keys)
        return api.KeysReply(keys=[self._info(namespace, name) for namespace, name in found])

    def _info(self, namespace: str, name: str) -> api.KeyInfo:
        path = self._layout.keys / namespace / name
        try:
            changed = path.lstat().st_mtime
        except FileNotFoundError as error:
            raise NotFound(f"there is no key {namespace}/{name}") from error
        return api.KeyInfo(
            name=name,
            namespace=namespace,
            created_at=timestamp(datetime.fromtimestamp(changed, UTC)),
            used_by=self._users(namespace, name),
        )

    def _users(self, namespace: str, name: str) -> list[str]:
        volumes = self._context.ledger.tables.of_kind("Volume")
        return [stored.key[2] for stored in volumes if _names_key(stored, namespace, name)]

    def _rotating(self, namespace: str, listed: list[stord.VolumeInfo], key_name: str) -> list[str]:
        """Return the volumes of a namespace that are not, or not yet, at the key they name."""
        found = []
        seen = {info.volume_id: info for info in listed}
        for stored in self._context.ledger.tables.of_kind("Volume"):
            volume, info = stored.resource, seen.get(stored.uid)
            assert isinstance(volume, Volume)
            if stored.key[1] != namespace or volume.spec.encryption is None:
                continue
            settled = info is not None and info.encryption_key == (
                f"{namespace}/{volume.spec.encryption.key}"
            )
            if not settled or (info is not None and info.encryption_key == key_name):
                found.append(stored.key[2])
        found += [info.volume_id for info in listed if info.encryption_key == key_name]
        return found


def exists(layout: Layout, namespace: str, name: str) -> bool:
    """Tell whether there is a key of that name."""
    return (layout.keys / namespace / name).is_file()


def _names_key(stored: StoredObject, namespace: str, name: str) -> bool:
    volume = stored.resource
    if not isinstance(volume, Volume) or stored.key[1] != namespace:
        return False
    wanted = volume.spec.encryption is not None and volume.spec.encryption.key == name
    return wanted or (volume.status is not None and volume.status.encryption_key == name)


def _decoded(text: str) -> bytes:
    """Return the passphrase; an error has nothing of it."""
    try:
        value = base64.b64decode(text, validate=True)
        value.decode()
    except (binascii.Error, UnicodeDecodeError):
        value = b""
    if not value or b"\0" in value:
        raise InvalidArgument(
            "its bytes are not UTF-8 text without NUL, or did not come as base64",
            field="key",
            hint="give text, such as `openssl rand -base64 32` makes, or have one made at random",
        )
    if not KEY_BYTES_MIN <= len(value) <= KEY_BYTES_MAX:
        raise InvalidArgument(
            f"it has {len(value)} bytes", field="key", hint=f"{KEY_BYTES_MIN} to {KEY_BYTES_MAX}"
        )
    return value


def _write(keys: Path, namespace: str, name: str, value: bytes) -> None:
    ensure_dir(keys, mode=0o700)
    directory = keys / namespace
    ensure_dir(directory, mode=0o700)
    remove_temporaries(directory)
    path = resolve_inside(keys, f"{namespace}/{name}")
    if not atomic_create(path, value, mode=0o600):
        raise _taken(namespace, name)


def _taken(namespace: str, name: str) -> AlreadyExists:
    return AlreadyExists(
        f"there is a key {namespace}/{name}",
        resource=f"key {namespace}/{name}",
        hint="a name is used once: take another",
    )


def _wish(verb: str, request: api.PutKey | api.DeleteKey) -> Wish:
    return Wish(
        verb=verb,
        kind="Key",
        namespace=request.namespace,
        name=request.name,
        requester=request.requester,
        reason=request.reason,
        idempotency_key=request.idempotency_key,
    )


def _remove(keys: Path, namespace: str, name: str) -> None:
    path = resolve_inside(keys, f"{namespace}/{name}")
    try:
        path.unlink()
    except FileNotFoundError as error:
        raise NotFound(f"there is no key {namespace}/{name}") from error
    sync_directory(path.parent)


def _names(keys: Path) -> list[tuple[str, str]]:
    if not keys.is_dir():
        return []
    return sorted(
        (path.parent.name, path.name)
        for path in keys.glob("*/*")
        if path.is_file() and not path.name.startswith(".")
    )
