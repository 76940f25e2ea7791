"""Who may name files of the node: root alone. Others send the bytes that they can read.

The agent reads as root, so a path from another user would be read with rights that it has not.
Pure.
"""

from __future__ import annotations

import msgspec

from chv.common.errors import PermissionDenied


class _File(msgspec.Struct):
    path: str = ""


class _Spec(msgspec.Struct):
    kernel: _File | None = None
    initramfs: _File | None = None
    disk: _File | None = None


class _Kind(msgspec.Struct):
    kind: str = ""


class _Image(msgspec.Struct):
    spec: _Spec | None = None


def path_refused(path: str, field: str) -> PermissionDenied:
    """Return the refusal of a path that somebody other than root named."""
    return PermissionDenied(
        f"only root may import {path!r} by its path",
        field=field,
        hint="`chv image import` sends a file that you can read; or give a url",
    )


def refuse_paths(raw: msgspec.Raw) -> None:
    """Refuse an Image with a path; what is no readable Image is admission's to refuse."""
    try:
        if msgspec.json.decode(raw, type=_Kind).kind != "Image":
            return
        spec = msgspec.json.decode(raw, type=_Image).spec
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return
    for name in ("kernel", "initramfs", "disk"):
        file = getattr(spec, name, None)
        if file is not None and file.path:
            raise path_refused(file.path, f"spec.{name}.path")
