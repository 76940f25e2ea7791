"""Merges a user's cloud-config into ours. Pure.

Lists of ours come first and the user's are appended; any other key of the user's wins, except
those that pin the host key. User-data that is not a cloud-config mapping is refused: a script or
a multipart message could not be checked for that.
"""

from __future__ import annotations

import json
from typing import Any

from chv.common.errors import InvalidArgument

FIELD = "spec.cloudInit.userData"
USER_DATA_BYTES_MAX = 256 << 10
PINNED = ("ssh_keys", "ssh_deletekeys", "ssh_genkeytypes")


def check_user_data(text: str) -> None:
    """Raise where no seed could be made of `text`, before there is anything to merge it into."""
    merge_user_data({"ssh_authorized_keys": []}, text)


def merge_user_data(ours: dict[str, Any], text: str) -> dict[str, Any]:
    """Return `ours` with the cloud-config `text` merged in."""
    merged = dict(ours)
    for key, value in parse(text).items():
        if key in PINNED:
            raise InvalidArgument(
                f"{key} is set by CHV, which pins the host key",
                field=FIELD,
                hint="remove it",
            )
        if key in ours and isinstance(ours[key], list):
            merged[key] = ours[key] + _as_list(key, value)
        else:
            merged[key] = value
    return merged


def parse(text: str) -> dict[str, Any]:
    """Return the mapping that a cloud-config text holds; empty text is an empty mapping."""
    if len(text.encode()) > USER_DATA_BYTES_MAX:
        raise InvalidArgument(f"longer than {USER_DATA_BYTES_MAX} bytes", field=FIELD)
    first = text.lstrip().partition("\n")[0]
    if first.startswith(("#!", "#include", "#part-handler", "MIME-", "Content-Type:")):
        raise InvalidArgument(
            f"{first[:40]!r} is not supported",
            field=FIELD,
            hint="use a #cloud-config mapping; runcmd runs commands",
        )
    if not text.strip():
        return {}
    from chv.guest import cloud_yaml

    try:
        value = cloud_yaml.load(text)
        # cloud-init gets JSON: what has no JSON form is an error here and not in the guest.
        json.dumps(value)
    except cloud_yaml.Alias as error:
        raise InvalidArgument("YAML aliases are not allowed", field=FIELD) from error
    except (cloud_yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        reason = str(error).replace("\n", " ")[:200]
        raise InvalidArgument(f"not a cloud-config: {reason}", field=FIELD) from error
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InvalidArgument(
            "not a cloud-config mapping", field=FIELD, hint="key: value lines after #cloud-config"
        )
    return value


def _as_list(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidArgument(f"{key} must be a list", field=FIELD)
    return value
