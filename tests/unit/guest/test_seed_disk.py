"""The seed disk, read back by an ISO9660 reader, a tar reader and a shell."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import time
from dataclasses import replace
from typing import Any

import pycdlib
import pytest

from chv.common.errors import InvalidArgument
from chv.common.secret import Secret
from chv.guest import seed_disk
from chv.guest.host_keys import HostKey, make_host_key
from chv.guest.seed_disk import SeedNic, SeedSpec, build_seed

USER_KEY = make_host_key().public + " someone@example"
MAC = "52:54:00:12:34:56"


@pytest.fixture(scope="module")
def spec() -> SeedSpec:
    return SeedSpec(
        hostname="hello",
        instance_id="5b1a-1",
        host_key=make_host_key(),
        authorized_keys=[USER_KEY],
        guest_env={"TOKEN": Secret("s3cr't $x `id`\n\"")},
        user_data="#cloud-config\nruncmd: [[ls]]\n",
        nics=[SeedNic(MAC), SeedNic("52:54:00:12:34:57", "10.1.0.5/24", "10.1.0.1", ("10.1.0.1",))],
    )


def files(image: bytes) -> dict[str, bytes]:
    iso = pycdlib.PyCdlib()
    iso.open_fp(io.BytesIO(image))
    assert iso.pvd.volume_identifier.decode().strip() == "cidata"
    found: dict[str, bytes] = {}
    for child in iso.list_children(rr_path="/"):
        if child.is_file():
            name = child.rock_ridge.name().decode()
            out = io.BytesIO()
            iso.get_file_from_iso_fp(out, rr_path=f"/{name}")
            joliet = io.BytesIO()
            iso.get_file_from_iso_fp(joliet, joliet_path=f"/{name}")
            assert joliet.getvalue() == out.getvalue()
            found[name] = out.getvalue()
    iso.close()
    return found


def cloud_config(image: bytes) -> dict[str, Any]:
    text = files(image)["user-data"].decode()
    assert text.startswith("#cloud-config\n")
    value = json.loads(text.partition("\n")[2])
    assert isinstance(value, dict)
    return value


def test_the_bytes_depend_on_the_spec_alone(
    spec: SeedSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_seed(spec)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TZ", "Pacific/Auckland")
        elsewhere.setattr(time, "time", lambda: 4e9)
        time.tzset()
        later = build_seed(spec)
    time.tzset()
    assert later == first


def test_cloud_init_gets_the_pinned_host_key_and_the_users_own_config(spec: SeedSpec) -> None:
    config = cloud_config(build_seed(spec))
    assert config["ssh_keys"]["ed25519_private"] == spec.host_key.private.reveal().decode()
    assert config["ssh_keys"]["ed25519_public"] == spec.host_key.public
    assert config["ssh_deletekeys"] is True
    assert config["ssh_authorized_keys"] == [USER_KEY]
    assert config["runcmd"] == [["ls"]]
    assert config["write_files"][0]["permissions"] == "0600"


def test_meta_data_names_instance_and_host(spec: SeedSpec) -> None:
    meta = json.loads(files(build_seed(spec))["meta-data"])
    assert meta == {"instance-id": "5b1a-1", "local-hostname": "hello"}


def test_network_config_matches_by_mac_address(spec: SeedSpec) -> None:
    network = json.loads(files(build_seed(spec))["network-config"])
    first, second = network["ethernets"].values()
    assert first == {"match": {"macaddress": MAC}, "dhcp4": True, "dhcp-identifier": "mac"}
    assert second["addresses"] == ["10.1.0.5/24"]
    assert second["routes"] == [{"to": "0.0.0.0/0", "via": "10.1.0.1", "on-link": True}]


def test_an_ipv6_address_is_asked_for_and_told(spec: SeedSpec) -> None:
    image = files(build_seed(replace(spec, nics=[SeedNic(MAC, address6="fd00:1::5")])))
    (nic,) = json.loads(image["network-config"])["ethernets"].values()
    assert (nic["dhcp4"], nic["dhcp6"]) == (True, True)
    with tarfile.open(fileobj=io.BytesIO(image["chv-seed.tar"])) as tar:
        told = tar.extractfile("etc/chv/net6")
        assert told is not None
        assert told.read() == f"{MAC} fd00:1::5/128\n".encode()
    with tarfile.open(fileobj=io.BytesIO(files(build_seed(spec))["chv-seed.tar"])) as tar:
        assert "etc/chv/net6" not in tar.getnames()


def test_the_tar_keeps_secrets_private(spec: SeedSpec) -> None:
    with tarfile.open(fileobj=io.BytesIO(files(build_seed(spec))["chv-seed.tar"])) as tar:
        modes = {entry.name: entry.mode for entry in tar}
        owners = {(entry.uid, entry.gid) for entry in tar}
    assert owners == {(0, 0)}
    for private in ("etc/chv/guest-env", "etc/ssh/ssh_host_ed25519_key"):
        assert modes[private] == 0o600
    for directory in ("root", "root/.ssh", "etc/chv"):
        assert modes[directory] == 0o700


def test_a_shell_reads_the_exact_value_of_a_secret(spec: SeedSpec) -> None:
    script = seed_disk.env_file(spec.guest_env) + 'printf %s "$TOKEN"'
    shell = subprocess.run(["sh", "-c", script], capture_output=True, check=True)
    value = spec.guest_env["TOKEN"]
    assert isinstance(value, Secret)
    assert shell.stdout == value.reveal()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hostname": "Hello"}, "hostname"),
        ({"hostname": "a\nb"}, "hostname"),
        ({"hostname": "vm\n"}, "hostname"),
        ({"hostname": "a" * 300}, "hostname"),
        ({"instance_id": "a/b"}, "instance_id"),
        ({"host_key": HostKey(Secret("x"), "ssh-rsa AAAA")}, "host_key.public"),
        ({"authorized_keys": [USER_KEY, "ssh-ed25519 AAAA x\nssh-rsa AAAA"]}, "authorized_keys[1]"),
        ({"authorized_keys": ['command="id" ' + USER_KEY]}, "authorized_keys[0]"),
        ({"guest_env": {"A B": "x"}}, "guest_env"),
        ({"guest_env": {"A": "x\0y"}}, "guest_env.A"),
        ({"nics": [SeedNic("52:54:00:12:34")]}, "nics[0].mac"),
        ({"nics": [SeedNic(MAC, "10.0.0.300/24")]}, "nics[0]"),
        ({"nics": [SeedNic(MAC, "10.0.0.3/24", "10.0.0.1 x")]}, "nics[0]"),
        ({"nics": [SeedNic(MAC, "10.0.0.3/24", search="a b")]}, "nics[0].search"),
        ({"nics": [SeedNic(MAC, address6="fd00::5/64\n")]}, "nics[0]"),
        ({"guest_env": {"A": "x" * (5 << 20)}}, "spec.cloudInit.userData"),
    ],
)
def test_bad_input_is_refused_with_its_field(
    spec: SeedSpec, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        build_seed(replace(spec, **changes))
    assert caught.value.field == field


def test_an_error_does_not_show_a_secret(spec: SeedSpec) -> None:
    with pytest.raises(InvalidArgument) as caught:
        build_seed(replace(spec, guest_env={"TOKEN": Secret("hunter2\0")}))
    assert "hunter2" not in str(caught.value)
