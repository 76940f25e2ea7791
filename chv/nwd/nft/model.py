"""What the rules of a network are made from: typed values, checked at rendering. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chv.common.wire.nwd import L2Mode
from chv.common.wire.nwd_policy import Algorithm, Direction, IpProtocol

MASQUERADE = "masquerade"


@dataclass(frozen=True, slots=True)
class NicRules:
    """What the rules need to know of a NIC.

    `addresses`: IPv4 and IPv6. `groups`: ids of its security groups; none: out everything, in
    nothing. `public`: the source of what it sends out, where it has one of its own.
    """

    nic_id: str
    tap: str
    mac: str
    addresses: tuple[str, ...]
    guest_ports: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()
    connections_max: int = 0
    public: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a group. `cidrs`: both families; `ports`: first and last.

    `rate` is of each guest, `connections_max` of each guest and peer.
    """

    direction: Direction
    protocol: IpProtocol
    ports: tuple[tuple[int, int], ...] = ()
    cidrs: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    rate: int = 0
    connections_max: int = 0
    log: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """A security group that a NIC of the network is a member of, or that a rule names as peer."""

    group_id: str
    rules: tuple[Rule, ...] = ()
    log_dropped: bool = False


@dataclass(frozen=True, slots=True)
class Backend:
    """Where connections of an exposure go; `port` 0: the port that was asked for."""

    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Exposed:
    """An exposure. `backends`: those that may get new connections; none: refused at once.

    `addresses` are what clients connect to, as it is seen inside the namespace: the exposure's own
    and, where one is the node's, the uplink's address as well. `checks`: what the gateway connects
    to by TCP to learn who is healthy, the unhealthy included.
    """

    exposure_id: str
    protocol: IpProtocol  # tcp | udp
    addresses: tuple[str, ...]
    ports: tuple[int, int]
    sources: tuple[str, ...]
    backends: tuple[Backend, ...]
    algorithm: Algorithm = Algorithm.ROUND_ROBIN
    checks: tuple[Backend, ...] = ()


@dataclass(frozen=True, slots=True)
class NetworkRules:
    """What the rules need to know of a network. `identity` goes into the tables' comments.

    `uplink` empty: there is none. `source`: what leaves by it carries this IPv4 address,
    `masquerade`: the uplink's; empty: its own (routed). The same for `source6`.
    """

    identity: str
    bridge: str
    uplink: str
    subnet: str
    gateway: str
    subnet6: str = ""
    gateway6: str = ""
    l2: L2Mode = L2Mode.ISOLATED
    source: str = MASQUERADE
    source6: str = MASQUERADE
    metadata: bool = False
    forwarders: Sequence[str] = ()
    nics: Sequence[NicRules] = ()
    groups: Sequence[Group] = ()
    exposures: Sequence[Exposed] = ()
