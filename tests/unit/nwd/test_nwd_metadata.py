"""The metadata service's documents, and the strictness of its HTTP."""

from __future__ import annotations

import json

import pytest
import yaml

from chv.common.wire.nwd import Topology, VmMetadata
from chv.nwd import metadata
from chv.nwd.metadata import Asked, Interface, document, who
from chv.nwd.metadata_http import HEAD_BYTES_MAX, HEADERS_MAX, Reader, Refused, Request, respond
from chv.nwd.records import Network, Nic

NETWORK = Network(
    topology=Topology(
        network_id="11111111-1111-4111-8111-111111111111",
        name="front",
        tenant="default",
        subnet="10.7.0.0/24",
        gateway="10.7.0.1",
        subnet6="fd00:7::/64",
        metadata=True,
        dns_domain="front.test",
    ),
    generation=1,
    boot_id="b",
)
ABOUT = VmMetadata(
    name="web",
    namespace="default",
    hostname="web-1",
    ssh_authorized_keys=["ssh-ed25519 AAAA me"],
    user_data="#cloud-config\n{}\n",
)


def nic(number: int, about: VmMetadata | None = ABOUT) -> Nic:
    return Nic(
        nic_id=f"nic-{number}",
        network_id=NETWORK.network_id,
        vm_id="vm-1",
        generation=1,
        hostname="web",
        mac=f"02:00:00:00:00:0{number}",
        address=f"10.7.0.{number}",
        address6=f"fd00:7::{number}",
        owner_uid=1,
        guest_ports=[22],
        boot_id="b",
        metadata=about,
    )


def asked(about: VmMetadata | None = ABOUT) -> Asked:
    mine = nic(5, about)
    return Asked(mine, [Interface(mine, NETWORK)])


def read(path: str, about: VmMetadata | None = ABOUT) -> str:
    return document(asked(about), path)[0].decode()


def test_what_nocloud_reads_is_there_and_is_yaml() -> None:
    meta = yaml.safe_load(read("/meta-data"))
    assert (meta["instance-id"], meta["local-hostname"]) == ("vm-1", "web-1")
    assert meta["public-keys"] == ABOUT.ssh_authorized_keys
    assert read("/user-data") == ABOUT.user_data
    assert read("/vendor-data") == ""
    config = yaml.safe_load(read("/network-config"))
    assert config["ethernets"]["nic0"]["match"] == {"macaddress": "02:00:00:00:00:05"}
    assert config["ethernets"]["nic0"]["dhcp6"] is True


def test_the_tree_tells_names_and_interfaces() -> None:
    tree = json.loads(read("/chv/v1.json"))
    assert (tree["name"], tree["namespace"], tree["hostname"]) == ("web", "default", "web-1")
    (interface,) = tree["interfaces"]
    assert interface["addresses"] == ["10.7.0.5/24", "fd00:7::5/64"]
    assert interface["network"] == "front"


def test_a_vm_without_words_of_its_owner_is_still_told_what_it_is() -> None:
    assert yaml.safe_load(read("/meta-data", None))["local-hostname"] == "web"
    assert read("/user-data", None) == ""


def test_the_index_names_every_path() -> None:
    for path in read("/").split():
        document(asked(), f"/{path}")


@pytest.mark.parametrize(
    "path", ["/latest/meta-data", "/meta-data/", "/../meta-data", "/meta%2ddata", "//meta-data"]
)
def test_another_path_is_not_found(path: str) -> None:
    with pytest.raises(Refused) as caught:
        document(asked(), path)
    assert caught.value.status == 404


@pytest.mark.parametrize(
    ("source", "number"),
    [("10.7.0.5", 5), ("fd00:7::5", 5), ("fd00:0007:0::5", 5), ("10.7.0.6", 6)],
)
def test_who_asks_is_told_by_the_source(source: str, number: int) -> None:
    found = who([nic(5), nic(6)], source)
    assert found is not None
    assert found.nic_id == f"nic-{number}"


