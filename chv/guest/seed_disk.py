"""Renders a VM's seed disk: an ISO9660 image that both cloud-init and the tiny guest read.

`user-data`, `meta-data` and `network-config` are NoCloud's; `chv-seed.tar` is what the tiny guest
unpacks over its root. The bytes depend on the SeedSpec alone. The image holds a private host key
and perhaps secrets: whoever writes it to a file makes that file 0600. Pure, apart from memory.
Wrong input is InvalidArgument naming the field; nothing is passed on unchecked.
"""

from __future__ import annotations

import io
import ipaddress
import json
import re
import shlex
import tarfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pycdlib
import pycdlib.dates
import pycdlib.headervd
import pycdlib.pycdlib

from chv.common.errors import InvalidArgument
from chv.common.names import check_hostname, check_mac, shown
from chv.common.secret import Secret
from chv.guest.host_keys import PUBLIC_KEY, HostKey
from chv.guest.user_data import merge_user_data

LABEL = "cidata"
TAR_NAME = "chv-seed.tar"
EPOCH = 1_700_000_000
SEED_BYTES_MAX = 4 << 20
INSTANCE_ID = re.compile(r"^[A-Za-z0-9._-]{1,128}\Z")
ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
AUTHORIZED_KEY = re.compile(
    r"^(ssh-(ed25519|rsa)|ecdsa-sha2-nistp(256|384|521)|sk-(ssh-ed25519|ecdsa-sha2-nistp256)"
    r"@openssh\.com) [A-Za-z0-9+/]+={0,2}( [ -~]*)?\Z"
)
PRIVATE_DIRECTORIES = {"root", "root/.ssh", "etc/chv"}


@dataclass(frozen=True, slots=True)
class SeedNic:
    """An interface, matched by its MAC address. Without `address` (CIDR) it uses DHCP.

    `address6` is what DHCPv6 gives it: cloud-init asks for it, the tiny guest, which has no client
    for it, takes it from here.
    """

    mac: str
    address: str = ""
    gateway: str = ""
    dns: tuple[str, ...] = ()
    search: str = ""
    address6: str = ""


@dataclass(frozen=True, slots=True)
class SeedSpec:
    """Everything that a guest learns from its seed disk."""

    hostname: str
    instance_id: str
    host_key: HostKey
    authorized_keys: list[str]
    guest_env: Mapping[str, Secret | str] = field(default_factory=dict)
    user_data: str = ""
    nics: list[SeedNic] = field(default_factory=list)


# pycdlib stamps every record with the wall clock and the local zone; a seed must not differ
# because it was made later or elsewhere. Nothing else in CHV uses pycdlib.
_FIXED_TIME: Any = SimpleNamespace(
    time=lambda: float(EPOCH),
    localtime=time.gmtime,
    gmtime=time.gmtime,
    strftime=time.strftime,
    strptime=time.strptime,
    struct_time=time.struct_time,
)
for _module in (pycdlib.dates, pycdlib.headervd, pycdlib.pycdlib):
    _module.time = _FIXED_TIME


def build_seed(spec: SeedSpec) -> bytes:
    """Return the ISO9660 image of `spec`."""
    check(spec)
    files = {
        "user-data": user_data(spec),
        "meta-data": _json({"instance-id": spec.instance_id, "local-hostname": spec.hostname}),
        "network-config": _json(network_config(spec.nics)),
        TAR_NAME: seed_tar(spec),
    }
    size_bytes = sum(len(content) for content in files.values())
    if size_bytes > SEED_BYTES_MAX:
        raise InvalidArgument(
            f"the seed would hold {size_bytes} bytes, the limit is {SEED_BYTES_MAX}",
            field="spec.cloudInit.userData",
        )
    return _iso(files)


def check(spec: SeedSpec) -> None:
    """Raise InvalidArgument for the first value that must not reach a guest."""
    check_hostname(spec.hostname)
    _match(INSTANCE_ID, spec.instance_id, "instance_id", "letters, digits and . _ -")
    _match(PUBLIC_KEY, spec.host_key.public, "host_key.public", "an ed25519 public key")
    for index, key in enumerate(spec.authorized_keys):
        _match(AUTHORIZED_KEY, key, f"authorized_keys[{index}]", "one line: type, base64, comment")
    for name, value in spec.guest_env.items():
        _match(ENV_NAME, name, "guest_env", "names of letters, digits and _")
        if "\0" in _reveal(value):
            raise InvalidArgument("the value holds a NUL byte", field=f"guest_env.{name}")
    for index, nic in enumerate(spec.nics):
        _check_nic(nic, f"nics[{index}]")


def _match(pattern: re.Pattern[str], value: str, where: str, hint: str) -> None:
    # fullmatch: `$` alone would let a final newline through.
    if not pattern.fullmatch(value):
        raise InvalidArgument(f"{shown(value)} is not allowed", field=where, hint=hint)


