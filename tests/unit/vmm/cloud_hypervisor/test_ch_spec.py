"""What a VmmConfig becomes, and what is refused before anything is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from chv.common.errors import ChvError, Internal, InvalidArgument, Unsupported
from chv.common.process.procfs import worker_ids
from chv.vmm.cloud_hypervisor import spec
from chv.vmm.driver import DiskConfig, NicConfig, VmmConfig

MIB = 1 << 20
CONFIG = VmmConfig(
    vm_id="0b7a6b0e-0000-4000-8000-000000000001",
    uuid="0b7a6b0e-0000-4000-8000-000000000001",
    name="web",
    worker_id="chv:abcdef:vmm:0b7a6b0e00:12345678",
    cpus=2,
    cpus_max=4,
    memory_bytes=512 * MIB,
    memory_max_bytes=1024 * MIB,
    kernel="/img/kernel",
    initramfs="/img/initramfs",
    cmdline="console=ttyS0",
    disks=(
        DiskConfig(id="root", kind="vhost-user-blk", path="/run/chv/x/root.sock"),
        DiskConfig(id="seed", kind="file", path="/img/seed", read_only=True),
    ),
    nics=(NicConfig(id="net0", mac="52:54:00:00:00:01", queues=2),),
    runtime_dir="/run/chv/x/vm/0b7a/vmm",
    save_dir="/run/chv/x/save",
)


def body(config: VmmConfig = CONFIG, *, landlock: bool = True) -> dict[str, Any]:
    return spec.vm_config(config, version=(53, 0), landlock=landlock)


def test_the_whole_configuration_is_this() -> None:
    assert body() == {
        "payload": {
            "kernel": "/img/kernel",
            "cmdline": "console=ttyS0",
            "initramfs": "/img/initramfs",
        },
        "cpus": {"boot_vcpus": 2, "max_vcpus": 4, "nested": False},
        "memory": {
            "size": 512 * MIB,
            "shared": True,
            "hotplug_method": "Acpi",
            "hotplug_size": 512 * MIB,
        },
        "disks": [
            {
                "id": "disk-root",
                "vhost_user": True,
                "vhost_socket": "/run/chv/x/root.sock",
                "num_queues": 1,
                "queue_size": 128,
            },
            {"id": "disk-seed", "path": "/img/seed", "readonly": True, "image_type": "Raw"},
        ],
        "rng": {"src": "/dev/urandom"},
        "serial": {"mode": "Socket", "socket": "serial.sock"},
        "console": {"mode": "Off"},
        "pvpanic": True,
        "platform": {"system_uuid": CONFIG.uuid},
        "landlock_enable": True,
        "landlock_rules": [
            {"path": ".", "access": "rw"},
            {"path": "/run/chv/x/save", "access": "rw"},
        ],
    }


def test_an_older_version_is_told_the_uuid_under_its_older_name() -> None:
    told = spec.vm_config(CONFIG, version=(52, 0), landlock=False)
    assert told["platform"] == {"uuid": CONFIG.uuid}
    assert "landlock_enable" not in told


def test_a_nic_has_two_queues_for_each_descriptor_and_no_mtu() -> None:
    nic = CONFIG.nics[0]
    assert spec.nic_config(nic, (7, 8)) == {
        "id": "nic-net0",
        "mac": "52:54:00:00:00:01",
        "num_queues": 4,
    }
    with pytest.raises(InvalidArgument, match="1 descriptors for 2 queues"):
        spec.nic_config(nic, (7,))


def test_the_process_inherits_its_socket_and_its_events_and_carries_its_id_once() -> None:
    launch = spec.launch(CONFIG, "/opt/ch", groups=(36,), private_kvm=True)
    assert launch.argv[0] == "/opt/ch"
    assert worker_ids(launch.argv) == [CONFIG.worker_id]
    home = Path(CONFIG.runtime_dir).parent
    assert launch.listeners == {10: str(home / "api.sock")}
    assert launch.appended == {11: str(home / "events.log")}
    assert (launch.groups, launch.private_kvm) == ((36,), True)
    assert launch.nic_fds == {}
    assert launch.cwd == CONFIG.runtime_dir
    assert launch.environment == {}
    assert "--no-shutdown" in launch.argv


def test_memory_is_whole_mebibytes_and_its_room_whole_steps() -> None:
    config = msgspec.structs.replace(CONFIG, memory_bytes=1, memory_max_bytes=0)
    assert body(config)["memory"] == {"size": MIB, "shared": True}
    config = msgspec.structs.replace(CONFIG, memory_max_bytes=600 * MIB)
    with pytest.raises(InvalidArgument) as caught:
        body(config)
    assert str(512 * MIB) in caught.value.hint


@pytest.mark.parametrize(
    ("changed", "kind", "field"),
    [
        ({"kernel": ""}, Unsupported, "spec.boot"),
        ({"kernel": "img/kernel"}, InvalidArgument, "kernel"),
        ({"cmdline": "a\nb"}, InvalidArgument, "cmdline"),
        ({"cmdline": "x" * 2048}, InvalidArgument, "cmdline"),
        ({"cpus": 0}, InvalidArgument, "cpus"),
        ({"cpus_max": 256}, InvalidArgument, "cpus"),
        ({"memory_bytes": 0}, InvalidArgument, "memory_bytes"),
        ({"uuid": "x"}, InvalidArgument, "uuid"),
        ({"worker_id": "chv:x"}, InvalidArgument, "worker_id"),
        ({"runtime_dir": "/" + "x" * 100}, InvalidArgument, "node.run_dir"),
        ({"disks": (CONFIG.disks[0],) * 2}, InvalidArgument, "disks"),
        ({"nics": (CONFIG.nics[0],) * 2}, InvalidArgument, "nics"),
        (
            {"disks": (DiskConfig(id="a", kind="file", path="/a"),)},
            InvalidArgument,
            "disks[0].read_only",
        ),
        ({"disks": (DiskConfig(id="a", kind="nfs", path="/a"),)}, InvalidArgument, "disks[0].kind"),
        (
            {"disks": (DiskConfig(id="__a", kind="vhost-user-blk", path="/a"),)},
            InvalidArgument,
            "disks[0].id",
        ),
        ({"nics": (NicConfig(id="n", mac="x"),)}, InvalidArgument, "nics.mac"),
        (
            {"nics": tuple(NicConfig(id=f"n{i}", mac="52:54:00:00:00:01") for i in range(29))},
            Unsupported,
            "disks",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_process_exists(
    changed: dict[str, Any], kind: type[ChvError], field: str
) -> None:
    with pytest.raises(kind) as caught:
        spec.launch(msgspec.structs.replace(CONFIG, **changed), "/opt/ch")
    assert caught.value.field == field


def test_a_key_that_the_vmm_passed_over_is_named() -> None:
    sent = body()
    reported: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(sent))
    spec.check_reported(sent, reported | {"more": 1})
    del reported["memory"]["shared"]
    with pytest.raises(Internal, match=r"memory\.shared"):
        spec.check_reported(sent, reported)
    reported["memory"]["shared"] = True
    reported["disks"][1]["image_type"] = "Unknown"
    with pytest.raises(Internal, match=r"disks\[1\].image_type = 'Raw'"):
        spec.check_reported(sent, reported)
    with pytest.raises(Internal, match=r"disks\[0\]"):
        spec.check_reported(sent, reported | {"disks": []})
    with pytest.raises(Internal, match="platform"):
        spec.check_reported(sent, reported | {"disks": sent["disks"], "platform": None})


def test_an_empty_list_may_be_left_out_of_a_report() -> None:
    spec.check_reported({"disks": [], "pvpanic": False}, {})


def test_a_snapshot_gets_the_paths_of_its_new_vm_and_keeps_what_the_guest_knows() -> None:
    saved = body()
    saved |= {"net": [{"id": "nic-net0", "mac": "52:54:00:00:00:01", "num_queues": 4}]}
    saved["disks"][0]["serial"] = "kept"
    config = msgspec.structs.replace(
        CONFIG,
        runtime_dir="/run/chv/y",
        disks=(msgspec.structs.replace(CONFIG.disks[0], path="/run/chv/y.sock"), CONFIG.disks[1]),
    )
    made = spec.restored(saved, config, version=(53, 0), landlock=False)
    assert made["serial"]["socket"] == "serial.sock"  # of whichever directory the VMM is in
    assert made["disks"][0]["vhost_socket"] == "/run/chv/y.sock"
    assert made["disks"][0]["serial"] == "kept"
    assert made["memory"] == saved["memory"]
    assert made["net"] == saved["net"]
    assert made["landlock_enable"] is False
    with pytest.raises(InvalidArgument, match="nic-net0"):
        bare = msgspec.structs.replace(config, nics=())
        spec.restored(saved, bare, version=(53, 0), landlock=False)


def test_a_version_is_known_by_its_first_number() -> None:
    assert [spec.major(text) for text in ("53.0.0", "v54.1", "", "x")] == [53, 54, 0, 0]
