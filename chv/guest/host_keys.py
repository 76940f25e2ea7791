"""SSH host keys that we make for a guest before it boots, so that its first contact is pinned.

The private half exists as a Secret in memory; where it is kept, and that it is removed, is the
caller's business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from chv.common.errors import InvalidArgument
from chv.common.secret import Secret

KEY_TYPE = "ssh-ed25519"
PUBLIC_KEY = re.compile(r"^ssh-ed25519 [A-Za-z0-9+/]{68}\Z")
KNOWN_HOST = re.compile(r"^[A-Za-z0-9._:\[\]-]{1,255}\Z")


@dataclass(frozen=True, slots=True)
class HostKey:
    """A pair: the private half in OpenSSH's format, the public half as `ssh-ed25519 BASE64`."""

    private: Secret
    public: str


def make_host_key() -> HostKey:
    """Return a new ed25519 pair."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return HostKey(private=Secret(private), public=public.decode())


def known_hosts_line(host: str, public: str) -> str:
    """Return the known_hosts line, newline included, that pins `public` for `host`."""
    if not KNOWN_HOST.match(host):
        raise InvalidArgument(f"{host!r} is not a host name", field="host")
    if not PUBLIC_KEY.match(public):
        raise InvalidArgument("not an ed25519 public key", field="public")
    return f"{host} {public}\n"
