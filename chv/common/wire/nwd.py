"""The API of chv-nwd: tenant networks, NICs, connections into a guest. No storage, no VM life.

Security groups, exposures and what is seen of packets are in `chv.common.wire.nwd_policy`.
Addresses are text; ports are TCP unless said otherwise. File descriptors come by SCM_RIGHTS.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from chv.common.rpc import Method
from chv.common.wire.types import (
    CENSUS,
    HELLO,
    REAP_UNEXPLAINED,
    CallMeta,
    ConnectionsMax,
    DnsName,
    Done,
    Empty,
    Feature,
    Generation,
    HostUid,
    Ip,
    Ipv4,
    Ipv4Cidr,
    Ipv4OrEmpty,
    Ipv6CidrOrEmpty,
    Ipv6OrEmpty,
    ListPage,
    MacOrEmpty,
    Message,
    Mtu,
    Name,
    PageReply,
    Port,
    Reply,
    ShortText,
    Uid,
)

GUEST_PORTS_MAX = 16
BRIDGE_PORTS_MAX = 1023  # NICs of a network: what the kernel's bridge takes
FORWARDERS_MAX = 4
SEARCH_MAX = 6
RECORDS_MAX = 1024
PUBLIC_ADDRESSES_MAX = 16
GROUPS_OF_NIC_MAX = 16
QUEUES_MAX = 16
GUEST = "guest "  # so begins the resource of an error that is the guest's own answer


class UplinkMode(StrEnum):
    """How a network reaches the outside.

    nat: translated to an address of the node. routed: with its own addresses, to which the node
    has a route. none: not at all.
    """

    NAT = "nat"
    ROUTED = "routed"
    NONE = "none"


class L2Mode(StrEnum):
    """isolated: guests reach each other through the gateway, where groups are enforced.

    open: frames between guests are bridged, broadcast and multicast included; against spoofing
    they are checked all the same, by groups they are not.
    """

    ISOLATED = "isolated"
    OPEN = "open"


class DnsRecord(Message, frozen=True, kw_only=True):
    """A static name of the network: labels below its domain, and the addresses it has."""

    name: Annotated[str, Meta(min_length=1, max_length=253)]
    addresses: Annotated[list[Ip], Meta(min_length=1, max_length=16)]


class Topology(Message, frozen=True, kw_only=True):
    """What a network is. `gateway` empty means the first host address of `subnet`.

    `subnet6` empty: no IPv6; else its gateway is the first address of it. `forwarders` empty: the
    node's. `search`: domains beside `dns_domain`. `public_addresses` are routed to the network by
    the node; with uplink nat the first is the source of what leaves, instead of the node's.
    """

    network_id: Uid
    name: Name
    tenant: Name
    subnet: Ipv4Cidr
    gateway: Ipv4OrEmpty = ""
    subnet6: Ipv6CidrOrEmpty = ""
    mtu: Mtu = 1450
    l2: L2Mode = L2Mode.ISOLATED
    uplink: UplinkMode = UplinkMode.NAT
    public_addresses: Annotated[list[Ipv4], Meta(max_length=PUBLIC_ADDRESSES_MAX)] = []
    metadata: bool = False
    dns_domain: Annotated[str, Meta(max_length=253, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?\Z")]
    forwarders: Annotated[list[Ip], Meta(max_length=FORWARDERS_MAX)] = []
    search: Annotated[list[DnsName], Meta(max_length=SEARCH_MAX)] = []
    records: Annotated[list[DnsRecord], Meta(max_length=RECORDS_MAX)] = []


class EnsureNetworkTopology(Message, frozen=True, kw_only=True):
    """Make the network so, from whatever it is now."""

    meta: CallMeta
    topology: Topology


class CheckNetworkTopology(Message, frozen=True, kw_only=True):
    """Say whether the network could be made; change nothing."""

    topology: Topology


class NetworkInfo(Reply, frozen=True, kw_only=True):
    """A network as the kernel has it. `status`: ready | degraded | absent."""

    network_id: str
    generation: Generation
    netns: str
    subnet: str
    gateway: str
    uplink_address: str = ""
    mtu: int = 1450
    dns_domain: str = ""
    subnet6: str = ""
    gateway6: str = ""
    uplink_address6: str = ""
    public_addresses: list[str] = []
    l2: str = "isolated"
    status: str = "ready"
    message: str = ""
    nics: int = 0


class NetworkRef(Message, frozen=True, kw_only=True):
    """A network, and the generation of it that the caller means."""

    meta: CallMeta
    network_id: Uid


class Shape(Message, frozen=True, kw_only=True):
    """Rates of a NIC in bits per second as the guest sees them; 0: not limited.

    `ingress` is what the guest receives. A burst of 0 is chosen by nwd from the rate.
    """

    ingress_bps: Annotated[int, Meta(ge=0, le=10**12)] = 0
    egress_bps: Annotated[int, Meta(ge=0, le=10**12)] = 0
    burst_bytes: Annotated[int, Meta(ge=0, le=2**30)] = 0


class VmMetadata(Message, frozen=True, kw_only=True):
    """What the metadata service tells the VM about itself. Never a secret of ours."""

    name: Name
    namespace: Name
    hostname: Name
    ssh_authorized_keys: Annotated[list[str], Meta(max_length=32)] = []
    user_data: Annotated[str, Meta(max_length=65536)] = ""


class AttachVmNic(Message, frozen=True, kw_only=True):
    """Give a VM a port on a network: address, DHCP and DNS records, filter, tap.

    `mac` and `address` empty: chosen by nwd and kept for the NIC's life. `guest_ports` are the
    TCP ports that OpenGuestConnection may reach from the gateway. Without `security_groups` the
    guest may reach everything that the network reaches and is reached by nothing; with them, only
    what their rules allow, both ways. `connections_max` bounds its tracked connections, both ways
    (0: the node's, which NicInfo says). `public_address`, one of the network's, is the source of
    what it sends out. A newer generation changes all but VM and network.
    """

    meta: CallMeta  # generation of the NIC
    nic_id: Uid
    vm_id: Uid
    network_id: Uid
    hostname: Name
    mac: MacOrEmpty = ""
    address: Ipv4OrEmpty = ""
    address6: Ipv6OrEmpty = ""
    owner_uid: HostUid
    guest_ports: Annotated[list[Port], Meta(max_length=GUEST_PORTS_MAX)] = []
    queues: Annotated[int, Meta(ge=1, le=QUEUES_MAX)] = 1
    security_groups: Annotated[list[Uid], Meta(max_length=GROUPS_OF_NIC_MAX)] = []
    shape: Shape = Shape()
    connections_max: ConnectionsMax = 0
    public_address: Ipv4OrEmpty = ""
    metadata: VmMetadata | None = None


class NicInfo(Reply, frozen=True, kw_only=True):
    """A NIC as it is. `state`: attached | absent | degraded.

    `carrier`: some process holds the tap open; looked at by GetVmNic and ListVmNics alone.
    """

    nic_id: str
    vm_id: str
    network_id: str
    generation: Generation
    tap: str
    netns: str
    mac: str
    address: str
    prefix_length: int
    gateway: str
    mtu: int
    hostname: str
    address6: str = ""
    gateway6: str = ""
    queues: int = 1
    security_groups: list[str] = []
    shape: Shape = Shape()  # as the kernel has it, where it was looked at
    connections_max: int = 0  # in force: asked for, or the node's own
    state: str = "attached"
    message: str = ""
    carrier: bool = True


class NicRef(Message, frozen=True, kw_only=True):
    """A NIC, and the generation of it that the caller means."""

    meta: CallMeta
    nic_id: Uid


class OpenVmNic(Message, frozen=True, kw_only=True):
    """Open the tap; a file descriptor (IFF_TAP | IFF_NO_PI | IFF_VNET_HDR) per queue comes back.

    With more than one queue also IFF_MULTI_QUEUE; the NIC's own number is the only one possible.
    """

    nic_id: Uid


class OpenGuestConnection(Message, frozen=True, kw_only=True):
    """Connect from the gateway to a declared TCP port of the guest; the socket comes back."""

    nic_id: Uid
    port: Port
    timeout_s: Annotated[float, Meta(gt=0, le=30)] = 5.0


class GuestConnection(Reply, frozen=True, kw_only=True):
    """Ends of the connection as the namespace sees them."""

    local: str
    remote: str


class GetNetwork(Message, frozen=True, kw_only=True):
    """One network by id."""

    network_id: Uid


class GetNic(Message, frozen=True, kw_only=True):
    """One NIC by id."""

    nic_id: Uid


class ListNetworksReply(PageReply, frozen=True, kw_only=True):
    """Every network with a record."""

    networks: list[NetworkInfo] = []


class ListNicsReply(PageReply, frozen=True, kw_only=True):
    """Every NIC with a record."""

    nics: list[NicInfo] = []


class NwdHealth(Reply, frozen=True, kw_only=True):
    """State of nwd as a whole; `status`: healthy | degraded."""

    status: str
    features: list[Feature] = []
    networks: int = 0
    nics: int = 0
    groups: int = 0
    exposures: int = 0
    last_error: ShortText = ""
    warnings: list[str] = []


ENSURE_NETWORK = Method("EnsureNetworkTopology", EnsureNetworkTopology, NetworkInfo, timeout_s=20.0)
CHECK_NETWORK = Method(
    "CheckNetworkTopology", CheckNetworkTopology, Done, timeout_s=5.0, mutating=False
)
DELETE_NETWORK = Method("DeleteNetworkTopology", NetworkRef, Done, timeout_s=20.0)
ATTACH_NIC = Method("AttachVmNic", AttachVmNic, NicInfo)
DETACH_NIC = Method("DetachVmNic", NicRef, Done)
OPEN_NIC = Method("OpenVmNic", OpenVmNic, NicInfo, mutating=False, fds=QUEUES_MAX)
OPEN_GUEST_CONNECTION = Method(
    "OpenGuestConnection", OpenGuestConnection, GuestConnection, 35.0, mutating=False, fds=1
)
GET_NETWORK = Method("GetNetwork", GetNetwork, NetworkInfo, mutating=False)
GET_NIC = Method("GetVmNic", GetNic, NicInfo, mutating=False)
LIST_NETWORKS = Method("ListNamespaceState", ListPage, ListNetworksReply, mutating=False)
LIST_NICS = Method("ListVmNics", ListPage, ListNicsReply, mutating=False)
NWD_HEALTH = Method("GetHealth", Empty, NwdHealth, timeout_s=5.0, mutating=False)

METHODS = (
    HELLO,
    CENSUS,
    REAP_UNEXPLAINED,
    ENSURE_NETWORK,
    CHECK_NETWORK,
    DELETE_NETWORK,
    ATTACH_NIC,
    DETACH_NIC,
    OPEN_NIC,
    OPEN_GUEST_CONNECTION,
    GET_NETWORK,
    GET_NIC,
    LIST_NETWORKS,
    LIST_NICS,
    NWD_HEALTH,
)
