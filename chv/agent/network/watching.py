"""What is seen of packets, by names: nwd is asked by uids and answers by them.

No byte of a capture passes here. A log that is followed goes on over a restart of nwd. What nwd
tells holds what guests sent only as addresses and numbers. Nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address

import anyio
import msgspec

from chv.agent.links import DaemonLink
from chv.agent.network.directory import Directory, NamedNic
from chv.common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from chv.common.names import check_hostname
from chv.common.rpc import CallContext, Server, WithFds
from chv.common.wire import agent_watch as api
from chv.common.wire import nwd_policy as nwd
from chv.common.wire.types import Done

POLL_S = 0.5
STATS_ASKED_MAX = 1024


class Watching:
    """Handlers of `WATCH_METHODS`. `directory`: the names of a namespace as they are now."""

    def __init__(self, link: DaemonLink, directory: Callable[[str], Directory]) -> None:
        self._nwd = link
        self._directory = directory

    def register(self, server: Server) -> None:
        """Add every handler."""
        server.add(api.READ_NETWORK_LOG, self.read_log)
        server.add(api.EXPLAIN_VM, self.explain)
        server.add(api.OPEN_VM_CAPTURE, self.open_capture)
        server.add(api.NET_STATS, self.stats)

    # --- logs
    async def read_log(self, request: api.ReadNetworkLog, context: CallContext) -> Done:
        """Send the end of a network's log and, if asked, what comes."""
        reader = _Reader(self._nwd, self._directory, request)
        await context.emit(await reader.first())
        while request.follow:
            await anyio.sleep(POLL_S)
            chunk = await reader.more()
            if chunk.entries or chunk.lost:
                await context.emit(chunk)
        return Done()

    # --- explanations
    async def explain(self, request: api.ExplainVm) -> api.ExplainVmReply:
        """Follow one packet to an address, a VM or a name."""
        if request.protocol != "icmp" and not request.port:
            raise InvalidArgument(
                f"{request.protocol} needs a port",
                field="port",
                hint=f"{request.host}:PORT, or --proto icmp",
            )
        directory = self._directory(request.namespace)
        nic = directory.of_vm(request.name, request.namespace, request.interface)[0]
        destination, resolved = await self._destination(request.host, nic, directory)
        with _known(nic):
            answer = await self._nwd.call(
                nwd.EXPLAIN_PATH,
                nwd.ExplainPath(
                    nic_id=nic.nic_id,
                    destination=destination,
                    protocol=nwd.IpProtocol(request.protocol),
                    port=request.port,
                ),
            )
        return api.ExplainVmReply(
            destination=destination,
            resolved=resolved,
            verdict=answer.verdict,
            decided_by=answer.decided_by,
            steps=answer.steps,
        )

    async def _destination(self, host: str, nic: NamedNic, directory: Directory) -> tuple[str, str]:
        """Return the address that is meant, and who says so."""
        try:
            return str(ip_address(host)), ""
        except ValueError:
            name = check_hostname(host.rstrip(".").lower(), field="host")
        own = [each for each in directory.nics if each.vm == name and each.addresses]
        near = [each for each in own if each.network_id == nic.network_id]
        for peer in near or own:
            far = "" if near else f" on network {peer.network}, which is another one"
            return peer.addresses[0], f"VM {peer.vm}, interface {peer.interface}{far}"
        found = await self._nwd.call(
            nwd.RESOLVE_NAME, nwd.ResolveName(network_id=nic.network_id, name=name)
        )
        if not found.addresses:
            raise NotFound(f"there is no address of {name!r}", field="host")
        return found.addresses[0], f"the DNS of network {nic.network}"

    # --- captures
    async def open_capture(
        self, request: api.OpenVmCapture, context: CallContext
    ) -> WithFds[api.VmCapture]:
        """Hand out a packet socket; no frame passes us."""
        if context.peer_uid != 0:
            raise PermissionDenied(
                f"uid {context.peer_uid} may not capture frames", hint="run it as root"
            )
        directory = self._directory(request.namespace)
        nic = directory.of_vm(request.name, request.namespace, request.interface)[0]
        with _known(nic):
            asked = nwd.OpenCapture(nic_id=nic.nic_id)
            _, fds = await self._nwd.call_fds(nwd.OPEN_CAPTURE, asked)
        return WithFds(api.VmCapture(interface=nic.interface, network=nic.network), fds)

    # --- statistics
    async def stats(self, request: api.GetNetStats) -> api.NetStatsReply:
        """Counters of the NICs that are asked for."""
        chosen = {nic.nic_id: nic for nic in self._chosen(request)}
        counted: dict[str, nwd.NicStats] = {}
        ids = list(chosen)
        for start in range(0, len(ids), STATS_ASKED_MAX):
            asked = nwd.GetNicStats(nic_ids=ids[start : start + STATS_ASKED_MAX])
            reply = await self._nwd.call(nwd.NIC_STATS, asked)
            counted |= {each.nic_id: each for each in reply.nics}
        return api.NetStatsReply(
            nics=[_row(nic, counted[uid]) for uid, nic in chosen.items() if uid in counted]
        )

    def _chosen(self, request: api.GetNetStats) -> Sequence[NamedNic]:
        directory = self._directory(request.namespace)
        namespace = request.namespace or "default"
        if request.vm:
            return directory.of_vm(request.vm, namespace)
        if not request.network:
            return directory.nics
        uid = directory.network(request.network, namespace)
        return [nic for nic in directory.nics if nic.network_id == uid]


