"""The QEMU command line: one golden case as a whole, then each rule."""

from __future__ import annotations

import msgspec
import pytest

from chv.common.errors import InvalidArgument, Unsupported
from chv.common.process import procfs
from chv.vmm.driver import DiskConfig, NicConfig, VmmConfig
from chv.vmm.spec import (
    DEVICES_MAX,
    PORTS_MAX,
    PORTS_SPARE,
    disk_arguments,
    disk_connection,
    nic_arguments,
    nic_connection,
    qemu_launch,
)

UUID = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
WORKER_ID = "chv:abc123:vmm:3f2504e04f:0000beef"
BASE = VmmConfig(
    vm_id=UUID,
    uuid=UUID,
    name="hello",
    worker_id=WORKER_ID,
    cpus=2,
    memory_bytes=256 << 20,
    accelerator="tcg",
    runtime_dir="/run/chv/abc123/vm/3f2504e04f/vmm",
)
ROOT = DiskConfig(id="root", kind="vhost-user-blk", path="/run/root.sock", boot_index=1)
SEED = DiskConfig(id="seed", kind="file", path="/var/seed,1.iso", read_only=True)
NIC = NicConfig(id="net0", mac="52:54:00:00:00:01", mtu=1400)

GOLDEN = """
/usr/bin/qemu-system-x86_64
-name guest=chv:abc123:vmm:3f2504e04f:0000beef,process=chv-hello,debug-threads=on
-uuid 3f2504e0-4f89-41d3-9a0c-0305e82c3301
-nodefaults -no-user-config -no-shutdown
-display none
-action panic=pause
-msg timestamp=on
-rtc base=utc
-S
-global ICH9-LPC.disable_s3=1
-global ICH9-LPC.disable_s4=1
-machine q35,memory-backend=mem,vmport=off,dump-guest-core=off
-accel tcg,tb-size=64
-cpu max,la57=off
-smp cpus=2,sockets=1,cores=2,threads=1
-m size=256M
-object memory-backend-memfd,id=mem,size=256M,share=on
-kernel /img/kernel
-initrd /img/initramfs
-append console=ttyS0|a=b,c
-chardev socket,id=monitor,path=/run/chv/abc123/vm/3f2504e04f/vmm/qmp.sock,server=on,wait=off
-mon chardev=monitor,mode=control
-chardev socket,id=serial0,path=/run/chv/abc123/vm/3f2504e04f/vmm/serial.sock,server=on,wait=off
-serial chardev:serial0
-object rng-builtin,id=rng
-device virtio-rng-pci,rng=rng
-chardev socket,id=agent,path=/run/chv/abc123/vm/3f2504e04f/vmm/agent.sock,server=on,wait=off
-device virtio-serial-pci,id=lines,max_ports=2
-device virtserialport,bus=lines.0,chardev=agent,name=org.qemu.guest_agent.0
-device pvpanic
-device pcie-root-port,id=port-0,bus=pcie.0,chassis=1,addr=0x18.0,multifunction=on,io-reserve=0
-device pcie-root-port,id=port-1,bus=pcie.0,chassis=2,addr=0x18.1,io-reserve=0
-device pcie-root-port,id=port-2,bus=pcie.0,chassis=3,addr=0x18.2,io-reserve=0
-device pcie-root-port,id=port-3,bus=pcie.0,chassis=4,addr=0x18.3,io-reserve=0
-device pcie-root-port,id=port-4,bus=pcie.0,chassis=5,addr=0x18.4,io-reserve=0
-device pcie-root-port,id=port-5,bus=pcie.0,chassis=6,addr=0x18.5,io-reserve=0
-device pcie-root-port,id=port-6,bus=pcie.0,chassis=7,addr=0x18.6,io-reserve=0
-device pcie-root-port,id=port-7,bus=pcie.0,chassis=8,addr=0x18.7,io-reserve=0
-device pcie-root-port,id=port-8,bus=pcie.0,chassis=9,addr=0x19.0,multifunction=on,io-reserve=0
-chardev socket,id=vhost-root,path=/run/root.sock,reconnect=1
-device vhost-user-blk-pci,id=disk-root,chardev=vhost-root,num-queues=1,bus=port-0,bootindex=1
-blockdev {"driver":"raw","node-name":"file-seed","read-only":true,@
"file":{"driver":"file","filename":"/var/seed,1.iso"}}
-device virtio-blk-pci,id=disk-seed,drive=file-seed
-netdev tap,id=net-net0,fd=10,vhost=off
-device virtio-net-pci,id=nic-net0,netdev=net-net0,mac=52:54:00:00:00:01,host_mtu=1400,romfile=
-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny
"""


