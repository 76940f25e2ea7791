"""The resources Network, SecurityGroup and Exposure as msgspec structs in camelCase.

Types only; the rules that span fields are in `chv.common.wire.network_rules`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from chv.common.wire.resource_base import Condition, Duration, ObjectMeta, Struct, always
from chv.common.wire.types import (
    API_VERSION,
    Cidr,
    ConnectionsMax,
    DnsName,
    Ip,
    Ipv4,
    Ipv4Cidr,
    Ipv6CidrOrEmpty,
    Mtu,
    Name,
    Port,
    PortRange,
)

BandwidthText = Annotated[
    str, Meta(pattern=r"^(\d+(\.\d+)?[kMG]bit)?\Z", description="bits a second: `100Mbit`")
]


class UplinkModeSpec(StrEnum):
    """`NAT`: out through the node's uplink. `Routed`: with own addresses. `None`: isolated."""

    NAT = "NAT"
    ROUTED = "Routed"
    NONE = "None"


class L2ModeSpec(StrEnum):
    """`Isolated`: guests meet at the gateway only. `Open`: they share a segment, broadcast too."""

    ISOLATED = "Isolated"
    OPEN = "Open"


class DnsRecordSpec(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A static name below the network's domain."""

    name: DnsName
    addresses: Annotated[list[Ip], Meta(min_length=1, max_length=16)]


class NetworkDns(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """DNS of the network. `domain` empty: `<name>.<namespace>.internal`.

    `forwarders` answer for the rest of the world, none: the node's. `search`: further domains.
    """

    domain: Annotated[str, Meta(max_length=253)] = ""
    forwarders: Annotated[list[Ip], Meta(max_length=4)] = []
    search: Annotated[list[DnsName], Meta(max_length=6)] = []
    records: Annotated[list[DnsRecordSpec], Meta(max_length=1024)] = []


class NetworkSpec(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A tenant network; `subnet`, `subnet6` and `gateway` are fixed at creation.

    `mtu` and `l2` change only while no VM runs on the network, all else at once. `subnet6`: none,
    no IPv6. `publicAddresses` are routed to this network; with `NAT` the first is the source of
    what leaves it. `metadata`: serve 169.254.169.254 to the VMs that it describes.
    """

    subnet: Ipv4Cidr
    gateway: Annotated[str, Meta(max_length=15)] = ""
    subnet6: Ipv6CidrOrEmpty = ""
    mtu: Mtu = 1450
    l2: L2ModeSpec = L2ModeSpec.ISOLATED
    uplink: UplinkModeSpec = UplinkModeSpec.NAT
    public_addresses: Annotated[list[Ipv4], Meta(max_length=16)] = []
    metadata: bool = False
    dns: NetworkDns = NetworkDns()


class NetworkStatus(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The network as nwd reports it."""

    observed_generation: int = 0
    phase: str = always("Pending")  # Pending | Ready | Degraded | Failed | Deleting
    netns: str = ""
    gateway: str = ""
    gateway6: str = ""
    domain: str = ""
    nics: int = 0
    phase_since: str = ""  # when the phase began
    conditions: list[Condition] = []


class Network(Struct, kw_only=True, frozen=True):
    """`chv get network`."""

    api_version: Annotated[str, Meta(pattern=rf"^{API_VERSION}\Z")] = API_VERSION
    kind: Annotated[str, Meta(pattern=r"^Network\Z")] = "Network"
    metadata: ObjectMeta
    spec: NetworkSpec
    status: NetworkStatus | None = None


# --- SecurityGroup
class RuleProtocol(StrEnum):
    """`Any` is every protocol, and takes no ports."""

    TCP = "TCP"
    UDP = "UDP"
    ICMP = "ICMP"
    ICMPV6 = "ICMPv6"
    ANY = "Any"


class SecurityGroupRule(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Something that is allowed, with peers in `cidrs` (`0.0.0.0/0` and `::/0` are all) and
    members of `securityGroups`, one of the two at least.

    `ports`: none is every port. `newConnectionsPerSecond` and `maxConnections` (of one peer
    address at a time): 0 is unlimited. `log`: shown by `chv net log`.
    """

    protocol: RuleProtocol
    ports: Annotated[list[PortRange], Meta(max_length=64)] = []
    cidrs: Annotated[list[Cidr], Meta(max_length=256)] = []
    security_groups: Annotated[list[Name], Meta(max_length=256)] = []
    new_connections_per_second: Annotated[int, Meta(ge=0, le=10**6)] = 0
    max_connections: ConnectionsMax = 0
    log: bool = False


class ExistingConnections(StrEnum):
    """What becomes of established connections that a change does not allow any more."""

    KEEP = "Keep"
    DROP = "Drop"


class SecurityGroupSpec(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What the NICs that name this group may receive and send; all else is dropped.

    Answers to what is allowed pass, as do DHCP, DNS and the metadata service of the network. A
    NIC in several groups has the rules of all of them.
    """

    ingress: Annotated[list[SecurityGroupRule], Meta(max_length=128)] = []
    egress: Annotated[list[SecurityGroupRule], Meta(max_length=128)] = []
    existing: ExistingConnections = ExistingConnections.DROP
    log_dropped: bool = False


class SecurityGroupStatus(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The group as nwd has it."""

    observed_generation: int = 0
    phase: str = always("Pending")  # Pending | Ready | Degraded | Failed | Deleting
    members: int = 0  # NICs
    phase_since: str = ""  # when the phase began
    conditions: list[Condition] = []


class SecurityGroup(Struct, kw_only=True, frozen=True):
    """`chv get securitygroup`."""

    api_version: Annotated[str, Meta(pattern=rf"^{API_VERSION}\Z")] = API_VERSION
    kind: Annotated[str, Meta(pattern=r"^SecurityGroup\Z")] = "SecurityGroup"
    metadata: ObjectMeta
    spec: SecurityGroupSpec
    status: SecurityGroupStatus | None = None


# --- Exposure
class ExposureProtocol(StrEnum):
    """What an exposure can forward."""

    TCP = "TCP"
    UDP = "UDP"


class BalancingAlgorithm(StrEnum):
    """How a connection finds its target; `Source`: the same client the same one."""

    ROUND_ROBIN = "RoundRobin"
    SOURCE = "Source"
    RANDOM = "Random"


class HealthCheckProtocol(StrEnum):
    """How a target is asked; `None`: it counts as healthy."""

    NONE = "None"
    TCP = "TCP"
    HTTP = "HTTP"


class HealthCheckSpec(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Asked from the network's gateway. `port` 0: the target port. HTTP: 200 to 399 is healthy.

    `rise` answers make a target healthy, `fall` failures unhealthy.
    """

    protocol: HealthCheckProtocol = HealthCheckProtocol.NONE
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    path: Annotated[str, Meta(max_length=512, pattern=r"^/[\x21-\x7e]*\Z")] = "/"
    interval: Duration = "5s"
    timeout: Duration = "2s"
    rise: Annotated[int, Meta(ge=1, le=100)] = 2
    fall: Annotated[int, Meta(ge=1, le=100)] = 3


class ExposureTarget(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A VM's NIC on the exposure's network; `interface` only where the VM has several there."""

    virtual_machine: Name
    interface: Annotated[str, Meta(max_length=63)] = ""


class ExposureSpec(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A port of the outside, or of the network itself, that leads to VMs.

    `addresses` are the node's own, public ones of the network, or free ones of its subnet.
    `endPort`: a range. `targetPort` 0: the same port. `sources`: who may connect. `drain`: how
    long a target that is taken out keeps its connections. With several targets it balances.
    """

    network: Name
    protocol: ExposureProtocol = ExposureProtocol.TCP
    addresses: Annotated[list[Ip], Meta(min_length=1, max_length=16)]
    port: Port
    end_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    target_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    sources: Annotated[list[Cidr], Meta(min_length=1, max_length=256)]
    targets: Annotated[list[ExposureTarget], Meta(max_length=64)] = []
    algorithm: BalancingAlgorithm = BalancingAlgorithm.ROUND_ROBIN
    health_check: HealthCheckSpec = HealthCheckSpec()
    drain: Duration = "30s"
    existing: ExistingConnections = ExistingConnections.DROP


class ExposureTargetStatus(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One target as nwd sees it. `state`: healthy | unhealthy | unknown | draining | absent."""

    virtual_machine: str
    address: str = ""
    state: str = always("unknown")
    since: str = ""
    message: str = ""


class ExposureStatus(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The exposure as nwd has it."""

    observed_generation: int = 0
    phase: str = always("Pending")  # Pending | Ready | Degraded | Failed | Deleting
    targets: list[ExposureTargetStatus] = []
    phase_since: str = ""  # when the phase began
    conditions: list[Condition] = []


class Exposure(Struct, kw_only=True, frozen=True):
    """`chv get exposure`."""

    api_version: Annotated[str, Meta(pattern=rf"^{API_VERSION}\Z")] = API_VERSION
    kind: Annotated[str, Meta(pattern=r"^Exposure\Z")] = "Exposure"
    metadata: ObjectMeta
    spec: ExposureSpec
    status: ExposureStatus | None = None
