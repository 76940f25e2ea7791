"""The node's configuration: one TOML file, handed through to the daemons unchanged.

Every value has a default, a type and bounds; an unknown key is an error. `load` raises
InvalidArgument with the key (`field`), the value and what to write instead, or NotFound.
Where the node's id comes from is here too (`resolve_layout`). Nothing here reads the environment.
"""

from __future__ import annotations

import difflib
import re
import socket
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from chv.common.config_console import ConsoleConfig
from chv.common.config_metrics import MetricsConfig, tcp_address
from chv.common.errors import Conflict, DataLoss, InvalidArgument, NotFound
from chv.common.files import atomic_create, ensure_dir
from chv.common.ids import INSTANCE_PATTERN, Ids
from chv.common.layout import Layout, check_socket_path
from chv.common.names import check_address, check_cidr, check_hostname, shown
from chv.common.wording import reworded

CONFIG_BYTES_MAX = 1 << 20
INSTANCE_ATTEMPTS_MAX = 100
INSTANCE_FILE = "instance"
# The uplink pool gives each network a /31; a longer prefix would not hold one.
UPLINK_PREFIX_MAX = 31
_LONGEST_UID = "0" * 32
_LONGEST_SOCKET = "x" * 16 + ".sock"

Text = Annotated[str, Meta(max_length=255)]
PathText = Annotated[str, Meta(max_length=1024)]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all tables share."""


class NodeConfig(_Table, frozen=True):
    """`[node]`: who this node is and where it keeps things."""

    name: Text = msgspec.field(default_factory=lambda: _hostname())
    instance: Annotated[str, Meta(max_length=6)] = ""
    run_dir: PathText = "/run/chv"
    state_dir: PathText = "/var/lib/chv"
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class ApiConfig(_Table, frozen=True):
    """`[api]`: who may speak to the agent."""

    allow_uids: Annotated[
        list[Annotated[int, Meta(ge=0, le=4_294_967_294)]], Meta(min_length=1, max_length=64)
    ] = msgspec.field(default_factory=lambda: [0])
    group: Annotated[str, Meta(pattern=r"^[a-z_][a-z0-9_-]*\Z", max_length=32)] = "chv"


class NetworkConfig(_Table, frozen=True):
    """`[network]`: the addresses nwd may take, and those it must stay away from.

    `host_netns` is the namespace whose uplink the networks use; empty: the one nwd starts in.
    Each network with an uplink takes two addresses of `uplink_pool`, and with IPv6 the two of the
    same number of `uplink_pool6`; none of them is seen outside the node.
    """

    host_netns: PathText = ""
    uplink_pool: Text = "169.254.64.0/18"
    uplink_pool6: Text = "fd63:6876::/112"
    forwarders: Annotated[list[Text], Meta(max_length=8)] = []
    dhcp_lease_s: Annotated[int, Meta(ge=120, le=604_800)] = 3600
    reserved: Annotated[list[Text], Meta(max_length=256)] = []


class StorageConfig(_Table, frozen=True):
    """`[storage]`: what stord may open. An empty list allows nothing of its kind.

    `allowed_paths`: directories of images beyond our own. `pools`: directories for volumes of
    class `file`, by name. `backup_paths`: directories that backups go to and come from.
    `allowed_devices`: device nodes, a trailing `*` stands for any rest of the last component.
    `volume_groups`: LVM groups. `remotes`: `nbd://HOST:PORT`, `nbd+unix://PATH`,
    `iscsi://HOST:PORT/TARGET`, `rbd://POOL`. Percentages are of the file system or pool that the
    bytes go to.
    """

    allowed_paths: Annotated[list[PathText], Meta(max_length=256)] = []
    pools: Annotated[dict[Text, PathText], Meta(max_length=64)] = {}
    backup_paths: Annotated[list[PathText], Meta(max_length=64)] = []
    allowed_devices: Annotated[list[PathText], Meta(max_length=256)] = []
    volume_groups: Annotated[list[Text], Meta(max_length=64)] = []
    remotes: Annotated[list[Text], Meta(max_length=256)] = []
    aio: Literal["native", "threads", "io_uring"] = "native"
    # auto: raw disks get an in-flight proxy, so that their VM survives a dead storage daemon.
    proxy: Literal["auto", "off"] = "auto"
    storage_daemon_binary: PathText = ""  # empty: looked for in PATH
    space_warn_percent: Annotated[int, Meta(ge=1, le=100)] = 85
    space_critical_percent: Annotated[int, Meta(ge=1, le=100)] = 95
    # Less than this is critical as well, whatever the percentage says; 0: percentages alone.
    space_critical_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 256 << 20


class VmmConfig(_Table, frozen=True):
    """`[vmm]`: which virtual machine monitor; an empty binary is looked for in PATH.

    Of several versions of Cloud Hypervisor the first that works is for new VMs; a VM keeps the
    one it was given. `cloud_hypervisor_sha256`: where given, no file with another digest is run.
    """

    driver: Literal["auto", "cloud-hypervisor", "qemu", "fake"] = "auto"
    qemu_binary: PathText = ""
    cloud_hypervisor_binary: Annotated[list[PathText], Meta(max_length=16)] = []
    cloud_hypervisor_sha256: Annotated[
        list[Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]], Meta(max_length=16)
    ] = []
    kvm: Literal["auto", "off"] = "auto"


class ImagesConfig(_Table, frozen=True):
    """`[images]`: caches that can be removed at any time."""

    cache_dir: PathText = "/var/cache/chv"


class LimitsConfig(_Table, frozen=True):
    """`[limits]`: how much at once, how much of the machine, and when to give up.

    `memory_reserve_bytes` stay with the host. What is left, times `memory_overcommit`, is what VMs
    that are wanted running may have together. `vcpu_overcommit`: vCPUs for each CPU of the
    machine; 0: as many as they like.
    """

    vms_max: Annotated[int, Meta(ge=1, le=10_000)] = 500
    parallel_starts: Annotated[int, Meta(ge=1, le=256)] = 4
    parallel_drains: Annotated[int, Meta(ge=1, le=256)] = 8
    memory_reserve_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 512 << 20
    memory_overcommit: Annotated[float, Meta(ge=0.1, le=16)] = 1.0
    vcpu_overcommit: Annotated[float, Meta(ge=0, le=1024)] = 0.0
    restarts_max: Annotated[int, Meta(ge=0, le=1000)] = 5
    restart_window_s: Annotated[float, Meta(ge=1, le=86_400)] = 60.0


class CensusConfig(_Table, frozen=True):
    """`[census]`: how often everything is compared with the records.

    `settle_s`: how long a thing must stand unexplained before it counts as a leak.
    """

    every_s: Annotated[float, Meta(ge=1, le=86_400)] = 300.0
    settle_s: Annotated[float, Meta(ge=0.1, le=60)] = 10.0


class Config(_Table, frozen=True):
    """The whole file."""

    node: NodeConfig = msgspec.field(default_factory=NodeConfig)
    api: ApiConfig = msgspec.field(default_factory=ApiConfig)
    network: NetworkConfig = msgspec.field(default_factory=NetworkConfig)
    storage: StorageConfig = msgspec.field(default_factory=StorageConfig)
    vmm: VmmConfig = msgspec.field(default_factory=VmmConfig)
    images: ImagesConfig = msgspec.field(default_factory=ImagesConfig)
    limits: LimitsConfig = msgspec.field(default_factory=LimitsConfig)
    census: CensusConfig = msgspec.field(default_factory=CensusConfig)
    console: ConsoleConfig = msgspec.field(default_factory=ConsoleConfig)
    metrics: MetricsConfig = msgspec.field(default_factory=MetricsConfig)


def load(path: Path) -> Config:
    """Read a configuration file; an empty one means every default."""
    try:
        with path.open("rb") as file:
            data = file.read(CONFIG_BYTES_MAX + 1)
    except FileNotFoundError as error:
        raise NotFound(
            f"there is no configuration file {str(path)!r}",
            hint="an empty file there takes every default",
        ) from error
    if len(data) > CONFIG_BYTES_MAX:
        raise InvalidArgument(f"{str(path)!r} is larger than {CONFIG_BYTES_MAX} bytes")
    return parse(data, str(path))


def parse(data: bytes, source: str = "configuration") -> Config:
    """Return the configuration that a TOML text means; `source` names it in errors."""
    try:
        tables = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{source}: not UTF-8 at byte {error.start}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{source}: not TOML: {error}") from error
    try:
        config = msgspec.convert(tables, Config)
    except msgspec.ValidationError as error:
        raise _explained(error, tables, source) from error
    check(config)
    return config


def dump(config: Config) -> str:
    """Return the TOML text of a configuration; `parse` gives an equal one back."""
    lines: list[str] = []
    for table, values in msgspec.to_builtins(config).items():
        lines += ["", f"[{table}]"] if lines else [f"[{table}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, str):
        # JSON strings are TOML basic strings but for DEL, which TOML wants escaped.
        return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
    return repr(value)


def check(config: Config) -> None:
    """Check what types cannot say; raises InvalidArgument with the key."""
    check_hostname(config.node.name, field="node.name")
    if config.node.instance and not INSTANCE_PATTERN.match(config.node.instance):
        raise InvalidArgument(
            f"{shown(config.node.instance)} is not an instance id",
            field="node.instance",
            hint="six of a-z and 0-9, or empty to let the node choose",
        )
    for field, path in _paths(config):
        _check_absolute(path, field)
    pool = check_cidr(config.network.uplink_pool, field="network.uplink_pool")
    if pool.version != 4 or pool.prefixlen > UPLINK_PREFIX_MAX:
        raise InvalidArgument(
            f"{shown(config.network.uplink_pool)} cannot hold a /31 for each network",
            field="network.uplink_pool",
            hint="an IPv4 subnet such as 169.254.64.0/18",
        )
    _check_uplink_pool6(config.network, pool.num_addresses)
    for index, forwarder in enumerate(config.network.forwarders):
        check_address(forwarder, field=f"network.forwarders[{index}]")
    for index, subnet in enumerate(config.network.reserved):
        check_cidr(subnet, field=f"network.reserved[{index}]")
    tcp_address(config.metrics.listen)
    _check_socket_lengths(config)


def _check_uplink_pool6(network: NetworkConfig, addresses: int) -> None:
    field = "network.uplink_pool6"
    pool = check_cidr(network.uplink_pool6, field=field)
    if pool.version != 6 or pool.num_addresses < addresses:
        raise InvalidArgument(
            f"{shown(network.uplink_pool6)} has not as many addresses as network.uplink_pool",
            field=field,
            hint="an IPv6 subnet such as fd63:6876::/112",
        )


def _paths(config: Config) -> Iterator[tuple[str, str]]:
    yield "node.run_dir", config.node.run_dir
    yield "node.state_dir", config.node.state_dir
    yield "images.cache_dir", config.images.cache_dir
    if config.network.host_netns:
        yield "network.host_netns", config.network.host_netns
    for index, path in enumerate(config.storage.allowed_paths):
        yield f"storage.allowed_paths[{index}]", path
    if config.vmm.qemu_binary:
        yield "vmm.qemu_binary", config.vmm.qemu_binary
    for index, path in enumerate(config.vmm.cloud_hypervisor_binary):
        yield f"vmm.cloud_hypervisor_binary[{index}]", path


def _check_absolute(path: str, field: str) -> None:
    unsafe = any(ord(character) < 32 or ord(character) == 127 for character in path)
    if not path.startswith("/") or path == "/" or ".." in path.split("/") or unsafe:
        raise InvalidArgument(
            f"{shown(path)} is not an absolute path", field=field, hint="such as /srv/chv, no '..'"
        )


def _check_socket_lengths(config: Config) -> None:
    """The longest socket path must fit, so that no VM finds out at its start."""
    layout = Layout("aaaaaa", Path(config.node.run_dir), Path(config.node.state_dir))
    check_socket_path(layout.vmm(_LONGEST_UID) / _LONGEST_SOCKET)
    check_socket_path(layout.export(_LONGEST_UID, _LONGEST_UID))


def resolve_layout(config: Config, ids: Ids | None = None) -> Layout:
    """Return where everything of this node is; the first call makes its id, durably."""
    recorded = config.node.instance or _recorded_instance(config)
    if recorded:
        layout = _layout(config, recorded)
        if other := _uid_block_holder(layout):
            raise Conflict(
                f"instance {recorded!r} would use the VM uids of instance {other!r}",
                field="node.instance",
                hint="give one of them another id before it has VMs",
            )
        return layout
    return _new_layout(config, ids or Ids())


def _new_layout(config: Config, ids: Ids) -> Layout:
    state_dir = Path(config.node.state_dir)
    if not state_dir.exists():
        ensure_dir(state_dir, mode=0o711, uid=-1, gid=-1)
    for _ in range(INSTANCE_ATTEMPTS_MAX):
        layout = _layout(config, ids.instance())
        if _uid_block_holder(layout) or layout.run.exists():
            continue
        if atomic_create(state_dir / INSTANCE_FILE, f"{layout.instance}\n".encode(), mode=0o644):
            return layout
        return _layout(config, _recorded_instance(config))  # another daemon was faster
    raise Conflict(f"no free instance id below {config.node.run_dir!r}")


def _recorded_instance(config: Config) -> str:
    path = Path(config.node.state_dir) / INSTANCE_FILE
    try:
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError:
        text = ""
    if not INSTANCE_PATTERN.match(text):
        raise DataLoss(
            f"{str(path)!r} does not hold an instance id",
            hint="write back the six characters that name this node's directory beside it",
        )
    return text


def _layout(config: Config, instance: str) -> Layout:
    return Layout(instance, Path(config.node.run_dir), Path(config.node.state_dir))


def _uid_block_holder(layout: Layout) -> str:
    """Return another instance below the same run directory whose VM uids are the same."""
    if not layout.run_root.is_dir():
        return ""
    for entry in sorted(layout.run_root.iterdir()):
        if entry.name == layout.instance or not INSTANCE_PATTERN.match(entry.name):
            continue
        if Layout(entry.name).uid_block == layout.uid_block:
            return entry.name
    return ""


def _hostname() -> str:
    """Return this machine's name as far as it is one; `node` where it is not."""
    name = socket.gethostname().lower()
    try:
        return check_hostname(name)
    except InvalidArgument:
        return "node"


