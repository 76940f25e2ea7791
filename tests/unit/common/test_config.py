"""Configuration: round trips, errors that name key, value and fix, and the node's id."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chv.common import config as module
from chv.common.config import (
    ApiConfig,
    Config,
    LimitsConfig,
    NetworkConfig,
    NodeConfig,
    StorageConfig,
    VmmConfig,
    dump,
    load,
    parse,
    resolve_layout,
)
from chv.common.config_metrics import tcp_address
from chv.common.errors import Conflict, DataLoss, InvalidArgument, NotFound
from chv.common.ids import Ids
from chv.common.layout import Layout

PATHS = st.from_regex(r"\A(/[a-z0-9é' \"\\#=-]{1,9}){1,3}\Z")
CONFIGS = st.builds(
    Config,
    node=st.builds(
        NodeConfig,
        name=st.sampled_from(["a", "node-1.example"]),
        instance=st.sampled_from(["", "abc123"]),
        state_dir=PATHS,
        log_level=st.sampled_from(["debug", "info", "warning", "error"]),
    ),
    api=st.builds(
        ApiConfig, allow_uids=st.lists(st.integers(0, 4_294_967_294), min_size=1, max_size=64)
    ),
    network=st.builds(
        NetworkConfig,
        forwarders=st.lists(st.ip_addresses(v=4).map(str), max_size=8),
        dhcp_lease_s=st.integers(120, 604_800),
    ),
    storage=st.builds(StorageConfig, allowed_paths=st.lists(PATHS, max_size=5)),
    vmm=st.builds(VmmConfig, driver=st.sampled_from(["auto", "qemu", "fake"]), qemu_binary=PATHS),
    limits=st.builds(LimitsConfig, restart_window_s=st.floats(1, 86_400)),
)


def node(tmp_path: Path, instance: str = "") -> Config:
    run_dir, state_dir = str(tmp_path / "run"), str(tmp_path / "state")
    return Config(
        node=NodeConfig(name="test", instance=instance, run_dir=run_dir, state_dir=state_dir)
    )


def test_an_empty_file_means_every_default(tmp_path: Path) -> None:
    (tmp_path / "chv.toml").touch()
    assert load(tmp_path / "chv.toml") == Config()


@given(CONFIGS)
def test_a_dumped_configuration_reads_back_equal(config: Config) -> None:
    assert parse(dump(config).encode()) == config


@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_any_text_is_dumped_as_a_toml_string(text: str) -> None:
    assert tomllib.loads(f"x = {module._toml(text)}") == {"x": text}


def test_the_defaults_pass_their_own_checks() -> None:
    module.check(Config())
    assert parse(dump(Config()).encode()) == Config()


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("[nod]\n", "nod", "did you mean 'node'"),
        ("[node]\nnmae = 'x'", "node.nmae", "did you mean 'name'"),
        ("[api]\nzzz = 1", "api.zzz", "known are allow_uids, group"),
        ("[api]\nallow_uids = [0, 'root']", "api.allow_uids[1]", "'root'"),
        ("[api]\nallow_uids = []", "api.allow_uids", "length"),
        ("[api]\nallow_uids = [-1]", "api.allow_uids[0]", ">= 0"),
        ("[api]\ngroup = 'a b'", "api.group", "'a b'"),
        ("[limits]\nvms_max = 0", "limits.vms_max", ">= 1"),
        ("[limits]\nvms_max = '5'", "limits.vms_max", "expected `int`"),
        ("[limits]\nvms_max = true", "limits.vms_max", "expected `int`"),
        ("[limits]\nrestart_window_s = nan", "limits.restart_window_s", "nan"),
        ("[limits]\nvms_max = " + "9" * 400, "limits.vms_max", "<= 10000"),
        ("[vmm]\ndriver = 'qem'", "vmm.driver", "one of auto, cloud-hypervisor, qemu, fake"),
        ("node = 3", "node", "3"),
        ("[node]\nname = 'a/b'", "node.name", "'a/b'"),
        ("[node]\ninstance = 'ABC123'", "node.instance", "six of a-z"),
        ("[node]\nrun_dir = 'run/chv'", "node.run_dir", "absolute"),
        ("[node]\nstate_dir = '/a/../b'", "node.state_dir", "'..'"),
        ('[node]\nstate_dir = "/a\\nb"', "node.state_dir", "absolute"),
        (f"[node]\nrun_dir = '/{'x' * 80}'", "node.run_dir", "shorter"),
        ("[storage]\nallowed_paths = ['/a', 'b']", "storage.allowed_paths[1]", "'b'"),
        ("[network]\nuplink_pool = '10.0.0.1/16'", "network.uplink_pool", "write 10.0.0.0/16"),
        ("[network]\nuplink_pool = '10.0.0.1/32'", "network.uplink_pool", "/31"),
        ("[network]\nuplink_pool = 'fd00::/64'", "network.uplink_pool", "IPv4"),
        ("[network]\nforwarders = ['dns']", "network.forwarders[0]", "'dns'"),
        ("[network]\nreserved = ['10.0.0.0/8', 'x']", "network.reserved[1]", "'x'"),
    ],
)
def test_an_error_names_key_value_and_fix(text: str, field: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse(text.encode(), "chv.toml")
    assert caught.value.field == field
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[node]\nname = \n", "line 2"),
        (b"a = 1\na = 2\n", "line 2"),
        (b"\xff\xfe", "not UTF-8"),
        (b"a = " + b"[" * 5000, "not TOML"),
    ],
)
def test_text_that_is_not_toml_names_its_place(data: bytes, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        parse(data, "chv.toml")


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="an empty file"):
        load(tmp_path / "chv.toml")


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chv.toml").write_bytes(b"#" * (module.CONFIG_BYTES_MAX + 1))
    with pytest.raises(InvalidArgument, match="larger"):
        load(tmp_path / "chv.toml")


def test_every_key_has_bounds() -> None:
    """An int, text or list without a bound would let a typing error take the node down."""
    for table in msgspec.structs.fields(Config):
        for key in msgspec.structs.fields(table.type):
            assert key.type not in (int, float, str), f"{table.name}.{key.name}"
            assert not str(key.type).startswith("list["), f"{table.name}.{key.name}"


def test_a_node_gets_an_id_once(tmp_path: Path) -> None:
    first = resolve_layout(node(tmp_path))
    assert (tmp_path / "state" / "instance").read_text() == f"{first.instance}\n"
    assert resolve_layout(node(tmp_path)) == first
    assert first.run_root == tmp_path / "run"
    assert first.state_root == tmp_path / "state"


def test_a_configured_id_wins_and_is_not_recorded(tmp_path: Path) -> None:
    assert resolve_layout(node(tmp_path, instance="abc123")).instance == "abc123"
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("text", ["", "ABC123", "abc1234", "../../x", "\xff"])
def test_a_damaged_id_is_not_replaced_by_a_new_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "instance").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataLoss, match="instance id"):
        resolve_layout(node(tmp_path))


def _collide() -> tuple[str, str]:
    """Return two ids whose VM uids are the same."""
    ids, seen = Ids(seed=1), dict[int, str]()
    while True:
        instance = ids.instance()
        block = Layout(instance).uid_block
        if block in seen:
            return seen[block], instance
        seen[block] = instance


class _Scripted(Ids):
    def __init__(self, *instances: str) -> None:
        super().__init__(seed=0)
        self._instances = list(instances)

    def instance(self) -> str:
        return self._instances.pop(0)


def test_a_new_id_avoids_the_vm_uids_of_other_instances(tmp_path: Path) -> None:
    other, same_uids = _collide()
    (tmp_path / "run" / other).mkdir(parents=True)
    layout = resolve_layout(node(tmp_path), _Scripted(same_uids, other, "free22"))
    assert layout.instance == "free22"


def test_an_id_whose_vm_uids_belong_to_another_instance_is_refused(tmp_path: Path) -> None:
    other, same_uids = _collide()
    (tmp_path / "run" / other).mkdir(parents=True)
    with pytest.raises(Conflict, match=f"instance '{other}'"):
        resolve_layout(node(tmp_path, instance=same_uids))
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "instance").write_text(same_uids)
    with pytest.raises(Conflict, match=f"instance '{other}'"):
        resolve_layout(node(tmp_path))


def test_a_daemon_that_loses_the_race_takes_the_winners_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    winner = resolve_layout(node(tmp_path))
    answers = iter(["", winner.instance])
    monkeypatch.setattr(module, "_recorded_instance", lambda config: next(answers))
    assert resolve_layout(node(tmp_path)) == winner


@pytest.mark.parametrize("listen", ["127.0.0.1:9177", "127.8.9.1:1", "[::1]:65535", "::1:9177"])
def test_metrics_go_over_tcp_to_this_machine(listen: str) -> None:
    assert parse(f'[metrics]\nlisten = "{listen}"\n'.encode()).metrics.listen == listen
    assert tcp_address(listen) is not None
    assert tcp_address("") is None


@pytest.mark.parametrize(
    ("listen", "why"),
    [
        ("0.0.0.0:9177", "without TLS"),
        ("[::]:9177", "without TLS"),
        ("192.0.2.1:9177", "without TLS"),
        ("localhost:9177", "is not ADDRESS:PORT"),
        ("9177", "is not ADDRESS:PORT"),
        ("127.0.0.1:", "has no port"),
        ("127.0.0.1:70000", "has no port"),
    ],
)
def test_metrics_go_nowhere_else(listen: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why) as refused:
        parse(f'[metrics]\nlisten = "{listen}"\n'.encode())
    assert refused.value.field == "metrics.listen"
