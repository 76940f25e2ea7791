"""The part of the agent's API that shows packets: logs, explanations, captures, statistics.

What nwd says by uids is said here by names. Part of the table in `chv.common.wire.agent`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from chv.common.rpc import Method
from chv.common.wire.nwd_policy import LOG_LINES_MAX, LogEntry, NicStats, PathStep
from chv.common.wire.types import Done, Message, Name, NameOrEmpty, Reply

HOST_CHARACTERS_MAX = 253


class ReadNetworkLog(Message, frozen=True, kw_only=True):
    """The newest `tail` entries of a network's log, of one VM where it is named, then new ones."""

    network: Name
    namespace: Name = "default"
    vm: NameOrEmpty = ""
    interface: NameOrEmpty = ""
    tail: Annotated[int, Meta(ge=0, le=LOG_LINES_MAX)] = 100
    follow: bool = False


class NetworkLogChunk(Reply, frozen=True, kw_only=True):
    """`names`: of groups, NICs (`VM/INTERFACE`) and rules (`egress[0]`, see `rule_key`) in the
    entries. `lost`: since the last chunk.
    """

    entries: list[LogEntry] = []
    names: dict[str, str] = {}
    lost: int = 0


def rule_key(entry: LogEntry) -> str:
    """Return under which key the place of an entry's rule is in `names`."""
    return f"{entry.group_id}:{entry.rule}"


class ExplainVm(Message, frozen=True, kw_only=True):
    """Send one packet in a VM's name and follow it.

    `host`: an address, a VM of the namespace, or a name that the network's DNS knows.
    """

    name: Name
    namespace: Name = "default"
    interface: NameOrEmpty = ""
    host: Annotated[str, Meta(min_length=1, max_length=HOST_CHARACTERS_MAX)]
    protocol: Annotated[str, Meta(pattern=r"^(tcp|udp|icmp)\Z")] = "tcp"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0


class ExplainVmReply(Reply, frozen=True, kw_only=True):
    """As nwd's PathReply; `resolved` says who or what told the address, where one was asked."""

    destination: str
    resolved: str = ""
    verdict: str
    decided_by: str
    steps: list[PathStep] = []


class OpenVmCapture(Message, frozen=True, kw_only=True):
    """A packet socket on the tap of a VM comes back; for root alone.

    Whoever holds it could bind it to other links of the network.
    """

    name: Name
    namespace: Name = "default"
    interface: NameOrEmpty = ""


class VmCapture(Reply, frozen=True, kw_only=True):
    """Whose frames these are."""

    interface: str
    network: str


class GetNetStats(Message, frozen=True, kw_only=True):
    """Statistics of NICs; of one VM or one network where it is named."""

    namespace: NameOrEmpty = ""  # empty: all
    vm: NameOrEmpty = ""
    network: NameOrEmpty = ""


class VmNicStats(Reply, frozen=True, kw_only=True):
    """Counters of one interface."""

    namespace: str
    vm: str
    interface: str
    network: str
    stats: NicStats


class NetStatsReply(Reply, frozen=True, kw_only=True):
    """Sorted by namespace, VM and interface."""

    nics: list[VmNicStats] = []


READ_NETWORK_LOG = Method(
    "ReadNetworkLog",
    ReadNetworkLog,
    Done,
    timeout_s=float("inf"),
    mutating=False,
    events=NetworkLogChunk,
)
EXPLAIN_VM = Method("ExplainVm", ExplainVm, ExplainVmReply, timeout_s=30.0, mutating=False)
OPEN_VM_CAPTURE = Method("OpenVmCapture", OpenVmCapture, VmCapture, mutating=False, fds=1)
NET_STATS = Method("GetNetStats", GetNetStats, NetStatsReply, mutating=False)

WATCH_METHODS = (READ_NETWORK_LOG, EXPLAIN_VM, OPEN_VM_CAPTURE, NET_STATS)
