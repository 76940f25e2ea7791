"""What `chv fit` understands, and how it says what is wrong."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chv.cli.fit_grammar import groups_of, parse_group
from chv.common.errors import ChvError, InvalidArgument
from chv.common.wire.agent_inventory import FitDisk, FitGroup
from chv.common.wire.manifest import parse
from chv.common.wire.resources import Resource, VmmChoice
from chv.common.wire.types import API_VERSION

GIB = 1 << 30


def test_the_whole_grammar() -> None:
    group = parse_group("20x(2c, 4Gi, 40Gi, 1Ti@fast, net=lan)")
    disks = [FitDisk(size_bytes=40 * GIB), FitDisk(size_bytes=1 << 40, pool="fast")]
    assert group == FitGroup(count=20, cpus=2, memory_bytes=4 * GIB, disks=disks, networks=["lan"])
    assert parse_group("(1c,512Mi)") == FitGroup(count=1, cpus=1, memory_bytes=GIB // 2)


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("", "VMS", "are no VMs"),
        ("20", "VMS", "are no VMs"),
        ("20x2c,4Gi", "VMS", "are no VMs"),
        ("x(1c,1Gi)", "count", "not a number of VMs"),
        ("0x(1c,1Gi)", "count", "not a number of VMs"),
        ("-3x(1c,1Gi)", "count", "not a number of VMs"),
        ("20000x(1c,1Gi)", "count", "not a number of VMs"),
        ("2x()", "cpus", "are no CPUs"),
        ("2x(4Gi,2c)", "cpus", "are no CPUs"),
        ("2x(0c,4Gi)", "cpus", "not a number of virtual CPUs"),
        ("2x(2c)", "memory", "no memory is given"),
        ("2x(2c,4)", "memory", "has no unit"),
        ("2x(2c,4Gib)", "memory", "unknown unit"),
        ("2x(2c,0Gi)", "memory", "is nothing"),
        ("2x(2c,4Gi,40)", "disks[0]", "has no unit"),
        ("2x(2c,4Gi,1Gi,2Q)", "disks[1]", "unknown unit"),
        ("2x(2c,4Gi,1Gi@)", "disks[0].pool", ""),
        ("2x(2c,4Gi,net=)", "net", ""),
        ("1x(1c,1Gi" + ",1Gi" * 17 + ")", "disks", "17 are more than 16"),
    ],
)
def test_what_is_wrong_is_named_with_its_field(text: str, field: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_group(text)
    assert caught.value.field == field
    assert words in caught.value.message


@given(st.text(max_size=60) | st.from_regex(r"[0-9x(),.cGiMnet=@]{0,40}", fullmatch=True))
def test_any_text_is_understood_or_refused(text: str) -> None:
    try:
        group = parse_group(text)
    except ChvError as error:
        assert isinstance(error, InvalidArgument)
    else:
        again = msgspec.json.decode(msgspec.json.encode(group), type=FitGroup)
        assert again == group


def resources(*documents: tuple[str, str, dict[str, object]]) -> list[Resource]:
    return [
        parse(
            msgspec.Raw(
                msgspec.json.encode(
                    {
                        "apiVersion": API_VERSION,
                        "kind": kind,
                        "metadata": {"name": name},
                        "spec": spec,
                    }
                )
            )
        )
        for kind, name, spec in documents
    ]


def test_vms_of_a_file_take_space_for_the_volumes_that_it_defines() -> None:
    found = resources(
        ("Volume", "root", {"size": "8Gi", "format": "raw"}),
        ("Network", "lan", {"subnet": "10.0.0.0/24"}),
        (
            "VirtualMachine",
            "web",
            {
                "vmm": "qemu",
                "cpus": 2,
                "memory": "1Gi",
                "disks": [{"name": "a", "volume": "root"}, {"name": "b", "volume": "old"}],
                "interfaces": [{"name": "eth0", "network": "lan"}],
            },
        ),
    )
    (group,) = groups_of(found, 3)
    assert group == FitGroup(
        count=3,
        cpus=2,
        memory_bytes=GIB,
        disks=[FitDisk(size_bytes=8 * GIB, raw=True)],
        kept_disks=1,
        networks=["lan"],
        vmm=VmmChoice.QEMU,
    )
    with pytest.raises(InvalidArgument, match="no VirtualMachine"):
        groups_of(found[:2], 1)
