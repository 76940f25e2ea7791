"""Statuses as they are written."""

from __future__ import annotations

import msgspec
import pytest

from chv.common.wire.resources import (
    ImageStatus,
    NetworkStatus,
    VirtualMachineStatus,
    VolumeStatus,
)


@pytest.mark.parametrize("kind", [ImageStatus, VolumeStatus, NetworkStatus, VirtualMachineStatus])
def test_a_status_always_says_its_phase(kind: type[msgspec.Struct]) -> None:
    assert msgspec.json.decode(msgspec.json.encode(kind())) == {"phase": "Pending"}
    assert msgspec.json.decode(b"{}", type=kind) == kind(), "as earlier stores have it"
