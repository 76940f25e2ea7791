"""Finds out what this kernel can do by doing it, in a namespace that is thrown away.

Nothing of nwd's needs more than what `REQUIRED` names; the rest is told for those who build on it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable

import anyio.to_thread
from nftables import Nftables

from chv.common.errors import ChvError
from chv.common.process import syscalls
from chv.common.wire.types import Feature
from chv.nwd import dnsmasq, shaping
from chv.nwd.kernel import netns, tc

_RULES = {
    "nft_bridge": "table bridge p { chain c { type filter hook prerouting priority 0; }; }",
    "nft_inet_nat": "table inet p { chain c { type nat hook postrouting priority 0; }; }",
    "nft_concat_sets": "table inet p { set s { type ifname . ether_addr . ipv4_addr; }; }",
    "nft_checksum": "table inet p { chain c { udp checksum set 0; }; }",
    "nft_bridge_conntrack": "table bridge p { chain c { ct state established accept; }; }",
    "nft_flowtable": "table inet p { flowtable f { hook ingress priority 0; devices = { lo }; }; }",
}
REQUIRED = ("netns", "tun", "dnsmasq", "nft_bridge", "nft_inet_nat", "nft_concat_sets")


async def probe() -> list[Feature]:
    """Return every ability and what the attempt said."""
    return await anyio.to_thread.run_sync(_probe)


def missing(features: list[Feature]) -> list[str]:
    """Return the required ones that are not there."""
    return [f.name for f in features if f.name in REQUIRED and not f.present]


def _probe() -> list[Feature]:
    return [
        _attempt("tun", lambda: os.close(os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC))),
        Feature(
            name="dnsmasq",
            present=shutil.which(dnsmasq.PROGRAM) is not None,
            detail=shutil.which(dnsmasq.PROGRAM) or "not in PATH",
        ),
        *_in_throw_away_netns(),
    ]


def _attempt(name: str, action: Callable[[], None]) -> Feature:
    try:
        action()
    except (OSError, ChvError) as error:
        return Feature(name=name, present=False, detail=str(error))
    return Feature(name=name, present=True)


def _in_throw_away_netns() -> list[Feature]:
    """The namespace ends with the thread that made it."""
    found: list[Feature] = []

    def visit() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(syscalls.CLONE_NEWNET) < 0:
            text = os.strerror(ctypes.get_errno())
            found.append(Feature(name="netns", present=False, detail=text))
            return
        found.append(Feature(name="netns", present=True))
        nft = Nftables()
        for name, rules in _RULES.items():
            code, _, error = nft.cmd(rules)
            detail = error.strip().splitlines()[0][:200] if code and error.strip() else ""
            found.append(Feature(name=name, present=not code, detail=detail))
            nft.cmd("flush ruleset")
        found.extend(
            _attempt(name, action)
            for name, action in zip(shaping.FEATURES, tc.ATTEMPTS, strict=True)
        )

    netns.call_in(netns.OWN, visit)
    return found
