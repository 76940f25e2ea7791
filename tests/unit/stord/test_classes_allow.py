"""Allowlists of devices, volume groups and servers."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from chv.common.errors import InvalidArgument, PermissionDenied
from chv.common.wire.stord import IscsiPlace, LvmPlace, NbdPlace, RbdPlace
from chv.stord import allow

TARGET = "iqn.2026-01.chv.test:disk"


def device(*names: str, allowed: list[str]) -> bool:
    try:
        allow.check_device([PurePosixPath(name) for name in names], allowed)
    except PermissionDenied as error:
        assert error.field == "backend.block.device"
        assert "storage.allowed_devices" in error.hint
        return False
    return True


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("/dev/sdb", "/dev/sdb", True),
        ("/dev/sdb1", "/dev/sdb", False),
        ("/dev/sdb", "/dev/sd*", True),
        ("/dev/sd", "/dev/sd*", True),
        ("/dev/nvme0n1", "/dev/sd*", False),
        ("/dev/vg/data", "/dev/vg/*", True),
        ("/dev/vg/data", "/dev/*", False),
        ("/dev/mapper/a-b", "/dev/mapper/a*", True),
        ("/dev/mapper", "/dev/mapper/*", False),
        ("/dev/sdb", "*", False),
        ("/dev/s*", "/dev/s*", True),
        ("/dev/sda", "/dev/s*a", False),
    ],
)
def test_a_trailing_star_stands_for_the_rest_of_the_last_component_only(
    name: str, pattern: str, expected: bool
) -> None:
    assert device(name, allowed=[pattern]) is expected


def test_an_empty_list_allows_nothing() -> None:
    assert not device("/dev/sdb", allowed=[])
    with pytest.raises(PermissionDenied):
        allow.check_volume_group(LvmPlace(volume_group="vg"), [])
    with pytest.raises(PermissionDenied):
        allow.check_remote(NbdPlace(host="a"), [])


def test_the_name_that_was_given_or_the_real_one_must_be_allowed() -> None:
    by_id = "/dev/disk/by-id/wwn-1"

    assert device(by_id, "/dev/sdb", allowed=["/dev/disk/by-id/wwn-1"])
    assert device(by_id, "/dev/sdb", allowed=["/dev/sdb"])
    assert not device(by_id, "/dev/sdb", allowed=["/dev/sdc"])


@pytest.mark.parametrize("name", ["/etc/passwd", "/dev/../etc/passwd", "/devices/sdb", "/"])
def test_what_is_no_name_of_a_device_is_invalid_whatever_the_list_says(name: str) -> None:
    with pytest.raises(InvalidArgument):
        allow.check_device([PurePosixPath(name)], [name, "/*"])


@pytest.mark.parametrize(
    ("place", "remote"),
    [
        (NbdPlace(host="store.example", port=10809), "nbd://store.example:10809"),
        (NbdPlace(host="fd00::1", port=1), "nbd://[fd00::1]:1"),
        (NbdPlace(socket="/run/n.sock", export="a"), "nbd+unix:///run/n.sock"),
        (IscsiPlace(host="10.0.0.1", target=TARGET, lun=3), f"iscsi://10.0.0.1:3260/{TARGET}"),
        (RbdPlace(pool="vms"), "rbd://vms"),
    ],
)
def test_a_server_is_allowed_by_the_name_that_the_configuration_has_for_it(
    place: allow.Remote, remote: str
) -> None:
    allow.check_remote(place, ["nbd://other:1", remote.upper()])

    with pytest.raises(PermissionDenied) as refused:
        allow.check_remote(place, [f"{remote}x", remote[:-1]])

    assert refused.value.field.startswith("backend.")
    assert repr(remote) in refused.value.hint


def test_a_socket_is_not_allowed_by_the_entry_of_a_host() -> None:
    with pytest.raises(PermissionDenied):
        allow.check_remote(NbdPlace(host="a", socket="/run/n.sock"), ["nbd://a:10809"])


def test_a_volume_group_is_allowed_by_its_exact_name() -> None:
    allow.check_volume_group(LvmPlace(volume_group="vg0"), ["vg0"])

    with pytest.raises(PermissionDenied, match="vg1"):
        allow.check_volume_group(LvmPlace(volume_group="vg1"), ["vg0", "vg*"])