def _check_nic(nic: SeedNic, where: str) -> None:
    check_mac(nic.mac, field=f"{where}.mac")
    try:
        if nic.address:
            ipaddress.ip_interface(nic.address)
        if nic.address6:
            ipaddress.IPv6Address(nic.address6)
        for address in (*nic.dns, *([nic.gateway] if nic.gateway else [])):
            ipaddress.ip_address(address)
    except ValueError as error:
        raise InvalidArgument(str(error), field=where) from error
    if nic.search:
        check_hostname(nic.search, field=f"{where}.search")


def _reveal(value: Secret | str) -> str:
    return value.reveal().decode() if isinstance(value, Secret) else value


def user_data(spec: SeedSpec) -> bytes:
    """Return cloud-init's user-data: ours, with the user's own merged in."""
    ours: dict[str, Any] = {
        "disable_root": False,
        "ssh_authorized_keys": list(spec.authorized_keys),
        "ssh_deletekeys": True,
        "ssh_keys": {
            "ed25519_private": _reveal(spec.host_key.private),
            "ed25519_public": spec.host_key.public,
        },
    }
    if spec.guest_env:
        ours["write_files"] = [
            {
                "path": "/etc/chv/guest-env",
                "permissions": "0600",
                "owner": "root:root",
                "content": env_file(spec.guest_env),
            }
        ]
    return b"#cloud-config\n" + _json(merge_user_data(ours, spec.user_data))


def network_config(nics: list[SeedNic]) -> dict[str, Any]:
    """Return NoCloud's network-config, version 2."""
    return {
        "version": 2,
        "ethernets": {f"nic{index}": _ethernet(nic) for index, nic in enumerate(nics)},
    }


def _ethernet(nic: SeedNic) -> dict[str, Any]:
    config: dict[str, Any] = {"match": {"macaddress": nic.mac}}
    if nic.address6:
        config["dhcp6"] = True
    if not nic.address:
        return config | {"dhcp4": True, "dhcp-identifier": "mac"}
    config["addresses"] = [nic.address]
    if nic.gateway:
        config["routes"] = [{"to": "0.0.0.0/0", "via": nic.gateway, "on-link": True}]
    if nic.dns or nic.search:
        search = [nic.search] if nic.search else []
        config["nameservers"] = {"addresses": list(nic.dns), "search": search}
    return config


def env_file(env: Mapping[str, Secret | str]) -> str:
    """Return lines that a POSIX shell can source, whatever the values hold."""
    return "".join(f"{name}={shlex.quote(_reveal(value))}\n" for name, value in env.items())


def seed_tar(spec: SeedSpec) -> bytes:
    """Return the tar that the tiny guest unpacks over `/`, modes included."""
    files: dict[str, tuple[int, str]] = {
        "etc/hostname": (0o644, f"{spec.hostname}\n"),
        "etc/chv/instance-id": (0o644, f"{spec.instance_id}\n"),
        "etc/chv/guest-env": (0o600, env_file(spec.guest_env)),
        "etc/ssh/ssh_host_ed25519_key": (0o600, _reveal(spec.host_key.private)),
        "etc/ssh/ssh_host_ed25519_key.pub": (0o644, f"{spec.host_key.public}\n"),
        "root/.ssh/authorized_keys": (0o600, "".join(f"{k}\n" for k in spec.authorized_keys)),
    }
    static = "".join(_net_line(nic) for nic in spec.nics if nic.address)
    if static:
        files["etc/chv/net"] = (0o644, static)
    if any(nic.address6 for nic in spec.nics):
        lines = [f"{nic.mac} {nic.address6}/128\n" for nic in spec.nics if nic.address6]
        files["etc/chv/net6"] = (0o644, "".join(lines))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for directory in ("etc", "etc/chv", "etc/ssh", "root", "root/.ssh"):
            entry = tarfile.TarInfo(directory)
            entry.type = tarfile.DIRTYPE
            entry.mode = 0o700 if directory in PRIVATE_DIRECTORIES else 0o755
            tar.addfile(entry)
        for path, (mode, text) in files.items():
            content = text.encode()
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def _net_line(nic: SeedNic) -> str:
    parts = (nic.mac, nic.address, nic.gateway or "-", ",".join(nic.dns) or "-", nic.search or "-")
    return " ".join(parts) + "\n"


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"


def _iso(files: Mapping[str, bytes]) -> bytes:
    image = pycdlib.PyCdlib()
    image.new(interchange_level=3, joliet=3, rock_ridge="1.09", vol_ident=LABEL)
    for index, (name, content) in enumerate(files.items()):
        image.add_fp(
            io.BytesIO(content),
            len(content),
            f"/FILE{index}.;1",
            rr_name=name,
            joliet_path=f"/{name}",
            file_mode=0o100400,
        )
    out = io.BytesIO()
    image.write_fp(out)
    image.close()
    return out.getvalue()
