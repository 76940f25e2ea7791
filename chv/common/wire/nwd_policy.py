"""The API of chv-nwd about packets: security groups, exposures, statistics, logs, explanations.

A security group and an exposure are objects of their own, with generations of their own. Lists
that allow are never empty: nothing means "all" but `0.0.0.0/0` and `::/0`, written out.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from chv.common.rpc import Method
from chv.common.wire.types import (
    CallMeta,
    Cidr,
    ConnectionsMax,
    DnsName,
    Done,
    Empty,
    Generation,
    Ip,
    ListPage,
    Message,
    Name,
    PageReply,
    Port,
    PortRange,
    Reply,
    ShortText,
    Uid,
)

RULES_MAX = 256
PEERS_MAX = 256
PORTS_MAX = 64
TARGETS_MAX = 64
LOG_LINES_MAX = 1000


class Existing(StrEnum):
    """What becomes of established connections that the new state would not allow."""

    KEEP = "keep"
    DROP = "drop"


class Direction(StrEnum):
    """As the guest sees it."""

    INGRESS = "ingress"
    EGRESS = "egress"


class IpProtocol(StrEnum):
    """`any` is every protocol, and takes no ports."""

    TCP = "tcp"
    UDP = "udp"
    ICMP = "icmp"
    ICMPV6 = "icmpv6"
    ANY = "any"


class SecurityRule(Message, frozen=True, kw_only=True):
    """One thing that is allowed; whatever no rule allows is dropped.

    Peers are `cidrs` and members of `groups`, one of the two at least. `ports` (tcp, udp): none
    means every port of the protocol. `rate`: new connections a second, 0: unlimited.
    `connections_max`: tracked connections from one peer address at a time, 0: unlimited. `log`:
    what the rule lets through first is told, see GetNetworkLog.
    """

    direction: Direction
    protocol: IpProtocol
    ports: Annotated[list[PortRange], Meta(max_length=PORTS_MAX)] = []
    cidrs: Annotated[list[Cidr], Meta(max_length=PEERS_MAX)] = []
    groups: Annotated[list[Uid], Meta(max_length=PEERS_MAX)] = []
    rate: Annotated[int, Meta(ge=0, le=10**6)] = 0
    connections_max: ConnectionsMax = 0
    log: bool = False


class SecurityGroup(Message, frozen=True, kw_only=True):
    """Rules under a name; NICs of any network of the tenant may be members.

    `log_dropped`: what is dropped of its members' traffic is told as well.
    """

    group_id: Uid
    name: Name
    tenant: Name
    rules: Annotated[list[SecurityRule], Meta(max_length=RULES_MAX)] = []
    log_dropped: bool = False


class SetSecurityGroup(Message, frozen=True, kw_only=True):
    """Make the group so in every network that has members of it, each in one transaction."""

    meta: CallMeta  # generation of the group
    group: SecurityGroup
    existing: Existing = Existing.DROP


class GroupRef(Message, frozen=True, kw_only=True):
    """A group, and the generation of it that the caller means."""

    meta: CallMeta
    group_id: Uid


class SecurityGroupInfo(Reply, frozen=True, kw_only=True):
    """A group as it stands. `status`: ready | degraded."""

    group_id: str
    generation: Generation
    members: int = 0  # NICs
    networks: list[str] = []
    status: str = "ready"
    message: str = ""


class SecurityGroupsReply(PageReply, frozen=True, kw_only=True):
    """Every group with a record."""

    groups: list[SecurityGroupInfo] = []


# --- exposures
class Algorithm(StrEnum):
    """How a connection finds its target among the healthy ones."""

    ROUND_ROBIN = "round_robin"
    SOURCE = "source"  # the same client the same target, moved as little as possible
    RANDOM = "random"


class HealthProtocol(StrEnum):
    """How a target is asked."""

    NONE = "none"
    TCP = "tcp"
    HTTP = "http"


class HealthCheck(Message, frozen=True, kw_only=True):
    """From the gateway; HTTP is healthy with a status of 200 to 399.

    `port` 0: the target port. A new target counts as unhealthy until `rise` answers came.
    """

    protocol: HealthProtocol = HealthProtocol.NONE
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    path: Annotated[str, Meta(max_length=512, pattern=r"^/[\x21-\x7e]*\Z")] = "/"
    interval_s: Annotated[float, Meta(ge=0.1, le=3600)] = 5.0
    timeout_s: Annotated[float, Meta(ge=0.05, le=60)] = 2.0
    rise: Annotated[int, Meta(ge=1, le=100)] = 2
    fall: Annotated[int, Meta(ge=1, le=100)] = 3


class Exposure(Message, frozen=True, kw_only=True):
    """Connections to `addresses`:`port` that go to NICs of a network.

    An address is one of the node's own, one of the network's public ones, or a free one of its
    subnet (for clients inside). `port_end`: a range, whose ports are kept; `target_port` 0: the
    same port. `sources` are who may connect. A target that is taken out gets no new connections
    and keeps its own for `drain_s`.
    """

    exposure_id: Uid
    name: Name
    network_id: Uid
    protocol: Annotated[IpProtocol, Meta(description="tcp or udp")]
    addresses: Annotated[list[Ip], Meta(min_length=1, max_length=16)]
    port: Port
    port_end: Annotated[int, Meta(ge=0, le=65535)] = 0
    target_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    targets: Annotated[list[Uid], Meta(max_length=TARGETS_MAX)] = []  # NICs
    sources: Annotated[list[Cidr], Meta(min_length=1, max_length=PEERS_MAX)]
    algorithm: Algorithm = Algorithm.ROUND_ROBIN
    health: HealthCheck = HealthCheck()
    drain_s: Annotated[float, Meta(ge=0, le=3600)] = 30.0


class SetExposure(Message, frozen=True, kw_only=True):
    """Make the exposure so. `existing`: connections that it would not allow any more."""

    meta: CallMeta  # generation of the exposure
    exposure: Exposure
    existing: Existing = Existing.DROP


class CheckExposure(Message, frozen=True, kw_only=True):
    """Would the node take this for addresses that are neither public nor in a subnet?

    `exposure.addresses` are those alone; targets and the network need not be there yet.
    """

    exposure: Exposure


class NetworkEvent(Reply, frozen=True, kw_only=True):
    """A hint: something is listed in another way than before.

    `kind`: network | group | exposure, with its uid; `node`: look at everything, the node's
    addresses may have changed.
    """

    kind: str
    uid: str = ""


class ExposureRef(Message, frozen=True, kw_only=True):
    """An exposure, and the generation of it that the caller means."""

    meta: CallMeta
    exposure_id: Uid
    existing: Existing = Existing.DROP


class TargetInfo(Reply, frozen=True, kw_only=True):
    """One target. `state`: healthy | unhealthy | unknown | draining | absent."""

    nic_id: str
    address: str = ""
    state: str = "unknown"
    since: str = ""  # RFC 3339
    message: str = ""  # what the last check that failed has said


class ExposureInfo(Reply, frozen=True, kw_only=True):
    """An exposure as it stands. `status`: ready | degraded | absent."""

    exposure_id: str
    generation: Generation
    network_id: str
    targets: list[TargetInfo] = []
    status: str = "ready"
    message: str = ""


class ExposuresReply(PageReply, frozen=True, kw_only=True):
    """Every exposure with a record."""

    exposures: list[ExposureInfo] = []


# --- what is seen of packets
class NicStats(Reply, frozen=True, kw_only=True):
    """Counters of a NIC as the guest sees them, and why its packets were dropped.

    `drops` by reason: spoofed_mac, spoofed_address, spoofed_arp, spoofed_nd, rogue_dhcp,
    rogue_ra, unknown_protocol, not_allowed, connections, … They begin anew when rules are loaded
    as a whole.
    """

    nic_id: str
    rx_bytes: int = 0
    rx_packets: int = 0
    tx_bytes: int = 0
    tx_packets: int = 0
    rx_dropped: int = 0  # by the tap: nobody read it fast enough
    tx_dropped: int = 0
    drops: dict[str, int] = {}


class NicStatsReply(Reply, frozen=True, kw_only=True):
    """Statistics of every attached NIC that was asked for."""

    nics: list[NicStats] = []


class GetNicStats(Message, frozen=True, kw_only=True):
    """Statistics of these NICs; of all of them without any."""

    nic_ids: Annotated[list[Uid], Meta(max_length=1024)] = []


class LogEntry(Reply, frozen=True, kw_only=True):
    """A packet that a rule told of."""

    time: str  # RFC 3339
    network_id: str
    group_id: str = ""
    rule: int = -1  # index in the group; -1: dropped
    verdict: str  # allowed | dropped
    direction: str = ""
    nic_id: str = ""
    protocol: str = ""
    source: str = ""
    source_port: int = 0
    destination: str = ""
    destination_port: int = 0


class GetNetworkLog(Message, frozen=True, kw_only=True):
    """The newest entries of a network, of one of its NICs where that is given; oldest first."""

    network_id: Uid
    nic_id: Annotated[str, Meta(max_length=36)] = ""
    after: int = 0  # the `next` of an earlier reply
    lines_max: Annotated[int, Meta(ge=1, le=LOG_LINES_MAX)] = 100


class NetworkLogReply(Reply, frozen=True, kw_only=True):
    """`lost`: packets that were told of and never read."""

    entries: list[LogEntry] = []
    next: int = 0
    lost: int = 0


class ExplainPath(Message, frozen=True, kw_only=True):
    """Follow one packet from a guest: it is really sent, in the guest's name."""

    nic_id: Uid
    destination: Ip
    protocol: IpProtocol = IpProtocol.TCP
    port: Annotated[int, Meta(ge=0, le=65535)] = 0


