"""Exposures as chains of destination NAT under the gateway's frame. Pure.

An address, protocol and port lead by one map to the exposure's chain: it refuses who may not
connect, and finds a backend. Without any that is healthy a client is told at once. By source means
256 buckets, each for the backend that ranks first in it (rendezvous hashing): a backend that goes
or comes moves its own share alone. The hash has a fixed seed, so a reload moves nobody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from chv.common.wire.nwd_policy import Algorithm, IpProtocol
from chv.nwd.kept import Kept
from chv.nwd.nft import text
from chv.nwd.nft.dynamic import Dynamic
from chv.nwd.nft.gateway import CHECKED, TABLE
from chv.nwd.nft.model import Backend, Exposed
from chv.nwd.nft.text import ChainKey, Part, SetKey

BUCKETS = 256
HAIRPINS = (SetKey(*TABLE, "hairpins4"), SetKey(*TABLE, "hairpins6"))
MAPS = (SetKey(*TABLE, "exposures4"), SetKey(*TABLE, "exposures6"))
_SEED = "0x63687631"
_PROTOCOLS = {IpProtocol.TCP: "tcp", IpProtocol.UDP: "udp"}
_REFUSALS = {
    IpProtocol.TCP: "meta l4proto tcp reject with tcp reset",
    IpProtocol.UDP: "reject with icmpx port-unreachable",
}


def part(exposed: Exposed) -> Part:
    """Return what an exposure adds; what did not change comes from memory."""
    return _PARTS.get(exposed.exposure_id, (exposed,), _part)


def _part(exposed: Exposed) -> Part:
    if exposed.protocol not in _PROTOCOLS:
        raise ValueError(f"{exposed.protocol!r} is not a protocol of exposures")
    into = Dynamic()
    for six in (False, True):
        addresses = [each for each in exposed.addresses if text.is_v6(each) is six]
        if not addresses:
            continue
        name = f"e_{text.uid(exposed.exposure_id)}_{6 if six else 4}"
        into.chains[ChainKey(*TABLE, name)] = tuple(_lines(exposed, into, six))
        asked = f"{_PROTOCOLS[exposed.protocol]} . {{}} . {text.port_range(*exposed.ports)}"
        into.elements.setdefault(MAPS[six], set()).update(
            f"{asked.format(_address(each, six))} : goto {name}" for each in addresses
        )
    _add_targets(into, exposed)
    return into.part()


_PARTS: Kept[Part] = Kept()


def _add_targets(into: Dynamic, exposed: Exposed) -> None:
    """Add who may meet itself, and what the gateway asks for health."""
    for six in (False, True):
        own = [each for each in exposed.backends if text.is_v6(each.address) is six]
        asked = [each for each in exposed.checks if text.is_v6(each.address) is six]
        hairpins = {text.tuple_of(*[_address(each.address, six)] * 2) for each in own}
        checks = {
            text.tuple_of(_address(each.address, six), text.port(each.port)) for each in asked
        }
        into.elements.setdefault(HAIRPINS[six], set()).update(hairpins)
        into.elements.setdefault(CHECKED[six], set()).update(checks)


def _address(address: str, six: bool) -> str:
    return text.address6(address) if six else text.address(address)


def _lines(exposed: Exposed, into: Dynamic, six: bool) -> Iterator[str]:
    """Return who may connect, and where to."""
    ip = "ip6" if six else "ip"
    sources = text.collapsed(exposed.sources, v6=six)
    if not sources:
        yield "drop"
        return
    if len(sources) > 1:
        yield f"{ip} saddr != @{into.subnets(sources, six=six)} drop"
    elif sources != ["::/0" if six else "0.0.0.0/0"]:
        yield f"{ip} saddr != {sources[0]} drop"
    backends = [each for each in exposed.backends if text.is_v6(each.address) is six]
    if not backends:
        yield _REFUSALS[exposed.protocol]
        return
    targets = _targets(exposed, backends, six)
    protocol = _PROTOCOLS[exposed.protocol]
    yield f"meta l4proto {protocol} dnat {ip} to {_choice(exposed, targets, ip)}"


def _targets(exposed: Exposed, backends: list[Backend], six: bool) -> list[str]:
    """Return where connections may go, in an order of our own: address, or address . port."""
    first, last = exposed.ports
    keep = all(backend.port == 0 for backend in backends)
    if not keep and first != last and any(backend.port == 0 for backend in backends):
        raise ValueError(f"backends of a range of ports {first}-{last} keep it, all or none")
    found = set()
    for backend in backends:
        address = _address(backend.address, six)
        port = "" if keep else text.port(backend.port or first)
        found.add(text.tuple_of(address, port) if port else address)
    return sorted(found)


def _choice(exposed: Exposed, targets: list[str], ip: str) -> str:
    """Return an expression for one of the targets."""
    if len(targets) == 1:
        address, _, port = targets[0].partition(" . ")
        bracketed = f"[{address}]" if ip == "ip6" else address
        return f"{bracketed}:{port}" if port else address
    match exposed.algorithm:
        case Algorithm.ROUND_ROBIN:
            key, chosen = f"numgen inc mod {len(targets)}", targets
        case Algorithm.RANDOM:
            key, chosen = f"numgen random mod {len(targets)}", targets
        case Algorithm.SOURCE:
            key = f"jhash {ip} saddr mod {BUCKETS} seed {_SEED}"
            chosen = [bucket_owner(bucket, targets) for bucket in range(BUCKETS)]
        case _:
            raise ValueError(f"{exposed.algorithm!r} is not an algorithm of exposures")
    pairs = ", ".join(f"{index} : {target}" for index, target in enumerate(chosen))
    return f"{key} map {{ {pairs} }}"


def bucket_owner(bucket: int, targets: list[str]) -> str:
    """Return the target that ranks first in a bucket: each ranks by itself, whoever else is."""
    return max(
        targets,
        key=lambda target: hashlib.blake2b(f"{bucket} {target}".encode(), digest_size=8).digest(),
    )