def launch(**changes: object) -> tuple[str, ...]:
    return launch_for((7, 2), **changes)


def launch_for(version: tuple[int, int], **changes: object) -> tuple[str, ...]:
    config = msgspec.structs.replace(BASE, **changes)
    return qemu_launch(config, binary="/usr/bin/qemu-system-x86_64", version=version).argv


def value(argv: tuple[str, ...], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_the_whole_command_line_of_a_vm_with_everything_is_as_recorded() -> None:
    argv = launch(
        kernel="/img/kernel",
        initramfs="/img/initramfs",
        cmdline="console=ttyS0 a=b,c",
        disks=(ROOT, SEED),
        nics=(NIC,),
    )
    assert argv == tuple(word.replace("|", " ") for word in GOLDEN.replace("@\n", "").split())


def test_the_worker_id_stands_alone_and_once_in_argv() -> None:
    assert procfs.worker_ids(launch()) == [WORKER_ID]


def test_newer_qemu_reconnects_in_milliseconds() -> None:
    assert "reconnect-ms=100" in " ".join(launch_for((9, 2), disks=(ROOT,)))
    assert "reconnect=1" in " ".join(launch_for((9, 1), disks=(ROOT,)))


def test_kvm_uses_the_hosts_cpu() -> None:
    argv = launch(accelerator="kvm")
    assert (value(argv, "-accel"), value(argv, "-cpu")) == ("kvm", "host")


def test_memory_is_rounded_up_to_whole_mebibytes() -> None:
    argv = launch(memory_bytes=100_000_000)
    assert value(argv, "-m") == "size=96M"
    assert "size=96M,share=on" in value(argv, "-object")


def test_each_nic_gets_a_descriptor_number_of_its_own() -> None:
    other = msgspec.structs.replace(NIC, id="net1")
    config = msgspec.structs.replace(BASE, nics=(NIC, other))
    made = qemu_launch(config, binary="qemu", version=(7, 2))
    assert made.nic_fds == {"net0": (10,), "net1": (11,)}
    assert "tap,id=net-net1,fd=11,vhost=off" in made.argv


def test_nics_on_ports_come_first_and_disks_behind_them() -> None:
    nics = tuple(msgspec.structs.replace(NIC, id=f"net{n}", on_port=n > 0) for n in range(3))
    argv = launch(disks=(ROOT,), nics=nics)
    devices = [part for part in argv if part.startswith(("virtio-net-pci", "vhost-user-blk-pci"))]
    assert [part.partition("bus=")[2].split(",")[0] for part in devices] == [
        "port-2", "", "port-0", "port-1",
    ]  # fmt: skip
    assert sum(part.startswith("pcie-root-port") for part in argv) == 3 + PORTS_SPARE


def test_a_nic_that_is_plugged_later_is_as_one_from_the_start() -> None:
    connection, device = nic_connection(NIC), nic_arguments(NIC, "port-4")
    assert connection == {"type": "tap", "id": "net-net0", "fd": "tap-net0-0", "vhost": False}
    text = ",".join(f"{key}={value}" for key, value in device.items())
    started = launch(nics=(msgspec.structs.replace(NIC, on_port=True),))
    words = next(part for part in started if part.startswith("virtio-net-pci")).split(",")[1:]
    assert set(text.split(",")) - set(words) == {"driver=virtio-net-pci", "bus=port-4"}
    wide = msgspec.structs.replace(NIC, queues=2)
    assert nic_connection(wide)["fds"] == "tap-net0-0:tap-net0-1"
    assert (nic_arguments(wide, "p")["mq"], nic_arguments(wide, "p")["vectors"]) == (True, 6)
    with pytest.raises(InvalidArgument):
        nic_arguments(msgspec.structs.replace(NIC, mac="x,y"), "p")


def test_a_nic_with_queues_takes_a_descriptor_for_each_and_the_next_nic_those_behind() -> None:
    wide = msgspec.structs.replace(NIC, queues=3)
    other = msgspec.structs.replace(NIC, id="net1")
    config = msgspec.structs.replace(BASE, nics=(wide, other))
    made = qemu_launch(config, binary="qemu", version=(7, 2))
    assert made.nic_fds == {"net0": (10, 11, 12), "net1": (13,)}
    assert "tap,id=net-net0,fds=10:11:12,vhost=off" in made.argv
    assert "tap,id=net-net1,fd=13,vhost=off" in made.argv
    devices = [part for part in made.argv if part.startswith("virtio-net-pci")]
    assert devices[0].endswith(",mq=on,vectors=8")
    assert "mq=on" not in devices[1], "a single queue is as ever"


@pytest.mark.parametrize("queues", [0, 17])
def test_a_number_of_queues_that_no_nic_has_is_refused(queues: int) -> None:
    nic = msgspec.structs.replace(NIC, queues=queues)
    with pytest.raises(InvalidArgument, match="queues"):
        qemu_launch(msgspec.structs.replace(BASE, nics=(nic,)), binary="qemu", version=(7, 2))


def test_a_comma_in_a_path_or_name_cannot_become_an_option() -> None:
    argv = launch(runtime_dir="/run/a,server=off", name="x,debug=1", disks=(ROOT,))
    assert "path=/run/a,,server=off/qmp.sock," in " ".join(argv)
    assert "process=chv-x,,debug=1," in value(argv, "-name")


def test_a_long_name_is_cut_before_its_commas_are_doubled() -> None:
    assert "process=chv-aaaaaaaaaa,,,debug" in value(launch(name="a" * 10 + ",b"), "-name")


def test_a_kernel_command_line_is_not_an_option_list() -> None:
    assert value(launch(kernel="/k", cmdline="a,b"), "-append") == "a,b"


def test_without_a_kernel_the_firmware_boots_the_disk_with_a_boot_index() -> None:
    argv = launch(disks=(ROOT,))
    assert "-kernel" not in argv
    assert value(argv, "-boot") == "strict=on"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"worker_id": "chv:abc123:vmm:x"}, "worker_id"),
        ({"worker_id": WORKER_ID + ",process=x"}, "worker_id"),
        ({"uuid": "nonsense"}, "uuid"),
        ({"name": "a\nb"}, "name"),
        ({"cpus": 0}, "cpus"),
        ({"cpus": 256}, "cpus"),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"accelerator": ""}, "accelerator"),
        ({"accelerator": "kvm,foo=bar"}, "accelerator"),
        ({"kernel": "relative"}, "kernel"),
        ({"kernel": "/k\0"}, "kernel"),
        ({"cmdline": "quiet"}, "kernel"),
        ({"kernel": "/k", "cmdline": "a\nb"}, "cmdline"),
        ({"kernel": "/k", "cmdline": "x" * 2048}, "cmdline"),
        ({"runtime_dir": "relative"}, "runtime_dir"),
        ({"runtime_dir": "/" + "x" * 110}, "node.run_dir"),
        ({"disks": (ROOT, ROOT)}, "disks"),
        ({"nics": (NIC, NIC)}, "nics"),
        ({"disks": (msgspec.structs.replace(SEED, read_only=False),)}, "disks[0].read_only"),
        ({"disks": (msgspec.structs.replace(SEED, kind="nbd"),)}, "disks[0].kind"),
        ({"disks": (ROOT, msgspec.structs.replace(SEED, id="A,b"))}, "disks[1].id"),
        ({"disks": (msgspec.structs.replace(ROOT, path="x"),)}, "disks[0].path"),
        ({"nics": (msgspec.structs.replace(NIC, mac="52:54:00:00:00:01,x=y"),)}, "nics.mac"),
        ({"nics": (msgspec.structs.replace(NIC, id=""),)}, "nics.id"),
    ],
)
def test_what_cannot_be_right_is_refused_by_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        launch(**changes)
    assert caught.value.field == field


