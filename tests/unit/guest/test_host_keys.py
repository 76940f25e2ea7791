"""Host keys: a pair that OpenSSH accepts, and lines that pin it."""

from __future__ import annotations

import base64

import pytest
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)

from chv.common.errors import InvalidArgument
from chv.guest.host_keys import known_hosts_line, make_host_key


def test_the_private_half_belongs_to_the_public_half() -> None:
    key = make_host_key()
    private = load_ssh_private_key(key.private.reveal(), password=None)
    public = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    assert public.decode() == key.public


def test_two_keys_differ() -> None:
    assert make_host_key().public != make_host_key().public


def test_a_key_does_not_show_its_private_half() -> None:
    assert "PRIVATE" not in repr(make_host_key())


def test_a_known_hosts_line_pins_the_public_half() -> None:
    key = make_host_key()
    host, kind, blob = known_hosts_line("[10.0.0.5]:2222", key.public).split()
    assert (host, kind) == ("[10.0.0.5]:2222", "ssh-ed25519")
    assert base64.b64decode(blob).startswith(b"\0\0\0\x0bssh-ed25519")


@pytest.mark.parametrize("host", ["", "a b", "a\n* ssh-ed25519 AAAA", "*", "a,b"])
def test_a_host_that_would_match_more_is_refused(host: str) -> None:
    with pytest.raises(InvalidArgument):
        known_hosts_line(host, make_host_key().public)


def test_a_public_key_with_a_second_line_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        known_hosts_line("vm", make_host_key().public + "\n@cert-authority * ssh-rsa AAAA")
