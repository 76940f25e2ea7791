"""What Cloud Hypervisor's API does, asserted alike on the real v53 and on its double.

`real` is upstream's program (CHV_CLOUD_HYPERVISOR, or found by PATH), `tolerant` a developer's
build of it that can take snapshots on a KVM without nested state (CHV_CLOUD_HYPERVISOR_TOLERANT).
A difference that is found here becomes the double's behaviour and a line of
docs/cloud-hypervisor.md, never an exception in a test.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import taps_of
from tests.integration.cloud_hypervisor_api import (
    PROBE,
    READY,
    Answer,
    Line,
    Viewer,
    Vmm,
    encode,
    running,
    spawn,
    switched,
    timed_s,
    wait_for,
)

KINDS = ("double", "real", "tolerant")
MOVING = ("double", "tolerant")  # that can take a snapshot on every KVM
MIB = 1 << 20
NEVER = (1 << 64) - 1
NO_VM = ["VM is not running"]


@pytest.fixture(params=KINDS)
def vmm(request: pytest.FixtureRequest) -> Iterator[Vmm]:
    with running(request.param) as made:
        yield made


@pytest.fixture(params=MOVING)
def moving(request: pytest.FixtureRequest) -> Iterator[Vmm]:
    with running(request.param) as made:
        yield made


@contextmanager
def tap(*, up: bool = True) -> Iterator[int]:
    if not os.access("/dev/net/tun", os.W_OK) or os.geteuid():
        pytest.skip("needs root and /dev/net/tun")
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = fcntl.ioctl(fd, 0x400454CA, struct.pack("16sH22x", b"chvtst%d", 0x5002))
        name = found[:16].rstrip(b"\0").decode()
        subprocess.run(["ip", "link", "set", name, "up" if up else "down"], check=True)
        yield fd
    finally:
        os.close(fd)


def tap_name(fd: int) -> str:
    return fcntl.ioctl(fd, 0x800454D2, bytes(40))[:16].rstrip(b"\0").decode()


# --- the server


def test_ping_tells_version_pid_and_features_with_an_empty_reason_phrase(vmm: Vmm) -> None:
    answer = vmm.get("vmm.ping")
    lines = answer.head.split(b"\r\n")
    assert lines[:4] == [
        b"HTTP/1.1 200 ",
        b"Server: Cloud Hypervisor API",
        b"Connection: keep-alive",
        b"Content-Type: application/json",
    ]
    found = answer.json
    assert found["version"].startswith("53.") and found["build_version"].startswith("v53.")
    assert found["pid"] == vmm.process.pid
    assert "kvm" in found["features"]


def test_no_content_has_neither_type_nor_length(vmm: Vmm) -> None:
    head = vmm.put("vm.delete").head
    assert head.split(b"\r\n") == [
        b"HTTP/1.1 204 ",
        b"Server: Cloud Hypervisor API",
        b"Connection: keep-alive",
    ]


@pytest.mark.parametrize("path", ["vmm.ping?x=1", "vmm.ping/", "nope", "vm.coredump", ""])
def test_a_path_that_is_not_exact_is_not_found(vmm: Vmm, path: str) -> None:
    answer = vmm.put(path) if path == "vm.coredump" else vmm.get(path)
    assert (answer.status, answer.json) == (404, ["Not Found"])


@pytest.mark.parametrize(
    ("method", "name", "body"),
    [
        ("GET", "vm.boot", None),
        ("PUT", "vm.info", None),
        ("PUT", "vmm.ping", None),
        ("PUT", "vm.counters", None),
        ("PUT", "vm.boot", {}),
        ("PUT", "vm.pause", {}),
        ("PUT", "vm.remove-device", None),
        ("PUT", "vm.add-net", None),
        ("PUT", "vm.resize", None),
        ("PUT", "vm.snapshot", None),
        ("PUT", "vm.restore", None),
        ("PUT", "vm.send-migration", None),
    ],
)
def test_a_method_or_a_body_that_does_not_belong_is_a_bad_request(
    vmm: Vmm, method: str, name: str, body: Any
) -> None:
    with vmm.line() as line:
        answer = line.call(method, name, body)
    assert (answer.status, answer.json) == (400, ["Bad Request"])
    assert vmm.get("vmm.ping").status == 200


def test_a_body_of_no_bytes_is_none_and_a_get_may_have_one(vmm: Vmm) -> None:
    assert vmm.put("vm.delete", b"").status == 204
    with vmm.line() as line:
        assert line.call("GET", "vmm.ping", {}).status == 200


def test_create_without_a_body_and_patch_are_refused_without_a_word(vmm: Vmm) -> None:
    assert (vmm.put("vm.create").status, vmm.put("vm.create").body) == (400, b"")
    with vmm.line() as line:
        answer = line.call("PATCH", "vm.boot")
    assert (answer.status, answer.body) == (400, b"")


@pytest.mark.parametrize(
    ("request_bytes", "message"),
    [
        (encode("POST", "vm.boot"), "Invalid HTTP Method: Unsupported HTTP method."),
        (encode("DELETE", "vm.boot"), "Invalid HTTP Method: Unsupported HTTP method."),
        (b"GET / HTTP/2.0\r\n\r\n", "Invalid HTTP Version: Unsupported HTTP version."),
        (b"hello\r\n\r\n", "Invalid request."),
        (b"GET /" + b"a" * 1100 + b" HTTP/1.1\r\n\r\n", "Invalid request."),
        (
            b"GET /api/v1/vmm.ping HTTP/1.1\r\nnocolon\r\n\r\n",
            "Invalid header. Reason: Header is incorrectly formatted. Key: nocolon",
        ),
        (
            b"GET /api/v1/vmm.ping HTTP/1.1\r\nX: " + b"a" * 1100 + b"\r\n\r\n",
            "Invalid header. Reason: Invalid content length. Header: X: a",
        ),
        (
            b"PUT /api/v1/vm.boot HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
            "Invalid header. Reason: Invalid value. Key:Content-Length; Value: -1",
        ),
        (
            b"GET /api/v1/vmm.ping HTTP/1.1\r\nAccept-Encoding: identity;q=0\r\n\r\n",
            "Invalid header. Reason: Invalid value. Key:Accept-Encoding; Value:identity;q=0",
        ),
        (
            encode("GET", "vmm.ping") + b"hello\r\n\r\n",  # takes the good one with it
            "Invalid request.",
        ),
        (
            b"PUT /api/v1/vm.create HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
            "Invalid request.",
        ),
        (
            b"PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: 51201\r\n\r\n",
            "Request payload with size 51201 is larger than the limit of 51200 allowed by server.",
        ),
    ],
)
def test_what_breaks_the_protocol_gets_an_object_that_is_no_strict_json(
    vmm: Vmm, request_bytes: bytes, message: str
) -> None:
    answer = vmm.raw(request_bytes)
    assert answer.head.split(b"\r\n")[:2] == [b"HTTP/1.1 400 ", b"Server: Firecracker API"]
    with pytest.raises(ValueError, match="control character"):
        json.loads(answer.body)
    assert answer.json["error"].startswith(message)
    assert answer.json["error"].endswith("\nAll previous unanswered requests will be dropped.")
    assert vmm.get("vmm.ping").status == 200  # on a connection of its own


def test_a_chunked_body_is_not_seen_as_one(vmm: Vmm) -> None:
    answer = vmm.raw(b"PUT /api/v1/vm.create HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert (answer.status, answer.body) == (400, b"")


def test_a_body_may_have_51200_bytes(vmm: Vmm) -> None:
    answer = vmm.put("vm.create", b"{" + b" " * 51198 + b"}")
    assert answer.status == 204
    vmm.did("vm.delete")


def test_requests_may_come_in_pieces_and_in_rows_and_no_connection_is_closed(vmm: Vmm) -> None:
    with vmm.line() as line:
        for piece in (b"GET /api/v1/vm", b"m.ping HTTP/1.0\r\nConnection: cl", b"ose\r\n\r\n"):
            line.send(piece)
        assert line.answer().status == 200
        line.send(encode("GET", "vmm.ping") * 2 + encode("GET", "nope"))
        assert [line.answer().status for _ in range(3)] == [200, 200, 404]
        line.send(b"GET http://localhost/api/v1/vmm.ping HTTP/1.1\r\nHost: x\r\n\r\n")
        assert line.answer().status == 200


def test_a_client_may_wait_before_it_sends_the_body(vmm: Vmm) -> None:
    with vmm.line() as line:
        head = b"PUT /api/v1/vm.create HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n"
        line.send(head + b"\r\n")
        assert line.answer().status == 100
        line.send(b"{}")
        assert line.answer().status == 204


def test_the_eleventh_connection_is_turned_away_without_a_whole_status_line(vmm: Vmm) -> None:
    lines = [vmm.line() for _ in range(10)]
    assert [line.call("GET", "vmm.ping").status for line in lines] == [200] * 10
    with vmm.line() as one_more:
        answer = one_more.answer()
        assert answer.head.split(b"\r\n")[0] == b"HTTP/1.1 503"  # not even a blank after it
        assert b"Connection: close" in answer.head
        assert answer.json == {"error": "Too many open connections"}
        assert one_more.answer() == Answer()
    assert lines[0].call("GET", "vmm.ping").status == 200
    lines[1].channel.close()

    def there_is_room() -> bool:
        with vmm.line() as line, suppress(BrokenPipeError):
            return line.call("GET", "vmm.ping").status == 200
        return False

    wait_for(there_is_room, what="room for a tenth connection")


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("vm.create", b"{nope", "key must be a string"),
        ("vm.create", b"3", "invalid type: integer `3`, expected struct VmConfig"),
        ("vm.create", {"cpus": {"boot_vcpus": 1}}, "missing field `max_vcpus`"),
        (
            "vm.create",
            {"cpus": {"boot_vcpus": "a", "max_vcpus": 1}},
            'invalid type: string "a", expected u32',
        ),
        (
            "vm.create",
            {"serial": {"mode": "Foo"}},
            "unknown variant `Foo`, expected one of `Off`, `Pty`, `Tty`, `File`, `Socket`, `Null`",
        ),
        (
            "vm.add-disk",
            {"path": "/x", "rate_limiter_config": {"zz": 1}},
            "unknown field `zz`, expected `bandwidth` or `ops`",
        ),
        (
            "vm.add-disk",
            {"image_type": "raw"},
            "unknown variant `raw`, expected one of `FixedVhd`, `Qcow2`, `Raw`, `Vhdx`, `Unknown`",
        ),
        ("vm.add-disk", {"readonly": "no"}, 'invalid type: string "no", expected a boolean'),
        ("vm.add-net", {"id": 3}, "invalid type: integer `3`, expected a string"),
        ("vm.add-vsock", {"cid": 3}, "missing field `socket`"),
        ("vm.remove-device", {}, "missing field `id`"),
        ("vm.restore", {}, "missing field `source_url`"),
        ("vm.send-migration", {}, "missing field `destination_url`"),
    ],
)
def test_a_body_that_is_not_understood_says_what_and_where(
    vmm: Vmm, name: str, body: Any, message: str
) -> None:
    answer = vmm.put(name, body)
    assert answer.status == 400
    first, second = answer.json
    assert first == "Failed to deserialize JSON"
    text, at, column = second.partition(" at line 1 column ")
    assert (text, bool(at), column.isdigit()) == (message, True, True)


# --- without a VM


@pytest.mark.parametrize(
    ("name", "body", "status", "messages"),
    [
        ("vm.boot", None, 404, ["The VM could not boot", "VM config is missing"]),
        ("vm.reboot", None, 404, ["The VM could not reboot", "VM is not created"]),
        ("vm.shutdown", None, 500, ["The VM could not shutdown", *NO_VM]),
        ("vm.pause", None, 500, ["The VM could not be paused", *NO_VM]),
        ("vm.resume", None, 500, ["The VM could not resume", *NO_VM]),
        ("vm.power-button", None, 500, ["Error triggering power button", *NO_VM]),
        ("vm.nmi", None, 500, ["Error triggering NMI", *NO_VM]),
        ("vm.resize", {}, 404, ["The VM could not be resized", "VM is not created"]),
        (
            "vm.resize-disk",
            {"id": "a", "desired_size": 512},
            404,
            ["The disk could not be resized", "VM is not created"],
        ),
        (
            "vm.remove-device",
            {"id": "a"},
            404,
            ["The device could not be removed from the VM", "VM is not created"],
        ),
        (
            "vm.add-disk",
            {"path": "/x"},
            404,
            ["The disk could not be added to the VM", "VM is not created"],
        ),
        (
            "vm.add-net",
            {"id": "n"},
            404,
            ["The network device could not be added to the VM", "VM is not created"],
        ),
        (
            "vm.snapshot",
            {"destination_url": "file:///nope"},
            500,
            ["The VM could not be snapshotted", *NO_VM],
        ),
        (
            "vm.send-migration",
            {"destination_url": "unix:/nope"},
            500,
            [
                "Error dispatching the migration worker",
                "Failed to send migratable component snapshot",
                *NO_VM,
            ],
        ),
    ],
)
def test_without_a_vm(vmm: Vmm, name: str, body: Any, status: int, messages: list[str]) -> None:
    assert vmm.refused(name, body, status=status) == messages


def test_without_a_vm_there_is_no_info_and_delete_has_no_effect(vmm: Vmm) -> None:
    info, counters = vmm.get("vm.info"), vmm.get("vm.counters")
    assert (info.status, counters.status) == (404, 500)
    assert info.errors == ["The VM info is not available", "VM is not created"]
    assert counters.errors == ["The VM info is not available", *NO_VM]
    for _ in range(2):
        vmm.did("vm.delete")
    vmm.did("vm.create", {})
    vmm.did("vm.delete")
    vmm.told("vmm/starting", "vm/deleted")


def test_events_of_attempts_come_before_the_refusal(vmm: Vmm) -> None:
    vmm.refused("vm.boot", status=404)
    vmm.refused("vm.reboot", status=404)
    vmm.refused("vm.pause")
    vmm.told("vmm/starting", "vm/booting", "vm/rebooting")


# --- created


def test_create_checks_nothing_and_passes_over_keys_that_it_does_not_know(vmm: Vmm) -> None:
    disk = vmm.disk("a", sise=3)
    vmm.did("vm.create", vmm.config(disks=[disk], bogus=1, cpus={"boot_vcpus": 2, "max_vcpus": 1}))
    info = vmm.info()
    assert info["state"] == "Created"
    assert "device_tree" not in info
    assert info["memory_actual_size"] == 64 * MIB
    assert "bogus" not in info["config"]
    assert info["config"]["cpus"] == {
        "boot_vcpus": 2,
        "max_vcpus": 1,
        "kvm_hyperv": False,
        "max_phys_bits": 46,
        "features": {"amx": False},
        "nested": True,
        "core_scheduling": "Vm",
        "profile": "Host",
    }
    assert info["config"]["disks"] == [
        {
            "id": "a",
            "pci_segment": 0,
            "path": disk["path"],
            "readonly": False,
            "direct": False,
            "num_queues": 1,
            "queue_size": 128,
            "vhost_user": False,
            "disable_io_uring": False,
            "disable_aio": False,
            "backing_files": False,
            "sparse": True,
            "image_type": "Raw",
            "lock_granularity": "ByteRange",
        }
    ]
    assert vmm.refused("vm.boot")[-1] == "Max CPUs (1) lower than boot CPUs (2)"
    assert vmm.info()["config"]["disks"]  # refused before a device was made


def test_what_is_left_out_takes_its_default(vmm: Vmm) -> None:
    vmm.did("vm.create", {"net": [{"id": "n", "mac": "52:54:00:12:34:56", "fds": [7]}]})
    config = vmm.info()["config"]
    assert config == {
        "cpus": {
            "boot_vcpus": 1,
            "max_vcpus": 1,
            "kvm_hyperv": False,
            "max_phys_bits": 46,
            "features": {"amx": False},
            "nested": True,
            "core_scheduling": "Vm",
            "profile": "Host",
        },
        "memory": {
            "size": 512 * MIB,
            "mergeable": False,
            "hotplug_method": "Acpi",
            "shared": False,
            "hugepages": False,
            "prefault": False,
            "reserve": False,
            "thp": True,
        },
        "net": [
            {
                "id": "n",
                "pci_segment": 0,
                "mac": "52:54:00:12:34:56",
                "num_queues": 2,
                "queue_size": 256,
                "vhost_user": False,
                "vhost_mode": "Client",
                "offload_tso": True,
                "offload_ufo": True,
                "offload_csum": True,
            }
        ],
        "rng": {"pci_segment": 0, "src": "/dev/urandom"},
        "serial": {"mode": "Null"},
        "console": {"mode": "Tty", "pci_segment": 0},
        "debug_console": {"mode": "Off", "iobase": 233},
        "pvpanic": False,
        "iommu": False,
        "watchdog": False,
        "landlock_enable": False,
    }
    assert vmm.refused("vm.boot")[1:] == [
        "Failed to validate config",
        "Payload configuration is not bootable",
        "No bootitem provided: neither firmware nor kernel",
    ]


def test_what_a_platform_and_a_vsock_are_reported_as(vmm: Vmm) -> None:
    uid = "0f0e0d0c-0b0a-4908-8706-050403020100"
    vsock = {"cid": 3, "socket": str(vmm.directory / "vsock")}
    vmm.did("vm.create", {"platform": {"uuid": uid}, "vsock": vsock})
    config = vmm.info()["config"]
    assert config["platform"]["system_uuid"] == uid  # by its new name
    assert config["platform"]["num_pci_segments"] == 1
    assert config["vsock"] == {"pci_segment": 0} | vsock


def test_a_created_vm_has_no_vcpus_to_act_on(vmm: Vmm) -> None:
    vmm.did("vm.create", vmm.config())
    for name in ("vm.pause", "vm.resume", "vm.shutdown", "vm.power-button", "vm.nmi"):
        assert vmm.refused(name)[1:] == NO_VM
    assert vmm.refused("vm.reboot", status=404)[1:] == ["VM is not created"]
    assert vmm.refused("vm.create", vmm.config())[1:] == ["VM is already created"]
    assert vmm.get("vm.counters").status == 500
    assert vmm.state() == "Created"


def test_sizes_of_a_created_vm_are_edited_whatever_they_are(vmm: Vmm) -> None:
    vmm.did("vm.create", vmm.config())
    for asked in ({"desired_vcpus": 9}, {"desired_ram": 1}, {"desired_balloon": 1}, {}):
        vmm.did("vm.resize", asked)
    config = vmm.info()["config"]
    assert (config["cpus"]["boot_vcpus"], config["memory"]["size"]) == (9, 1)
    resize = {"id": "a", "desired_size": 512}
    assert vmm.refused("vm.resize-disk", resize)[1:] == ["Failed resizing a disk image"]


def test_devices_of_a_created_vm_are_noted_down_and_checked_with_all_the_rest(vmm: Vmm) -> None:
    vmm.did("vm.create", vmm.config())
    vmm.did("vm.add-disk", vmm.disk("a"))
    assert vmm.refused("vm.add-disk", vmm.disk("a"))[1:] == [
        "Failed to validate config",
        "Identifier a is not unique",
    ]
    assert vmm.refused("vm.add-disk", {"id": "b", "path": "/x", "num_queues": 8})[-1] == (
        "Queue count (8) must not exceed boot vCPUs (1)"
    )
    both = {"vhost_user": True, "vhost_socket": "/x", "path": "/y"}
    assert vmm.refused("vm.add-disk", both)[-1] == "Disk path and vhost socket both provided"
    assert vmm.refused("vm.add-disk", {"vhost_user": True})[-1] == (
        "No socket provided when using vhost-user"
    )
    assert vmm.refused("vm.add-disk", {"id": "__a", "path": "/x"})[-1] == (
        "Identifier __a is not invalid"
    )
    assert [disk["id"] for disk in vmm.info()["config"]["disks"]] == ["a"]
    vmm.did("vm.remove-device", {"id": "a"})
    assert vmm.refused("vm.remove-device", {"id": "a"})[1:] == ['No device with id "a" to remove']
    assert not vmm.info()["config"].get("disks")


def test_a_serial_socket_is_bound_at_create_and_stays_when_nothing_ran_on_it(vmm: Vmm) -> None:
    vmm.did("vm.create", vmm.config())
    assert vmm.serial.is_socket()
    vmm.did("vm.delete")
    assert vmm.serial.is_socket()
    for _ in range(2):
        assert vmm.refused("vm.create", vmm.config())[1:] == [
            "Error creating console devices",
            "Error creating console device",
            "Address already in use (os error 98)",
        ]
        assert vmm.state() == "Created"  # refused, and yet there
        assert vmm.refused("vm.create", {})[1:] == ["VM is already created"]
        vmm.did("vm.delete")
    vmm.serial.unlink()
    vmm.did("vm.create", vmm.config())


@pytest.mark.parametrize("mode", ["File", "Socket"])
def test_a_serial_port_that_leads_nowhere_ends_the_process(vmm: Vmm, mode: str) -> None:
    answer = vmm.put("vm.create", vmm.config(serial={"mode": mode}))
    assert answer.status in (0, 500)  # it has no time for an answer, mostly
    assert vmm.code() == 1
    with pytest.raises(ConnectionRefusedError):
        vmm.get("vmm.ping")


def test_a_serial_file_is_cut_at_each_boot(vmm: Vmm) -> None:
    path = vmm.directory / "serial.log"
    serial = {"mode": "File", "file": str(path)}
    vmm.did("vm.create", vmm.config(serial=serial))
    vmm.did("vm.boot")
    wait_for(lambda: READY in path.read_bytes(), what="guest")
    vmm.did("vm.reboot")
    wait_for(lambda: READY in path.read_bytes(), what="guest, again")
    assert path.read_bytes().count(READY) == 1
    assert path.stat().st_mode & 0o777 == 0o600


# --- boot


def test_boot_pause_resume_and_back_to_nothing(vmm: Vmm) -> None:
    vmm.start(disks=[vmm.disk("a")])
    assert vmm.refused("vm.boot")[1:] == ["VM is already created"]
    assert vmm.state() == "Running"
    assert vmm.refused("vm.resume")[1:] == [
        "Cannot resume VM",
        "Failed to resume migratable component",
        "Invalid transition: InvalidStateTransition(Running, Running)",
    ]
    vmm.did("vm.pause")
    assert vmm.state() == "Paused"
    assert vmm.refused("vm.pause")[1:] == [
        "Cannot pause VM",
        "Failed to pause migratable component",
        "Invalid transition: InvalidStateTransition(Paused, Paused)",
    ]
    for name in ("vm.nmi", "vm.power-button"):
        vmm.did(name)
    vmm.did("vm.shutdown")
    assert vmm.state() == "Created"
    assert not vmm.serial.exists()
    vmm.did("vm.delete")
    assert vmm.state() == ""
    vmm.told(
        "vmm/starting",
        *("vm/booting", "vm/booted"),
        *("vm/resuming", "vm/pausing", "vm/paused", "vm/pausing"),
        *("vm/shutdown", "vm/deleted"),
    )


def test_events_are_records_with_an_empty_line_after_each(vmm: Vmm) -> None:
    vmm.start(disks=[vmm.disk("a")])
    wait_for(lambda: "virtio-device/activated" in vmm.events(devices=True), what="driver")
    assert vmm.text().startswith('{\n  "timestamp": {\n    "secs": ')
    assert vmm.text().endswith("}\n\n")
    first, activated = vmm.records()[0], vmm.records()[-1]
    assert set(first) == {"timestamp", "source", "event", "properties"}
    assert first["properties"] is None
    assert activated["properties"] == {"id": "a"}


def test_what_runs_has_a_tree_of_devices(vmm: Vmm) -> None:
    vmm.start(disks=[vmm.disk("a")])
    tree = vmm.info()["device_tree"]
    assert {"a", "_virtio-pci-a", "__rng", "_virtio-pci-__rng", "__serial"} <= set(tree)
    assert tree["a"]["parent"] == "_virtio-pci-a"
    assert tree["_virtio-pci-a"]["children"] == ["a"]
    assert tree["_virtio-pci-a"]["pci_bdf"] == "0000:00:01.0"
    assert set(tree["a"]) == {"id", "resources", "parent", "children"}


def test_counters_of_a_disk_without_io_are_no_numbers(vmm: Vmm) -> None:
    vmm.start(disks=[vmm.disk("a")])
    found = vmm.get("vm.counters").json
    expected = {f"{way}_{unit}": 0 for way in ("read", "write") for unit in ("bytes", "ops")}
    for way in ("read", "write"):
        expected |= {f"{way}_latency_min": NEVER, f"{way}_latency_max": NEVER}
        expected |= {f"{way}_latency_avg": NEVER // 10000}
    assert found == {"a": expected}


def test_a_failed_boot_eats_the_list_of_disks(vmm: Vmm) -> None:
    ghost = {"id": "b", "path": "/nope", "image_type": "Raw"}
    vmm.did("vm.create", vmm.config(disks=[vmm.disk("a"), ghost]))
    assert vmm.refused("vm.boot")[1:] == [
        "Error from device manager",
        "Cannot open disk path",
        "I/O error (path=/nope op=open)",
        "No such file or directory (os error 2)",
    ]
    assert "disks" not in vmm.info()["config"]
    vmm.did("vm.boot")  # a guest without its disks
    assert set(vmm.get("vm.counters").json) == set()


def test_a_kernel_that_is_not_there_leaves_a_vm_that_has_not_booted(vmm: Vmm) -> None:
    vmm.did("vm.create", vmm.config(payload={"kernel": "/nope"}, disks=[vmm.disk("a")]))
    assert vmm.refused("vm.boot")[1:] == [
        "Cannot open kernel file",
        "No such file or directory (os error 2)",
    ]
    assert vmm.state() == "Created"
    vmm.did("vm.delete")
    assert not vmm.serial.exists()
    vmm.told("vmm/starting", "vm/booting", "vm/shutdown", "vm/deleted")


def test_vhost_user_needs_shared_memory(vmm: Vmm) -> None:
    disk = {"id": "a", "vhost_user": True, "vhost_socket": "/nope"}
    vmm.did("vm.create", vmm.config(memory={"size": 64 * MIB}, disks=[disk]))
    assert (
        vmm.refused("vm.boot")[-1] == "Using vhost-user requires using shared memory or huge pages"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_back_end_that_does_not_listen_is_waited_for_by_everybody(kind: str) -> None:
    wait_s = 0.5 if kind == "double" else 60.0
    with running(kind, **switched(connect_s=wait_s)) as vmm:
        disk = {"id": "a", "vhost_user": True, "vhost_socket": str(vmm.directory / "none")}
        vmm.did("vm.create", vmm.config(disks=[disk]))
        with vmm.line(limit_s=wait_s + 10) as line, vmm.line(limit_s=wait_s * 0.5) as other:
            line.send(encode("PUT", "vm.boot"))
            other.send(encode("GET", "vmm.ping"))
            with pytest.raises(TimeoutError):
                other.answer()
            answer = line.answer()
        assert answer.errors[1:] == [
            "Error from device manager",
            "Cannot create vhost-user-blk device",
            "Connection to socket failed",
            "vhost-user: can't connect to peer: No such file or directory (os error 2)",
        ]
        assert "disks" not in vmm.info()["config"]


def test_one_image_is_not_written_by_two(vmm: Vmm) -> None:
    vmm.start(disks=[vmm.disk("a")])
    again = vmm.disk("a") | {"id": "b"}
    for read_only, kind in ((False, "Write"), (True, "Read")):
        assert vmm.refused("vm.add-disk", again | {"readonly": read_only})[1:] == [
            "Error from device manager",
            "Cannot lock images of all block devices",
            f"Failed to get {kind} lock for disk image: {again['path']}",
            "The file is already locked",
        ]


def test_a_boot_that_meets_a_lock_leaves_a_vm_that_is_to_be_shut_down_first(vmm: Vmm) -> None:
    disk = vmm.disk("a")
    vmm.start(disks=[disk])
    with running(vmm.kind) as second:
        second.did("vm.create", second.config(disks=[disk]))
        assert second.refused("vm.boot")[1:] == [
            "Error locking disk images: Another instance likely holds a lock",
            "Cannot lock images of all block devices",
            f"Failed to get Write lock for disk image: {disk['path']}",
            "The file is already locked",
        ]
        info = second.info()
        assert (info["state"], len(info["config"]["disks"])) == ("Created", 1)
        assert "a" in info["device_tree"]
        vmm.did("vm.shutdown")
        assert second.refused("vm.boot")[1:] == ["VM is already created"]
        second.did("vm.shutdown")
        second.did("vm.boot")


# --- the serial socket


def test_who_is_there_before_boot_gets_the_first_byte(vmm: Vmm) -> None:
    vmm.did("vm.create", vmm.config())
    with vmm.viewer() as viewer:
        vmm.did("vm.boot")
        seen = viewer.wait(READY)
    assert seen.startswith(b"@") and b" boot protocol=" in seen.partition(b"\n")[0]


def test_a_new_viewer_takes_the_old_ones_place_and_is_told_what_nobody_has_had(vmm: Vmm) -> None:
    vmm.did("vm.create", vmm.config())
    vmm.did("vm.boot")
    with vmm.viewer() as old:
        old.wait(READY)
        old.type(b"ping=1")
        old.wait(b'pong token="1"')
        with vmm.viewer() as new:
            assert old.hung_up()
            new.type(b"ping=2")
            assert b'token="1"' not in new.wait(b'pong token="2"')


def test_a_viewer_that_leaves_types_nothing_that_a_guest_takes_for_a_word(vmm: Vmm) -> None:
    vmm.start()  # whose viewer has left a NUL
    with vmm.viewer() as viewer:
        viewer.channel.sendall(b"ping=1\n")
        viewer.wait(b'pong token="1"')


def test_a_viewer_that_leaves_without_having_read_all_ends_the_serial_thread(vmm: Vmm) -> None:
    vmm.did("vm.create", vmm.config())
    vmm.did("vm.boot")
    with vmm.viewer() as viewer:
        viewer.wait(b" boot ")
        wait_for(lambda: unread(viewer), what="something to leave unread")
    with vmm.viewer() as viewer:
        viewer.channel.settimeout(0.5)
        with pytest.raises(TimeoutError):
            viewer.wait(READY)
    vmm.did("vm.reboot")
    with vmm.viewer() as viewer:
        viewer.wait(READY)


def unread(viewer: Viewer) -> bool:
    with suppress(BlockingIOError):
        return bool(viewer.channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    return False


def test_a_reboot_hangs_up_on_the_viewer_and_binds_anew(vmm: Vmm) -> None:
    vmm.start()
    with vmm.viewer() as viewer:
        viewer.type(b"ping")
        viewer.wait(b"pong")
        vmm.did("vm.reboot")
        assert viewer.hung_up()
    with vmm.viewer() as viewer:
        assert viewer.wait(READY).count(b" boot ") == 1
    vmm.told("vmm/starting", "vm/booting", "vm/booted", "vm/rebooting", "vm/rebooted")


# --- power


def test_the_button_turns_the_guest_off_and_the_vmm_stays(vmm: Vmm) -> None:
    vmm.start()
    vmm.did("vm.power-button")
    vmm.becomes("Created")
    assert not vmm.serial.exists()
    vmm.told("vmm/starting", "vm/booting", "vm/booted", "vm/shutdown")
    assert vmm.refused("vm.shutdown")[1:] == NO_VM
    vmm.did("vm.boot")
    with vmm.viewer() as viewer:
        viewer.wait(READY)


@pytest.mark.parametrize("kind", KINDS)
def test_without_no_shutdown_the_process_goes_with_its_guest(kind: str) -> None:
    with running(kind, ()) as vmm:
        vmm.start()
        vmm.did("vm.power-button")
        assert vmm.code() == 0
        names = ("vmm/starting", "vm/booting", "vm/booted", "vm/shutdown", "vm/deleted")
        vmm.told(*names, "vmm/shutdown")


@pytest.mark.parametrize("word", [b"reboot", b"triple"])
def test_a_guest_that_reboots_stays_running_and_is_seen_in_the_events(
    vmm: Vmm, word: bytes
) -> None:
    vmm.start()
    with vmm.viewer() as viewer:
        viewer.type(word)
        assert viewer.hung_up()
    vmm.told("vmm/starting", "vm/booting", "vm/booted", "vm/rebooting", "vm/rebooted")
    with vmm.viewer() as viewer:
        viewer.wait(READY)
    assert vmm.state() == "Running"


def test_a_guest_that_halts_goes_on_running_and_heeds_nothing(vmm: Vmm) -> None:
    vmm.start()
    with vmm.viewer() as viewer:
        viewer.type(b"halt")
        viewer.wait(b"end how=halt")
    vmm.did("vm.power-button")
    assert vmm.state() == "Running"
    vmm.did("vm.pause")
    vmm.did("vm.shutdown")


def test_a_reboot_that_fails_leaves_a_vm_without_its_disks(vmm: Vmm) -> None:
    disk = vmm.disk("a")
    vmm.start(disks=[disk])
    Path(disk["path"]).unlink()
    assert vmm.refused("vm.reboot")[-1] == "No such file or directory (os error 2)"
    assert vmm.state() == "Created"
    assert "disks" not in vmm.info()["config"]
    vmm.told("vmm/starting", "vm/booting", "vm/booted", "vm/rebooting")


def test_a_guest_that_cannot_be_rebooted_ends_the_process(vmm: Vmm) -> None:
    disk = vmm.disk("a")
    vmm.start(disks=[disk])
    Path(disk["path"]).unlink()
    with vmm.viewer() as viewer:
        viewer.type(b"reboot")
        assert vmm.code() == 1


def test_a_reboot_of_a_paused_vm_runs(vmm: Vmm) -> None:
    vmm.start()
    vmm.did("vm.pause")
    vmm.did("vm.reboot")
    assert vmm.state() == "Running"


# --- the process


def test_the_end_of_the_vmm_does_not_mind_a_body(vmm: Vmm) -> None:
    assert vmm.put("vmm.shutdown", {}).status == 200
    assert vmm.code() == 0


@pytest.mark.parametrize("booted", [False, True])
def test_the_end_of_the_vmm_is_200_and_code_0(vmm: Vmm, booted: bool) -> None:
    if booted:
        vmm.start()
    answer = vmm.put("vmm.shutdown")
    assert (answer.status, answer.body) == (200, b"")
    assert vmm.code() == 0
    seen = vmm.events()
    if seen[-1] == "vmm/shutdown":  # the last one may be lost: the process does not wait for it
        seen.pop()
    assert seen[-1] == ("vm/deleted" if booted else "vmm/starting")
    assert vmm.serial.exists() is False


def test_a_signal_to_end_is_a_power_cut_and_code_0(vmm: Vmm) -> None:
    vmm.start()
    vmm.send(signal.SIGTERM)
    assert vmm.code() == 0
    names = ("vmm/starting", "vm/booting", "vm/booted", "vm/shutdown", "vm/deleted")
    vmm.told(*names, "vmm/shutdown")


def test_a_killed_process_leaves_its_serial_socket(vmm: Vmm) -> None:
    vmm.start()
    vmm.send(signal.SIGKILL)
    assert vmm.code() == -signal.SIGKILL
    assert vmm.serial.is_socket()
    with pytest.raises(ConnectionRefusedError):
        vmm.viewer()


def test_a_stopped_process_is_connected_to_and_answers_when_it_goes_on(vmm: Vmm) -> None:
    vmm.send(signal.SIGSTOP)
    with Line(vmm.socket, limit_s=0.2) as line:
        line.send(encode("PUT", "vm.create", {}))
        with pytest.raises(TimeoutError):
            line.answer()
        vmm.send(signal.SIGCONT)
        line.channel.settimeout(5)
        assert line.answer().status == 204
    assert vmm.state() == "Created"


def test_a_request_whose_sender_has_gone_before_it_was_read_is_not_served(vmm: Vmm) -> None:
    vmm.send(signal.SIGSTOP)
    with Line(vmm.socket) as line:
        line.send(encode("PUT", "vm.create", {}))
    vmm.send(signal.SIGCONT)
    assert vmm.state() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_an_option_that_is_not_known_ends_it_with_code_2(kind: str) -> None:
    vmm = spawn(kind, ("--nonsense",))
    try:
        assert vmm.code() == 2
    finally:
        vmm.end()


@pytest.mark.parametrize("kind", KINDS)
def test_a_descriptor_for_events_wins_over_a_path(kind: str) -> None:
    fresh = spawn(kind, ())
    try:
        path = fresh.directory / "other"
        with (
            (fresh.directory / "more").open("ab") as events,
            socket.socket(socket.AF_UNIX) as listener,
        ):
            listener.bind(str(fresh.directory / "second.sock"))
            listener.listen(1)
            fds = (listener.fileno(), events.fileno())
            options = ["--api-socket", f"fd={fds[0]}"]
            options += ["--event-monitor", f"fd={fds[1]},path={path}"]
            argv = [*fresh.process.args][:-4]  # type: ignore[misc]
            process = subprocess.Popen(
                argv + options, pass_fds=fds, env=dict(os.environ, RUST_BACKTRACE="0"), cwd="."
            )
        try:
            more = fresh.directory / "more"
            wait_for(lambda: b"starting" in more.read_bytes(), what="event")
            assert not path.exists()
        finally:
            process.kill()
            process.wait()
    finally:
        fresh.end()


@pytest.mark.parametrize("kind", KINDS)
def test_errors_carry_a_backtrace_in_one_element_where_the_environment_asks(kind: str) -> None:
    with running(kind, RUST_BACKTRACE="1", **switched(nested_state=False)) as vmm:
        vmm.start()
        vmm.did("vm.pause")
        answer = vmm.put("vm.snapshot", {"destination_url": f"file://{vmm.directory}"})
        if answer.status == 204:
            pytest.skip("this KVM has nested state: no error to look at")
        assert answer.errors[-1].startswith("Could not get vCPU state GetNestedState(")
        assert "\n\nStack backtrace:\n" in answer.errors[-1]


# --- devices of a guest that runs


def test_a_disk_is_plugged_unplugged_when_the_guest_says_so_and_plugged_again(vmm: Vmm) -> None:
    vmm.start()
    disk = vmm.disk("a")
    for _ in range(2):
        answer = vmm.put("vm.add-disk", disk)
        assert answer.status == 200
        assert set(answer.json) == {"id", "bdf"}
        assert (answer.json["id"], answer.json["bdf"][:8]) == ("a", "0000:00:")
        assert vmm.refused("vm.add-disk", disk)[1:] == [
            "Failed to validate config",
            "Identifier a is not unique",
        ]
        vmm.did("vm.remove-device", {"id": "a"})
        assert not vmm.info()["config"].get("disks")  # gone from there at once
        wait_for(lambda: "a" not in vmm.info()["device_tree"], what="the guest to let go")
    wait_for(lambda: vmm.events(devices=True).count("vm/device-removed") == 2, what="events")
    removed = [each for each in vmm.records() if each["event"] == "device-removed"]
    assert removed[0]["properties"] == {"id": "a", "bdf": answer.json["bdf"]}


def test_a_removal_that_nobody_answers_is_pending_and_not_to_be_asked_again(vmm: Vmm) -> None:
    disk = vmm.disk("a")
    vmm.start(disks=[disk])
    vmm.did("vm.pause")
    vmm.did("vm.remove-device", {"id": "a"})
    assert vmm.refused("vm.remove-device", {"id": "a"})[1:] == [
        "Error from device manager",
        "Failed to find device corresponding to the given identifier: a",
    ]
    assert "a" in vmm.info()["device_tree"]
    assert "a" in vmm.get("vm.counters").json
    assert vmm.refused("vm.add-disk", disk)[1:] == [
        "Error from device manager",
        "Invalid identifier as it is not unique: a",
    ]
    vmm.did("vm.resume")
    wait_for(lambda: "a" not in vmm.info()["device_tree"], what="the guest to let go")
    assert vmm.put("vm.add-disk", disk).status == 200


def test_a_reboot_ends_a_pending_removal(vmm: Vmm) -> None:
    vmm.start(disks=[vmm.disk("a"), vmm.disk("b")])
    vmm.did("vm.pause")
    vmm.did("vm.remove-device", {"id": "a"})
    vmm.did("vm.reboot")
    assert set(vmm.get("vm.counters").json) == {"b"}


def test_what_is_not_a_device_of_ours_is_not_removed(vmm: Vmm) -> None:
    vmm.start()
    assert vmm.refused("vm.remove-device", {"id": "ghost"})[1:] == [
        "Error from device manager",
        "Failed to find device corresponding to the given identifier: ghost",
    ]
    assert vmm.refused("vm.remove-device", {"id": "__serial"})[1:] == [
        "Error from device manager",
        "Could not find the node in the device tree",
    ]


def test_a_plain_disk_is_resized_in_steps_of_512(vmm: Vmm) -> None:
    disk = vmm.disk("a")
    vmm.start(disks=[disk])
    vmm.did("vm.resize-disk", {"id": "a", "desired_size": 2 * MIB})
    assert Path(disk["path"]).stat().st_size == 2 * MIB
    assert vmm.refused("vm.resize-disk", {"id": "a", "desired_size": 100})[1:] == [
        "Error from device manager",
        "Disk resize error",
        "Disk image size is not a multiple of 512",
    ]
    assert vmm.refused("vm.resize-disk", {"id": "x", "desired_size": 512})[-1] == (
        "Failed to find device corresponding to the given identifier: x"
    )


def test_descriptors_are_dropped_at_create_and_taken_with_a_nic(vmm: Vmm) -> None:
    nic = {"id": "n0", "mac": "52:54:00:12:34:56"}
    with tap() as first, tap() as second:
        vmm.did("vm.create", vmm.config(net=[nic]), fds=[first])
        assert "fds" not in vmm.info()["config"]["net"][0]
        vmm.did("vm.remove-device", {"id": "n0"})
        vmm.did("vm.add-net", nic | {"fds": [77]}, fds=[first])
        vmm.did("vm.boot")
        hot = vmm.put("vm.add-net", {"id": "n1", "mac": "52:54:00:12:34:57"}, fds=[second])
        assert (hot.status, hot.json["id"]) == (200, "n1")
        nics = vmm.info()["config"]["net"]
        assert [(len(nic["fds"]), nic["fds"] != [77]) for nic in nics] == [(1, True)] * 2
        held = set(taps_of(vmm.process.pid))
        assert held == {tap_name(first), tap_name(second)}
        vmm.did("vm.reboot")
        vmm.did("vm.shutdown")
        vmm.did("vm.boot")
        assert set(taps_of(vmm.process.pid)) == held
        counters = vmm.get("vm.counters").json["n0"]
        assert set(counters) == {"rx_bytes", "tx_bytes", "rx_frames", "tx_frames"}
        with vmm.viewer() as viewer:
            viewer.wait(READY)
        vmm.did("vm.remove-device", {"id": "n1"})
        wait_for(
            lambda: tap_name(second) not in taps_of(vmm.process.pid), what="the tap to be let go"
        )


def test_a_nic_that_is_refused_or_never_booted_keeps_its_tap_open_in_the_vmm(vmm: Vmm) -> None:
    with tap() as first, tap() as second:
        vmm.did("vm.create", vmm.config())
        vmm.did("vm.add-net", {"id": "n0"}, fds=[first])
        vmm.did("vm.remove-device", {"id": "n0"})
        wrong = vmm.put("vm.add-net", {"id": "n1", "num_queues": 4}, fds=[second])
        assert wrong.errors[1:] == [
            "Failed to validate config",
            "Number of queues (4) to virtio_net does not match the number of FDs (2)",
        ]
        vmm.did("vm.delete")
        assert set(taps_of(vmm.process.pid)) == {tap_name(first), tap_name(second)}


def test_a_tap_that_is_down_ends_the_worker_and_whoever_pauses_waits_for_ever(vmm: Vmm) -> None:
    with tap(up=False) as down:
        vmm.did("vm.create", vmm.config(payload={"kernel": str(PROBE), "cmdline": "net=dhcp"}))
        vmm.did("vm.add-net", {"id": "n0", "mac": "52:54:00:12:34:56"}, fds=[down])
        vmm.did("vm.boot")
        with vmm.viewer() as viewer:
            viewer.wait(READY)

        def stands() -> bool:
            try:
                vmm.put("vm.pause", limit_s=1)
                vmm.put("vm.resume", limit_s=1)
            except TimeoutError:
                return True
            return False

        wait_for(stands, what="a pause that does not end")
        with pytest.raises(TimeoutError):
            vmm.get("vmm.ping", limit_s=0.5)


# --- sizes


def test_cpus_grow_at_once_and_go_when_the_guest_lets_them(vmm: Vmm) -> None:
    vmm.start(cpus={"boot_vcpus": 1, "max_vcpus": 4})
    vmm.did("vm.resize", {"desired_vcpus": 3})
    assert vmm.info()["config"]["cpus"]["boot_vcpus"] == 3
    vmm.did("vm.resize", {})
    for wanted, message in ((0, "Requested zero vCPUs"), (5, "Requested vCPUs exceed maximum")):
        assert vmm.refused("vm.resize", {"desired_vcpus": wanted})[1:] == [
            "Error from CPU manager",
            message,
        ]
    vmm.did("vm.pause")
    vmm.did("vm.resize", {"desired_vcpus": 1})
    answer = vmm.put("vm.resize", {"desired_vcpus": 2})
    assert (answer.status, answer.json) == (429, ["Too Many Requests"])
    assert vmm.info()["config"]["cpus"]["boot_vcpus"] == 1
    vmm.did("vm.resume")
    wait_for(
        lambda: vmm.put("vm.resize", {"desired_vcpus": 2}).status == 204, what="room for a CPU"
    )


def test_memory_by_acpi_grows_in_steps_and_only_seems_to_shrink(vmm: Vmm) -> None:
    vmm.start(memory={"size": 128 * MIB, "shared": True, "hotplug_size": 256 * MIB})
    vmm.did("vm.resize", {"desired_ram": 256 * MIB})
    info = vmm.info()
    assert info["config"]["memory"]["size"] == info["memory_actual_size"] == 256 * MIB
    assert vmm.refused("vm.resize", {"desired_ram": 257 * MIB})[1:] == [
        "Memory manager error",
        "The requested hotplug memory addition is not a valid size",
    ]
    assert vmm.refused("vm.resize", {"desired_ram": 2048 * MIB})[-1] == (
        "Not enough space in the hotplug RAM region"
    )
    vmm.did("vm.resize", {"desired_ram": 128 * MIB})
    assert vmm.info()["config"]["memory"]["size"] == 128 * MIB
    assert vmm.refused("vm.resize", {"desired_balloon": MIB})[1:] == [
        "Error from device manager",
        "Missing virtio-balloon, can't proceed as expected",
    ]


def test_memory_by_virtio_goes_both_ways_above_its_first_size(vmm: Vmm) -> None:
    memory = {"size": 64 * MIB, "shared": True, "hotplug_size": 256 * MIB}
    vmm.start(memory=memory | {"hotplug_method": "VirtioMem"})
    for wanted in (128, 96):
        vmm.did("vm.resize", {"desired_ram": wanted * MIB})
        found = vmm.info()["config"]["memory"]
        assert (found["size"], found["hotplugged_size"]) == (64 * MIB, (wanted - 64) * MIB)
    for wanted, message in (
        (32 * MIB, "Invalid resize request: desired_size = 33554432 below boot size = 67108864"),
        (
            600 * MIB,
            "Failed to update virtio configuration: ResizeError(new size 0x21800000 is bigger than"
            " region_size 0x10000000)",
        ),
        (
            96 * MIB + 4096,
            "Failed to update virtio configuration: ResizeError(new size 0x2001000 is not aligned"
            " on block_size 0x200000)",
        ),
    ):
        assert vmm.refused("vm.resize", {"desired_ram": wanted})[-1] == message


def test_no_memory_at_all_is_accepted_and_kept_from_booting(vmm: Vmm) -> None:
    vmm.start()
    vmm.did("vm.resize", {"desired_ram": 0})
    assert vmm.refused("vm.reboot")[1:] == ["Memory manager error", "No memory zones found"]
    assert vmm.state() == "Created"


# --- snapshots


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nested", [True, False])
def test_a_kvm_without_nested_state_is_named_and_the_vm_stays_paused(
    kind: str, nested: bool
) -> None:
    with running(kind, **switched(nested_state=nested)) as vmm:
        target = vmm.directory / "snapshot"
        target.mkdir()
        vmm.start()
        vmm.did("vm.pause")
        answer = vmm.put("vm.snapshot", {"destination_url": f"file://{target}"})
        if kind == "tolerant" or (kind == "double" and nested):
            assert answer.status == 204
        if answer.status != 204:  # of the real one: as the KVM has it
            assert answer.errors[1:3] == [
                "Cannot snapshot VM",
                "Failed to snapshot migratable component",
            ]
            assert "GetNestedState" in answer.errors[3]
            assert list(target.iterdir()) == []
        assert vmm.state() == "Paused"
        vmm.did("vm.resume")


def test_a_snapshot_is_three_new_files_of_a_paused_vm(moving: Vmm) -> None:
    vmm, target = moving, moving.directory / "snapshot"
    url = {"destination_url": f"file://{target}"}
    vmm.start(disks=[vmm.disk("a")])
    assert vmm.refused("vm.snapshot", url)[1:] == [
        "Cannot snapshot VM",
        "Failed to snapshot migratable component",
        "Trying to snapshot while VM is running",
    ]
    vmm.did("vm.pause")
    assert vmm.refused("vm.snapshot", url)[1:] == [
        "Cannot send VM snapshot",
        "Failed to send migratable component snapshot",
        f'Destination is not a directory: "{target}"',
    ]
    target.mkdir()
    vmm.did("vm.snapshot", url)
    sizes = {path.name: path.stat().st_size for path in target.iterdir()}
    assert set(sizes) == {"config.json", "state.json", "memory-ranges"}
    assert sizes["memory-ranges"] == 64 * MIB
    assert (target / "memory-ranges").stat().st_blocks * 512 < 16 * MIB
    assert {path.stat().st_mode & 0o777 for path in target.iterdir()} == {0o600}
    assert json.loads((target / "config.json").read_bytes())["disks"][0]["id"] == "a"
    assert vmm.refused("vm.snapshot", url)[1:] == [
        "Cannot send VM snapshot",
        "Failed to send migratable component snapshot",
        "Error creating VM config snapshot file",
        "File exists (os error 17)",
    ]
    assert vmm.refused("vm.snapshot", {"destination_url": str(target)})[-1] == (
        f"Could not extract path from URL: {target}"
    )
    assert vmm.state() == "Paused"


def take_snapshot(vmm: Vmm) -> dict[str, Any]:
    """Leave a snapshot of a VM that is gone; returns what restores it."""
    target = vmm.directory / "snapshot"
    target.mkdir()
    vmm.did("vm.pause")
    vmm.did("vm.snapshot", {"destination_url": f"file://{target}"})
    vmm.did("vm.delete")
    return {"source_url": f"file://{target}"}


def test_a_restored_vm_is_paused_and_goes_on_where_it_was(moving: Vmm) -> None:
    moving.start(disks=[moving.disk("a")])
    source = take_snapshot(moving)
    with running(moving.kind) as vmm:
        vmm.did("vm.restore", source)
        assert vmm.state() == "Paused"
        assert vmm.refused("vm.restore", source)[1:] == ["VM is already created"]
        assert moving.serial.is_socket()  # at the path that the snapshot names
        vmm.did("vm.resume")
        with moving.viewer() as viewer:
            viewer.type(b"ping=again")
            assert b" boot " not in viewer.wait(b'pong token="again"')
        vmm.told("vmm/starting", "vm/restoring", "vm/restored", "vm/resuming", "vm/resumed")


def test_a_vm_may_run_as_soon_as_it_is_restored(moving: Vmm) -> None:
    moving.start()
    source = take_snapshot(moving)
    moving.did("vm.restore", source | {"resume": True})
    assert moving.state() == "Running"


def test_a_nic_on_a_descriptor_is_to_be_given_again_at_restore(moving: Vmm) -> None:
    vmm = moving
    with tap() as first, tap() as second:
        vmm.did("vm.create", vmm.config())
        vmm.did("vm.add-net", {"id": "n0", "mac": "52:54:00:12:34:56"}, fds=[first])
        vmm.did("vm.boot")
        with vmm.viewer() as viewer:
            viewer.wait(READY)
        source = take_snapshot(vmm)
        assert vmm.refused("vm.restore", source)[1:] == [
            "Failed to validate config",
            "Net id n0 is associated with FDs and is required",
        ]
        source |= {"net_fds": [{"id": "n0", "num_fds": 1}]}
        answer = vmm.put("vm.restore", source)
        assert (answer.status, answer.json) == (400, ["Bad Request"])
        assert vmm.state() == ""
        vmm.did("vm.restore", source, fds=[second])
        assert vmm.state() == "Paused"
        assert tap_name(second) in taps_of(vmm.process.pid)


def test_what_cannot_be_restored_leaves_a_vmm_that_can_be_used(vmm: Vmm) -> None:
    empty = vmm.directory / "empty"
    empty.mkdir()
    for url, kind, message in (
        ("file:///nope", "send", 'Destination is not a directory: "/nope"'),
        ("xx", "send", "Could not extract path from URL: xx"),
        (f"file://{empty}", "receive", "No such file or directory (os error 2)"),
    ):
        messages = vmm.refused("vm.restore", {"source_url": url})
        assert messages[1:3] == [
            "Cannot restore VM",
            f"Failed to {kind} migratable component snapshot",
        ]
        assert messages[-1] == message
    (empty / "config.json").write_text("{nope")
    assert vmm.refused("vm.restore", {"source_url": f"file://{empty}"})[3] == (
        "Error deserialising VM config snapshot"
    )
    assert vmm.state() == ""
    vmm.start()


# --- migration


@contextmanager
def pair(kind: str, **switches: Any) -> Iterator[tuple[Vmm, Vmm]]:
    """A source and a destination. A glibc build's own filter kills its migration worker: log."""
    options = ("--no-shutdown", "--seccomp", "log")
    with (
        running(kind, options, **switched(**switches)) as source,
        running(kind, options) as destination,
    ):
        yield source, destination