def test_more_devices_than_the_bus_has_slots_for_are_unsupported() -> None:
    nics = tuple(msgspec.structs.replace(NIC, id=f"n{n}") for n in range(DEVICES_MAX + 1))
    with pytest.raises(Unsupported, match=str(DEVICES_MAX)):
        launch(nics=nics)


def test_more_disks_than_there_are_ports_are_unsupported() -> None:
    disks = tuple(msgspec.structs.replace(ROOT, id=f"d{n}") for n in range(PORTS_MAX + 1))
    with pytest.raises(Unsupported, match=str(PORTS_MAX)):
        launch(disks=disks)


def test_each_disk_has_a_port_of_its_own_and_as_many_as_promised_are_spare() -> None:
    disks = tuple(msgspec.structs.replace(ROOT, id=f"d{n}") for n in range(16))
    argv = launch(disks=(SEED, *disks))
    made = [word.split(",")[1].removeprefix("id=") for word in argv if "pcie-root-port" in word]
    taken = [
        part.removeprefix("bus=")
        for word in argv
        if word.startswith("vhost-user-blk-pci")
        for part in word.split(",")
        if part.startswith("bus=")
    ]
    assert len(taken) == len(set(taken)) == 16
    assert len(set(made) - set(taken)) == PORTS_SPARE