@pytest.mark.parametrize("source", ["10.7.0.1", "10.7.0.9", "fe80::1%br0", "fd00:7::9"])
def test_nobody_else_is_anybody(source: str) -> None:
    assert who([nic(5), nic(6)], source) is None


def test_addresses_are_those_of_networks_that_want_them() -> None:
    assert metadata.addresses_of(NETWORK) == {"169.254.169.254/32", "fd00:ec2::254/128"}


# --- HTTP
HOSTS = metadata.HOSTS


def parsed(text: bytes) -> Request | None:
    return Reader(HOSTS).feed(text)


def head(*lines: bytes) -> bytes:
    return b"".join(line + b"\r\n" for line in lines) + b"\r\n"


GOOD = head(b"GET /meta-data HTTP/1.1", b"Host: 169.254.169.254", b"User-Agent: x")


def test_a_request_is_read_whatever_the_pieces_it_comes_in() -> None:
    for size in (1, 2, 7, len(GOOD)):
        reader = Reader(HOSTS)
        pieces = [GOOD[at : at + size] for at in range(0, len(GOOD), size)]
        found = [reader.feed(piece) for piece in pieces]
        assert found[-1] == Request("GET", "/meta-data")
        assert not any(found[:-1])


def test_both_addresses_are_hosts_and_an_old_client_needs_none() -> None:
    assert parsed(head(b"GET / HTTP/1.1", b"host:\t[fd00:ec2::254]:80 "))
    assert parsed(head(b"HEAD / HTTP/1.0"))


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (head(b"GET /"), 400),
        (head(b"GET  / HTTP/1.1"), 400),
        (head(b"get / HTTP/1.1"), 400),
        (head(b"GET http://169.254.169.254/ HTTP/1.1"), 400),
        (head(b"GET /\x00 HTTP/1.1"), 400),
        (head(b"GET /\xff HTTP/1.1"), 400),
        (head(b"GET / HTTP/2.0"), 505),
        (head(b"PRI * HTTP/2.0"), 400),
        (head(b"GET / HTTP/1.1"), 400),
        (head(b"GET / HTTP/1.1", b"Host: a", b"Host: 169.254.169.254"), 400),
        (head(b"GET / HTTP/1.1", b"Host: evil.test"), 403),
        (head(b"GET / HTTP/1.1", b"Host: 169.254.169.254", b" folded"), 400),
        (head(b"GET / HTTP/1.1", b"Host : 169.254.169.254"), 400),
        (head(b"GET / HTTP/1.1", b"Host: 169.254.169.254\nX: y"), 400),
        (head(b"GET / HTTP/1.1", b"Host: 169.254.169.254", b"Content-Length: 5"), 400),
        (head(b"GET / HTTP/1.1", b"Host: 169.254.169.254", b"Transfer-Encoding: chunked"), 400),
        (head(b"GET / HTTP/1.1", b"Host: 169.254.169.254", b"x-forwarded-FOR: 1.2.3.4"), 403),
        (head(b"PUT / HTTP/1.1", b"Host: 169.254.169.254"), 405),
        (head(b"GET / HTTP/1.1", *[b"A: b"] * (HEADERS_MAX + 1)), 431),
        (b"GET / HTTP/1.1\r\nA: " + b"b" * HEAD_BYTES_MAX, 431),
        (b"\x16\x03\x01\x02\x00\x01\x00" * 20 + b"\r\n\r\n", 400),
    ],
)
def test_what_is_not_plainly_right_is_refused(text: bytes, status: int) -> None:
    with pytest.raises(Refused) as caught:
        parsed(text)
    assert caught.value.status == status


def test_an_answer_says_how_long_it_is_and_that_it_is_the_last() -> None:
    answer = respond(200, b"abc", "text/plain")
    before, _, body = answer.partition(b"\r\n\r\n")
    assert body == b"abc"
    assert b"Content-Length: 3" in before
    assert b"Connection: close" in before
    assert respond(200, b"abc", "text/plain", has_body=False).endswith(b"close\r\n\r\n")
    assert b"Allow: GET, HEAD" in respond(405, b"", "text/plain")