def _explained(
    error: msgspec.ValidationError, tables: dict[str, Any], source: str
) -> InvalidArgument:
    """Turn msgspec's error into key, value and fix."""
    text, _, path = str(error).partition(" - at `$")
    field = path.strip("`").lstrip(".")
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", text, re.DOTALL)
    if unknown:
        known = _keys(field)
        near = difflib.get_close_matches(unknown.group(1), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "known are " + ", ".join(known)
        field = ".".join(filter(None, (field, unknown.group(1)[:80])))
        return InvalidArgument(f"{source}: unknown key", field=field, hint=hint)
    value = shown(_value_at(tables, field))
    allowed = _choices(field)
    told = reworded(text).replace("Expected", "expected", 1)
    hint = f"one of {', '.join(allowed)}" if allowed else told
    return InvalidArgument(f"{source}: {value} does not fit", field=field, hint=hint)


def _keys(table: str) -> list[str]:
    tables = {field.name: field.type for field in msgspec.structs.fields(Config)}
    struct = tables.get(table)
    return list(tables) if struct is None else [f.name for f in msgspec.structs.fields(struct)]


def _choices(field: str) -> tuple[str, ...]:
    """Return the values of a key that takes one of a few words."""
    table, _, key = field.partition(".")
    tables = {entry.name: entry.type for entry in msgspec.structs.fields(Config)}
    if table not in tables:
        return ()
    types = {entry.name: entry.type for entry in msgspec.structs.fields(tables[table])}
    kind = types.get(key)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _value_at(tables: Any, field: str) -> object:
    value = tables
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", field):
        value = value[key] if key else value[int(index)]
    return value
