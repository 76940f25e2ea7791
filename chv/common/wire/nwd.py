"""The API of chv-nwd: tenant networks, NICs, connections into a guest. No storage, no VM life.

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
    CallMeta,
    Done,
    Empty,
    Feature,
    Generation,
    HostUid,
    Ipv4,
    Ipv4Cidr,
    Ipv4OrEmpty,
    MacOrEmpty,
    Message,
    Mtu,
    Name,
    Port,
    Reply,
    ShortText,
    Uid,
)

GUEST_PORTS_MAX = 16
FORWARDERS_MAX = 4
GUEST = "guest "  # so begins the resource of an error that is the guest's own answer


class UplinkMode(StrEnum):
    """How a network reaches the outside."""

    NAT = "nat"
    NONE = "none"


class Topology(Message, frozen=True, kw_only=True):
    """What a network is. `gateway` empty means the first host address of `subnet`."""

    network_id: Uid
    name: Name
    tenant: Name
    subnet: Ipv4Cidr
    gateway: Ipv4OrEmpty = ""
    mtu: Mtu = 1450
    uplink: UplinkMode = UplinkMode.NAT
    dns_domain: Annotated[str, Meta(max_length=253, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?\Z")]
    forwarders: Annotated[list[Ipv4], Meta(max_length=FORWARDERS_MAX)] = []


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
    status: str = "ready"
    message: str = ""
    nics: int = 0


class NetworkRef(Message, frozen=True, kw_only=True):
    """A network, and the generation of it that the caller means."""

    meta: CallMeta
    network_id: Uid


class AttachVmNic(Message, frozen=True, kw_only=True):
    """Give a VM a port on a network: address, DHCP and DNS records, filter, tap.

    `mac` and `address` empty: chosen by nwd and kept for the NIC's life. `guest_ports` are the
    TCP ports that OpenGuestConnection may reach from the gateway.
    """

    meta: CallMeta  # generation of the NIC
    nic_id: Uid
    vm_id: Uid
    network_id: Uid
    hostname: Name
    mac: MacOrEmpty = ""
    address: Ipv4OrEmpty = ""
    owner_uid: HostUid
    guest_ports: Annotated[list[Port], Meta(max_length=GUEST_PORTS_MAX)] = []


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
    state: str = "attached"
    message: str = ""
    carrier: bool = True


class NicRef(Message, frozen=True, kw_only=True):
    """A NIC, and the generation of it that the caller means."""

    meta: CallMeta
    nic_id: Uid


class OpenVmNic(Message, frozen=True, kw_only=True):
    """Open the tap; one file descriptor (IFF_TAP | IFF_NO_PI | IFF_VNET_HDR) comes back."""

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


class ListNetworksReply(Reply, frozen=True, kw_only=True):
    """Every network with a record."""

    networks: list[NetworkInfo] = []


class ListNicsReply(Reply, frozen=True, kw_only=True):
    """Every NIC with a record."""

    nics: list[NicInfo] = []


class NwdHealth(Reply, frozen=True, kw_only=True):
    """State of nwd as a whole; `status`: healthy | degraded."""

    status: str
    features: list[Feature] = []
    networks: int = 0
    nics: int = 0
    last_error: ShortText = ""
    warnings: list[str] = []


ENSURE_NETWORK = Method("EnsureNetworkTopology", EnsureNetworkTopology, NetworkInfo, timeout_s=20.0)
CHECK_NETWORK = Method(
    "CheckNetworkTopology", CheckNetworkTopology, Done, timeout_s=5.0, mutating=False
)
DELETE_NETWORK = Method("DeleteNetworkTopology", NetworkRef, Done, timeout_s=20.0)
ATTACH_NIC = Method("AttachVmNic", AttachVmNic, NicInfo)
DETACH_NIC = Method("DetachVmNic", NicRef, Done)
OPEN_NIC = Method("OpenVmNic", OpenVmNic, NicInfo, mutating=False, fds=1)
OPEN_GUEST_CONNECTION = Method(
    "OpenGuestConnection", OpenGuestConnection, GuestConnection, 35.0, mutating=False, fds=1
)
GET_NETWORK = Method("GetNetwork", GetNetwork, NetworkInfo, mutating=False)
GET_NIC = Method("GetVmNic", GetNic, NicInfo, mutating=False)
LIST_NETWORKS = Method("ListNamespaceState", Empty, ListNetworksReply, mutating=False)
LIST_NICS = Method("ListVmNics", Empty, ListNicsReply, mutating=False)
NWD_HEALTH = Method("GetHealth", Empty, NwdHealth, timeout_s=5.0, mutating=False)

METHODS = (
    HELLO,
    CENSUS,
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
