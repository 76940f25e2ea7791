"""Field types that several APIs share. Every string, number and list is bounded here."""

from __future__ import annotations

from typing import Annotated, Any, dataclass_transform

import msgspec
from msgspec import Meta

from chv.common.rpc import Method

API_VERSION = "compute.chv.dev/v1alpha1"
# The agent and its daemons agree on one of these in Hello; the compatibility matrix decides.
PROTOCOL_VERSIONS = (1,)
GENERATION_MAX = 2**53  # exact in JSON numbers everywhere

Uid = Annotated[str, Meta(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")]
OperationId = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._:-]+\Z")]
Generation = Annotated[int, Meta(ge=0, le=GENERATION_MAX)]
# RFC 1123 label, as Kubernetes names objects.
Name = Annotated[
    str, Meta(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?\Z")
]
Text = Annotated[str, Meta(max_length=4096)]
ShortText = Annotated[str, Meta(max_length=256)]
PathText = Annotated[str, Meta(max_length=4096, pattern=r"^(/[^\x00\n]*)?\Z")]
# No user name: what is stored and shown must not carry a password.
UrlOrEmpty = Annotated[
    str, Meta(max_length=2048, pattern=r"^(https?://[^/@?#\x00-\x20]+([/?][\x21-\x7e]*)?)?\Z")
]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Mac = Annotated[str, Meta(pattern=r"^[0-9a-f]{2}(:[0-9a-f]{2}){5}\Z")]
Ipv4 = Annotated[str, Meta(pattern=r"^\d{1,3}(\.\d{1,3}){3}\Z", max_length=15)]
Ipv4Cidr = Annotated[
    str,
    Meta(
        pattern=r"^\d{1,3}(\.\d{1,3}){3}/\d{1,2}\Z",
        max_length=18,
        description="IPv4 subnet: 10.20.0.0/24",
    ),
]
# Empty where nothing was given; `X | str` would hold the text to X's pattern all the same.
NameOrEmpty = Annotated[str, Meta(max_length=63, pattern=r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?)?\Z")]
Sha256OrEmpty = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]
MacOrEmpty = Annotated[str, Meta(pattern=r"^([0-9a-f]{2}(:[0-9a-f]{2}){5})?\Z")]
# Digits, colons and dots: what is an address is decided where it is parsed.
Ip = Annotated[str, Meta(pattern=r"^[0-9a-f:.]{2,45}\Z")]
Cidr = Annotated[
    str,
    Meta(
        pattern=r"^[0-9a-f:.]{2,45}/\d{1,3}\Z",
        description="subnet: 10.20.0.0/24, one address: 10.20.0.7/32",
    ),
]
Ipv6OrEmpty = Annotated[str, Meta(pattern=r"^([0-9a-f:.]{2,45})?\Z")]
Ipv6CidrOrEmpty = Annotated[str, Meta(pattern=r"^([0-9a-f:.]{2,45}/\d{1,3})?\Z")]
# The kernel walks the list of what it counts: at 16,384 a packet costs 0.7 ms, and far more beyond.
ConnectionsMax = Annotated[int, Meta(ge=0, le=2**14)]
# Of records and search domains; `_` as in service names.
DnsName = Annotated[str, Meta(max_length=253, pattern=r"^[a-z0-9_]([a-z0-9._-]*[a-z0-9])?\Z")]
PortRange = Annotated[
    str,
    Meta(
        pattern=r"^[1-9]\d{0,4}(-[1-9]\d{0,4})?\Z",
        description='port or range: "443", "8000-8080"',
    ),
]
Ipv4OrEmpty = Annotated[str, Meta(pattern=r"^(\d{1,3}(\.\d{1,3}){3})?\Z", max_length=15)]
Port = Annotated[int, Meta(ge=1, le=65535)]
HostUid = Annotated[int, Meta(ge=0, le=2**32 - 2)]
SizeBytes = Annotated[int, Meta(ge=0, le=2**60)]
Mtu = Annotated[int, Meta(ge=576, le=9000)]


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(msgspec.field,))
class FrozenMeta(msgspec.StructMeta):
    """Makes every struct below a base frozen with keyword-only fields: msgspec inherits neither."""

    def __new__(
        mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any
    ) -> FrozenMeta:
        """Make the class with our defaults."""
        options = {"frozen": True, "kw_only": True, **options}
        return super().__new__(mcls, name, bases, namespace, **options)


class Message(msgspec.Struct, metaclass=FrozenMeta, forbid_unknown_fields=True):
    """Base of request parameters: an unknown field is an error."""


class Reply(msgspec.Struct, metaclass=FrozenMeta):
    """Base of results: a newer peer may add fields."""


class CallMeta(Message, frozen=True, kw_only=True):
    """Who asks and for which generation of the object that the call names.

    An older generation is refused with STALE_GENERATION, an equal one gets the same answer again,
    a newer one does the work.
    """

    operation_id: OperationId
    generation: Generation


class Empty(Message, frozen=True, kw_only=True):
    """No parameters."""


class ListPage(Message, frozen=True, kw_only=True):
    """One page of a list: what comes behind the key `after`, the `next` of the page before."""

    after: ShortText = ""


class PageReply(Reply, frozen=True, kw_only=True):
    """`next`: where the next page begins, empty on the last; `chv.common.pages` gathers them."""

    next: ShortText = ""


class Done(Reply, frozen=True, kw_only=True):
    """Nothing to say beyond success."""


class HelloRequest(Message, frozen=True, kw_only=True):
    """First call on a connection."""

    versions: Annotated[list[int], Meta(max_length=16)] = msgspec.field(
        default_factory=lambda: list(PROTOCOL_VERSIONS)
    )
    client: ShortText = ""


class HelloReply(Reply, frozen=True, kw_only=True):
    """What the daemon is; `state` is `recovering` until it has re-read the world."""

    daemon: str
    version: str
    protocol: int
    instance: str
    boot_id: str
    pid: int
    state: str  # ready | recovering
    features: dict[str, str] = {}


class CensusItem(Reply, frozen=True, kw_only=True, omit_defaults=True):
    """One thing of this instance that a daemon found in the kernel or on disk.

    `known`: a record of ours explains it. `owner` is the uid that its name carries, where it can
    be told. Of what nothing explains: `identity` tells it from another of its kind and name,
    `evidence` says what it is, `data` that it may be a tenant's data.
    """

    kind: str  # process | netns | link | nft | socket | mount | file | cgroup
    name: str
    owner: str = ""
    known: bool = True
    detail: str = ""
    identity: str = ""
    evidence: dict[str, str] = {}
    data: bool = False


class CensusReply(Reply, frozen=True, kw_only=True):
    """Everything of this daemon's kinds, whether known or not."""

    items: list[CensusItem] = []


class ReapUnexplained(Message, frozen=True, kw_only=True):
    """Remove one thing of a census that no record explains, if it still is that thing.

    `data`: also where it may be a tenant's data.
    """

    kind: ShortText
    name: Annotated[str, Meta(max_length=4096)]
    identity: ShortText
    data: bool = False


class Feature(Reply, frozen=True, kw_only=True):
    """One probed ability and what the probe saw."""

    name: str
    present: bool
    detail: str = ""


HELLO = Method("Hello", HelloRequest, HelloReply, timeout_s=5.0, mutating=False)
CENSUS = Method("Census", Empty, CensusReply, timeout_s=15.0, mutating=False)
REAP_UNEXPLAINED = Method("ReapUnexplained", ReapUnexplained, Done, timeout_s=45.0)