class Receiving:
    """A call that does not return before a VM has come, or has failed to."""

    def __init__(self, vmm: Vmm, path: Path) -> None:
        self.answer = Answer()
        self._thread = threading.Thread(target=self._run, args=(vmm, path))
        self._thread.start()
        wait_for(lambda: "vm/migration-receive-ready" in vmm.events(), what="receiver")

    def _run(self, vmm: Vmm, path: Path) -> None:
        self.answer = vmm.put("vm.receive-migration", {"receiver_url": f"unix:{path}"})

    def done(self) -> Answer:
        self._thread.join()
        return self.answer


@pytest.mark.parametrize("kind", MOVING)
@pytest.mark.parametrize("local", [False, True])
def test_a_vm_moves_to_another_process(kind: str, local: bool) -> None:
    with pair(kind) as (source, destination):
        path = source.directory / "moving"
        source.start()
        source.serial.unlink()  # the destination binds the same path
        receiving = Receiving(destination, path)
        with pytest.raises(TimeoutError):
            destination.get("vmm.ping", limit_s=0.3)
        source.did("vm.send-migration", {"destination_url": f"unix:{path}", "local": local})
        assert receiving.done().status == 204
        assert source.code() == 0  # in spite of --no-shutdown
        assert destination.state() == "Running"
        assert path.exists()
        assert not source.serial.exists()  # the source has taken the destination's with it
        gone = [name for name in source.events() if name != "vm/migration-memory-iteration"]
        assert gone == [
            *("vmm/starting", "vm/booting", "vm/booted", "vm/migration-started"),
            *("vm/pausing", "vm/paused", "vm/snapshotting", "vm/snapshotted"),
            *("vm/migration-finished", "vm/deleted", "vmm/shutdown"),
        ]
        destination.told(
            "vmm/starting",
            *("vm/migration-receive-ready", "vm/migration-receive-started"),
            *("vm/restoring", "vm/restored", "vm/resuming", "vm/resumed"),
            "vm/migration-receive-finished",
        )