class PathStep(Reply, frozen=True, kw_only=True):
    """One thing that happened to it. `place`: tap | bridge | rules | nat | route | host | …"""

    place: str
    what: str
    detail: str = ""


class PathReply(Reply, frozen=True, kw_only=True):
    """`verdict`: delivered | forwarded | dropped | unknown; `decided_by` says what decided."""

    verdict: str
    decided_by: ShortText
    steps: list[PathStep] = []


class ResolveName(Message, frozen=True, kw_only=True):
    """Ask the DNS of a network, as its guests do."""

    network_id: Uid
    name: DnsName


class ResolvedName(Reply, frozen=True, kw_only=True):
    """Addresses of the name, IPv4 first."""

    addresses: list[str] = []


class OpenCapture(Message, frozen=True, kw_only=True):
    """A packet socket on the NIC's tap comes back: a frame per read, link type Ethernet."""

    nic_id: Uid


SET_GROUP = Method("SetSecurityGroup", SetSecurityGroup, SecurityGroupInfo, timeout_s=20.0)
DELETE_GROUP = Method("DeleteSecurityGroup", GroupRef, Done)
LIST_GROUPS = Method("ListSecurityGroups", ListPage, SecurityGroupsReply, mutating=False)
SET_EXPOSURE = Method("SetExposure", SetExposure, ExposureInfo, timeout_s=20.0)
DELETE_EXPOSURE = Method("DeleteExposure", ExposureRef, Done)
LIST_EXPOSURES = Method("ListExposures", ListPage, ExposuresReply, mutating=False)
# Refuses what SetExposure would, as far as the node alone can tell.
CHECK_EXPOSURE = Method("CheckExposure", CheckExposure, Done, mutating=False)
# Sends NetworkEvent notifications until the caller leaves; one of kind `node` comes first.
WATCH_NETWORKS = Method(
    "WatchNetworks", Empty, Done, timeout_s=float("inf"), mutating=False, events=NetworkEvent
)
NIC_STATS = Method("GetNicStats", GetNicStats, NicStatsReply, mutating=False)
NETWORK_LOG = Method("GetNetworkLog", GetNetworkLog, NetworkLogReply, mutating=False)
EXPLAIN_PATH = Method("ExplainPath", ExplainPath, PathReply, timeout_s=15.0, mutating=False)
RESOLVE_NAME = Method("ResolveName", ResolveName, ResolvedName, mutating=False)
OPEN_CAPTURE = Method("OpenCapture", OpenCapture, Done, mutating=False, fds=1)

WATCH_METHODS = (NETWORK_LOG, EXPLAIN_PATH, RESOLVE_NAME, OPEN_CAPTURE)
POLICY_METHODS = (
    SET_GROUP,
    DELETE_GROUP,
    LIST_GROUPS,
    SET_EXPOSURE,
    DELETE_EXPOSURE,
    LIST_EXPOSURES,
    CHECK_EXPOSURE,
    WATCH_NETWORKS,
    NIC_STATS,
    *WATCH_METHODS,
)