def test_a_disk_that_is_plugged_later_is_described_as_one_from_the_start() -> None:
    assert disk_connection(ROOT, (7, 2))["backend"] == {
        "type": "socket",
        "data": {
            "addr": {"type": "unix", "data": {"path": "/run/root.sock"}},
            "server": False,
            "reconnect": 1,
        },
    }
    made = disk_arguments(ROOT, "port-3")
    words = ",".join([str(made.pop("driver")), *(f"{key}={made[key]}" for key in made)])
    assert words.replace("port-3", "port-0") in " ".join(launch(disks=(ROOT,)))


def test_only_a_served_disk_is_plugged_later() -> None:
    with pytest.raises(InvalidArgument) as caught:
        disk_connection(SEED, (7, 2))
    assert caught.value.field == "disk.kind"


MICROVM = {"machine": "microvm", "kernel": "/img/kernel", "cpus": 1}


def test_room_for_more_cpus_and_memory_is_part_of_the_start() -> None:
    argv = launch(cpus_max=4, memory_max_bytes=1024 << 20)
    assert value(argv, "-smp") == "cpus=2,maxcpus=4,sockets=1,cores=4,threads=1"
    assert value(argv, "-m") == "size=256M,slots=16,maxmem=1024M"
    argv = launch(cpus_max=2, memory_max_bytes=256 << 20)
    assert value(argv, "-smp") == "cpus=2,sockets=1,cores=2,threads=1"
    assert value(argv, "-m") == "size=256M"


def test_microvm_has_virtio_mmio_and_no_pci() -> None:
    many = msgspec.structs.replace(NIC, queues=2)
    argv = launch(disks=(ROOT, SEED), nics=(many,), **MICROVM)
    assert "pci" not in " ".join(argv)
    devices = [argv[at + 1] for at, word in enumerate(argv) if word == "-device"]
    assert [device.split(",")[0] for device in devices] == [
        "virtio-rng-device", "virtio-serial-device", "virtserialport", "pvpanic",
        "vhost-user-blk", "virtio-blk-device", "virtio-net-device",
    ]  # fmt: skip
    assert "mq=on" in devices[-1]
    assert "vectors" not in devices[-1]
    assert "fds=10:11" in value(argv, "-netdev")


def test_microvm_has_acpi_where_kvm_gives_linux_a_clock() -> None:
    assert "acpi=on" in value(launch(**MICROVM | {"accelerator": "kvm", "cpus": 2}), "-machine")
    assert "acpi=off" in value(launch(**MICROVM), "-machine")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kernel": ""}, "kernel"),
        ({"cpus": 2}, "cpus"),
        ({"cpus_max": 2}, "cpus_max"),
        ({"memory_max_bytes": 512 << 20}, "memory_max_bytes"),
        ({"disks": tuple(msgspec.structs.replace(ROOT, id=f"d{n}") for n in range(7))}, "disks"),
    ],
)
def test_what_microvm_has_not_is_refused_by_name(changes: dict[str, object], field: str) -> None:
    with pytest.raises(Unsupported) as caught:
        launch(**MICROVM | changes)
    assert caught.value.field == field


def test_another_machine_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="pc"):
        launch(machine="pc")


def test_a_vm_that_comes_from_elsewhere_waits_and_gets_its_devices_later() -> None:
    on_port = msgspec.structs.replace(NIC, on_port=True)
    fixed = msgspec.structs.replace(NIC, id="net1")
    config = msgspec.structs.replace(BASE, disks=(ROOT, SEED), nics=(on_port, fixed))
    restored = msgspec.structs.replace(config, restore_dir="/saved")
    received = msgspec.structs.replace(config, incoming=True)
    for config, stands in ((restored, True), (received, False)):
        made = qemu_launch(config, binary="qemu", version=(7, 2), ports=11)
        assert value(made.argv, "-incoming") == "defer"
        assert ("-S" in made.argv) is stands
        assert set(made.nic_fds) == {"net1"}
        words = " ".join(made.argv)
        assert "vhost-user-blk" not in words
        assert "file-seed" in words
        assert words.count("pcie-root-port") == 11