@pytest.mark.parametrize("kind", MOVING)
def test_a_serial_socket_in_the_way_keeps_a_vm_from_moving(kind: str) -> None:
    with pair(kind) as (source, destination):
        path = source.directory / "moving"
        source.start()
        receiving = Receiving(destination, path)
        source.did("vm.send-migration", {"destination_url": f"unix:{path}"})
        answer = receiving.done()
        assert answer.errors == [
            "Error receiving migration",
            "Failed to complete migration for migratable component",
            "Migration was aborted",
        ]
        assert destination.state() == ""
        wait_for(lambda: source.events()[-1] == "vm/migration-failed", what="failure")
        source.becomes("Running")
        source.did("vm.pause")


@pytest.mark.parametrize("kind", MOVING)
def test_a_serial_socket_without_a_directory_is_each_process_own(kind: str) -> None:
    with pair(kind) as (source, destination):
        path = source.directory / "moving"
        source.start(serial={"mode": "Socket", "socket": source.serial.name})
        receiving = Receiving(destination, path)
        source.did("vm.send-migration", {"destination_url": f"unix:{path}"})
        assert receiving.done().status == 204
        assert source.code() == 0
        assert not source.serial.exists()
        for _ in range(2):
            with destination.viewer() as viewer:
                viewer.type(b"ping=moved")
                viewer.wait(b'pong token="moved"')
            destination.did("vm.reboot")