@contextmanager
def _known(nic: NamedNic) -> Iterator[None]:
    """Say of a NIC that nwd does not know what that means for its VM."""
    try:
        yield
    except NotFound as error:
        raise FailedPrecondition(
            f"interface {nic.interface} of VM {nic.vm} is not attached",
            hint=f"chv start {nic.vm}",
        ) from error
    except FailedPrecondition as error:
        error.resource = f"VirtualMachine {nic.namespace}/{nic.vm}"
        raise


def _row(nic: NamedNic, stats: nwd.NicStats) -> api.VmNicStats:
    return api.VmNicStats(
        namespace=nic.namespace,
        vm=nic.vm,
        interface=nic.interface,
        network=nic.network,
        stats=stats,
    )


class _Reader:
    """One reader of one network's log."""

    def __init__(
        self,
        link: DaemonLink,
        directory: Callable[[str], Directory],
        request: api.ReadNetworkLog,
    ) -> None:
        self._nwd = link
        self._directory = directory
        self._request = request
        names = directory(request.namespace)
        self._network_id = names.network(request.network, request.namespace)
        self._nics = {
            nic.nic_id
            for nic in (
                names.of_vm(request.vm, request.namespace, request.interface) if request.vm else ()
            )
            if nic.network_id == self._network_id
        }
        if request.vm and not self._nics:
            raise NotFound(f"VM {request.vm} has no interface on network {request.network}")
        self._next = 0
        self._lost = 0

    async def first(self) -> api.NetworkLogChunk:
        """Return the end of the log."""
        tail = self._request.tail
        chunk = await self._page(max(1, tail))
        entries = chunk.entries[-tail:] if tail else []
        return msgspec.structs.replace(chunk, entries=entries)

    async def more(self) -> api.NetworkLogChunk:
        """Return what has come since; nothing while nwd is away."""
        try:
            return await self._page(nwd.LOG_LINES_MAX)
        except Unavailable:
            return api.NetworkLogChunk()

    async def _page(self, lines_max: int) -> api.NetworkLogChunk:
        """`lost` of nwd counts from its start, and what this reader was too slow for on top."""
        only = next(iter(self._nics)) if len(self._nics) == 1 else ""
        request = nwd.GetNetworkLog(
            network_id=self._network_id, nic_id=only, after=self._next, lines_max=lines_max
        )
        reply = await self._nwd.call(nwd.NETWORK_LOG, request)
        entries = [entry for entry in reply.entries if not self._nics or entry.nic_id in self._nics]
        lost = max(0, reply.lost - self._lost)
        self._next, self._lost = reply.next, reply.lost
        uids = {entry.nic_id for entry in entries} | {entry.group_id for entry in entries}
        directory = self._directory(self._request.namespace)
        names = directory.titles(uids)
        for entry in entries:
            if place := directory.place(entry.group_id, entry.rule):
                names[api.rule_key(entry)] = place
        return api.NetworkLogChunk(entries=entries, names=names, lost=lost)
