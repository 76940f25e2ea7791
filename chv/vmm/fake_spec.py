"""The fake VMM's command line and its control protocol, as data. Pure.

One JSON object a line each way. Everything about the VM but its id and directory is one JSON
argument; the id stands alone in argv, as for every worker.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import msgspec

from chv.common.errors import ErrorData, InvalidArgument
from chv.vmm.driver import DiskConfig, Launch, NicConfig, Sizes, VmmConfig, VmmState, nic_fds
from chv.vmm.fake_state import MUTATIONS, Behaviour, FakeVm, Fault, Image

CONTROL_SOCKET = "control.sock"
SERIAL_SOCKET = "serial.sock"
BEHAVIOUR_VARIABLE = "CHV_FAKE"
MODULE = "chv.vmm.fake"
VERSION = "fake"
NIC_FD_FIRST = 10
LINE_BYTES_MAX = 64 * 1024


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What the fake touches of its VM: files it opens, sockets it connects to, descriptors."""

    disks: tuple[DiskConfig, ...] = ()
    files: tuple[str, ...] = ()
    nic_fds: dict[str, tuple[int, ...]] = {}
    sizes: Sizes = FakeVm.sizes
    awaited: bool = False  # the VM comes from a snapshot or from another process

    @property
    def served(self) -> dict[str, DiskConfig]:
        """The disks that a storage daemon serves, by id."""
        return {disk.id: disk for disk in self.disks if disk.kind == "vhost-user-blk"}


class FakeArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed command line."""

    worker_id: str
    runtime_dir: str
    parts: Parts


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line to the fake.

    `action` goes with `guest`, `fault` with `plant`, `disk` with `add_disk`, `disk_id` with
    `remove_disk`, `nic` with `add_nic` (and its descriptors with the line), `nic_id` with
    `remove_nic`, `amount` with `set_cpus` and `set_memory`, `image` with `load`.
    """

    command: str
    action: str = ""
    disk: DiskConfig | None = None
    disk_id: str = ""
    nic: NicConfig | None = None
    nic_id: str = ""
    fault: Fault | None = None
    amount: int = 0
    image: Image | None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line from the fake."""

    state: VmmState = VmmState.UNKNOWN
    reason: str = ""
    disks: dict[str, bool] = {}
    nics: tuple[str, ...] = ()
    resets: int = 0
    frozen: bool = False
    reboots: int = 0
    sizes: Sizes = FakeVm.sizes
    image: Image | None = None
    error: ErrorData | None = None


def reply_of(vm: FakeVm) -> Reply:
    """Return what there is to say of a VM after a command."""
    state = vm.state
    return Reply(
        state=state,
        reason=vm.reason,
        disks=dict(vm.disks),
        nics=tuple(sorted(vm.nics)),
        resets=vm.resets,
        frozen=vm.frozen,
        reboots=vm.reboots,
        sizes=vm.sizes,
    )


def answer(vm: FakeVm, request: Request) -> Reply:
    """Do what needs nothing but the VM; InvalidArgument for what is no command."""
    image: Image | None = None
    match request.command:
        case "guest":
            vm.guest(request.action)
        case "plant" if request.fault is not None:
            vm.plant(request.fault)
        case "remove_disk":
            vm.remove_disk(request.disk_id)
        case "remove_nic":
            vm.remove_nic(request.nic_id)
        case "ask_agent":
            vm.ask_agent()
        case "set_cpus":
            vm.set_cpus(request.amount)
        case "set_memory":
            vm.set_memory(request.amount)
        case "image":
            image = vm.image()
        case "load" if request.image is not None:
            vm.load(request.image)
        case name if name in MUTATIONS:
            MUTATIONS[name](vm)
        case "observe" | "add_disk" | "add_nic":
            pass
        case _:
            raise InvalidArgument(f"{request.command!r} is no command", field="command")
    return msgspec.structs.replace(reply_of(vm), image=image)


def make_vm(arguments: FakeArguments, behaviour: Behaviour, clock: Callable[[], float]) -> FakeVm:
    """Return the VM of a command line."""
    parts = arguments.parts
    vm = FakeVm(behaviour, parts.served, clock, parts.nic_fds)
    vm.sizes = parts.sizes
    if parts.awaited:
        vm.await_image()
    return vm


def fake_launch(config: VmmConfig, behaviour: Behaviour) -> Launch:
    """Return how to start a fake for this VM."""
    fds = nic_fds(config.nics, NIC_FD_FIRST)
    files = tuple(path for path in (config.kernel, config.initramfs) if path)
    parts = Parts(
        disks=config.disks,
        files=files,
        nic_fds=fds,
        sizes=Sizes(
            cpus=config.cpus,
            cpus_max=max(config.cpus, config.cpus_max),
            memory_bytes=config.memory_bytes,
            memory_max_bytes=max(config.memory_bytes, config.memory_max_bytes),
        ),
        awaited=config.incoming or bool(config.restore_dir),
    )
    argv = (
        *(sys.executable, "-I", "-m", MODULE),
        *("--id", config.worker_id),
        *("--runtime", config.runtime_dir),
        *("--parts", msgspec.json.encode(parts).decode()),
    )
    environment = {BEHAVIOUR_VARIABLE: msgspec.json.encode(behaviour).decode()}
    return Launch(argv=argv, environment=environment, nic_fds=fds)


def parse_argv(argv: Sequence[str]) -> FakeArguments:
    """Read a whole command line back, or the part behind the module's name."""
    options = list(argv)
    if MODULE in options:
        options = options[options.index(MODULE) + 1 :]
    given = dict(zip(options[::2], options[1::2], strict=False))
    missing = {"--id", "--runtime"} - given.keys()
    if missing:
        raise InvalidArgument(f"{sorted(missing)} not given", hint=f"python -m {MODULE} --help")
    return FakeArguments(
        worker_id=given["--id"],
        runtime_dir=given["--runtime"],
        parts=msgspec.json.decode(given.get("--parts", "{}"), type=Parts),
    )


def parse_behaviour(text: str) -> Behaviour:
    """Read the value of `CHV_FAKE`; empty means the defaults."""
    try:
        return msgspec.json.decode(text or "{}", type=Behaviour)
    except msgspec.MsgspecError as error:
        raise InvalidArgument(str(error), field=BEHAVIOUR_VARIABLE) from error