@pytest.mark.parametrize("kind", MOVING)
@pytest.mark.parametrize("paused", [False, True])
def test_a_vm_that_cannot_leave_stays_as_it_was(kind: str, paused: bool) -> None:
    with pair(kind) as (vmm, _):
        vmm.start()
        if paused:
            vmm.did("vm.pause")
        vmm.did("vm.send-migration", {"destination_url": "unix:/nope"})
        wait_for(lambda: vmm.events()[-1] == "vm/migration-failed", what="failure")
        vmm.becomes("Paused" if paused else "Running")
        assert vmm.refused("vm.send-migration", {"destination_url": "nope"})[1:] == [
            "Failed to send migratable component snapshot",
            "Invalid send migration configuration",
            "Error validating send migration parameters: destination_url must use"
            " tcp:<host>:<port> or unix:<path>.",
        ]


def test_a_receiver_without_a_place_to_listen_refuses_at_once(vmm: Vmm) -> None:
    taken = vmm.directory / "taken"
    taken.write_text("")
    for url, message in (
        ("unix:/nope/x", "o such file or directory (os error 2)"),
        (f"unix:{taken}", "Address already in use (os error 98)"),
    ):
        messages = vmm.refused("vm.receive-migration", {"receiver_url": url})
        assert messages[:3] == [
            "Error receiving migration",
            "Failed to receive migratable component snapshot",
            "Error binding to UNIX socket",
        ]
        assert messages[3].endswith(message)
    assert vmm.events() == ["vmm/starting"]


# --- one at a time


@pytest.mark.parametrize("kind", ["double"])
def test_a_slow_call_keeps_everybody_waiting_and_is_not_cancelled(kind: str) -> None:
    with running(kind, **switched(slow={"vm.create": 0.4})) as vmm:
        with Line(vmm.socket, limit_s=0.1) as line:
            line.send(encode("PUT", "vm.create", vmm.config()))
            with pytest.raises(TimeoutError):
                line.answer()
        assert timed_s(lambda: vmm.get("vmm.ping")) > 0.1
        assert vmm.state() == "Created"
