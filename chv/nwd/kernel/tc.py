"""Queueing disciplines of taps: token buckets both ways, with an ifb for what the guest sends.

Call through `netns.inside`. Reading is two messages for an unshaped NIC, so a plan can be made
from what the kernel has. Changing a rate changes the bucket where it stands: no packet is lost.
A kernel without a part answers Unsupported, which names the part.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from chv.common.errors import Unsupported
from chv.nwd.kernel import links, netlink
from chv.nwd.kernel.errors import translated
from chv.nwd.kernel.links import Link
from chv.nwd.shaping import FOREIGN, OTHER, Bucket, SeenShape, Shaping

IFB = "ifb"
_NEW_LINK, _SET_LINK, _DELETE_LINK = 16, 19, 17
_NEW_QDISC, _DELETE_QDISC, _GET_QDISC = 36, 37, 38
_NEW_FILTER, _GET_FILTER = 44, 46
_REPLACE, _EXCLUSIVE, _CREATE = 0x100, 0x200, 0x400
_ECHO = 8  # the answer is a notification, which comes to the asker only with this
_ROOT, _INGRESS = 0xFFFFFFFF, 0xFFFFFFF1
_ROOT_HANDLE, _INGRESS_HANDLE = 0x10000, 0xFFFF0000
_TC = struct.Struct("=BxxxiIII")  # tcmsg: family, ifindex, handle, parent, info
_INFO = struct.Struct("=BxHiII")  # ifinfomsg
_KIND, _OPTIONS = 1, 2
_IFNAME, _LINKINFO, _IFALIAS, _INFO_KIND, _TX_QUEUES = 3, 18, 20, 1, 31
_UP = 1
_TBF_PARAMETERS, _TBF_RATE64, _TBF_BURST = 1, 4, 6
_RATE = "BBHhHI"  # tc_ratespec: cell_log, linklayer, overhead, cell_align, mpu, rate
_TBF = struct.Struct(f"={_RATE}{_RATE}III")  # rate, peak rate, limit, buffer, mtu
_ETHERNET = 1  # link layer: then no table of transmission times is wanted
_TICK_NS = 64
_U32_DIVISOR, _U32_SELECTOR, _U32_ACTION = 4, 5, 7
_SELECTOR_ANY = struct.pack("=BBBxHHhhI", 1, 0, 1, 0, 0, 0, 0, 0) + bytes(16)
_ACTION_KIND, _ACTION_OPTIONS, _MIRRED_PARAMETERS = 1, 2, 2
_MIRRED = struct.Struct("=IIiiiiI")  # index, capab, action, refcnt, bindcnt, eaction, ifindex
_STOLEN, _REDIRECT = 4, 1
_ANY_PROTOCOL = socket.htons(3)
_PRIORITY = 10
_RATE32_MAX = 2**32 - 1
_GONE = (errno.ENOENT, errno.ENODEV, errno.EINVAL)


# --- reading
def read(
    found: Mapping[str, Link], ifbs: Mapping[str, str], asker: socket.socket | None = None
) -> dict[str, SeenShape]:
    """Return what those of the taps have that have anything; `ifbs`: the ifb of each tap."""
    with translated("reading queueing disciplines"), netlink.route(asker) as ask:
        few = len(ifbs) <= 1
        names = [name for pair in ifbs.items() for name in pair]
        buckets, hooked = _buckets(ask, [found[n].index for n in names if n in found], few)
        return {
            tap: _seen(ask, found[tap], found.get(ifb), (buckets, hooked))
            for tap, ifb in ifbs.items()
            if tap in found
            and (ifb in found or found[tap].index in hooked or found[tap].index in buckets)
        }


def _seen(
    ask: socket.socket, tap: Link, ifb: Link | None, known: tuple[dict[int, Bucket], set[int]]
) -> SeenShape:
    buckets, hooked = known
    redirect = ""
    if tap.index in hooked:
        target = _redirect(ask, tap.index)
        redirect = ifb.name if ifb is not None and target == ifb.index else OTHER
    return SeenShape(
        ingress=buckets.get(tap.index),
        egress=buckets.get(ifb.index) if ifb is not None else None,
        redirect=redirect,
        ifb_alias=ifb.alias if ifb is not None else None,
        ifb_up=ifb.up if ifb is not None else False,
    )


def _buckets(
    ask: socket.socket, indexes: list[int], few: bool
) -> tuple[dict[int, Bucket], set[int]]:
    """Return buckets by link, and the links at whose entry something is done."""
    bodies = []
    if few:
        for index in indexes:
            for parent in (_ROOT, _INGRESS):
                bodies += _get_qdisc(ask, index, parent)
    else:
        request = _TC.pack(0, 0, 0, 0, 0)
        bodies = netlink.ask(ask, netlink.message(_GET_QDISC, netlink.DUMP, request))
    buckets: dict[int, Bucket] = {}
    hooked: set[int] = set()
    for body in bodies:
        _, index, handle, parent, _ = _TC.unpack_from(body)
        if parent == _INGRESS:
            hooked.add(index)
        elif parent == _ROOT and handle:  # the kernel's own default has none
            buckets[index] = _bucket(body)
    return buckets, hooked


def _get_qdisc(ask: socket.socket, index: int, parent: int) -> list[bytes]:
    try:
        request = _TC.pack(0, index, 0, parent, 0)
        return netlink.ask(ask, netlink.message(_GET_QDISC, _ECHO | netlink.ACK, request))
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise


def _bucket(body: bytes) -> Bucket:
    found = netlink.table(body, _TC.size)
    if found.get(_KIND, b"").rstrip(b"\0") != b"tbf":
        return FOREIGN
    options = netlink.table(found.get(_OPTIONS, b""))
    fields = _TBF.unpack_from(options[_TBF_PARAMETERS])
    rate, limit, ticks = fields[5], fields[12], fields[13]
    if _TBF_RATE64 in options:
        rate = struct.unpack("=Q", options[_TBF_RATE64])[0]
    return Bucket(rate, ticks * _TICK_NS * rate // 10**9, limit)


def _redirect(ask: socket.socket, index: int) -> int:
    """Return the link that everything which enters is sent to, 0 where it is not so."""
    request = _TC.pack(0, index, 0, _INGRESS_HANDLE, 0)
    try:
        bodies = netlink.ask(ask, netlink.message(_GET_FILTER, netlink.DUMP, request))
    except OSError as error:
        if error.errno in _GONE:
            return 0
        raise
    targets = [target for body in bodies for target in _targets(body)]
    return targets[0] if len(targets) == 1 else 0


def _targets(body: bytes) -> Iterator[int]:
    """Yield a link or 0 for a filter, nothing for the tables that u32 keeps them in."""
    found = netlink.table(body, _TC.size)
    options = netlink.table(found.get(_OPTIONS, b""))
    if found.get(_KIND, b"").rstrip(b"\0") != b"u32":
        yield 0
    elif options and _U32_DIVISOR not in options:
        selector = options.get(_U32_SELECTOR, b"")
        is_any = selector[:1] == b"\1" and selector[2:3] == b"\1" and not any(selector[16:32])
        yield _target(options.get(_U32_ACTION, b"")) if is_any else 0


def _target(data: bytes) -> int:
    """Return the link that an action redirects to, 0 where it is not that one action."""
    actions = [action for _, action in netlink.attributes(data)]
    if len(actions) != 1:
        return 0
    options = netlink.table(actions[0]).get(_ACTION_OPTIONS, b"")
    parameters = netlink.table(options).get(_MIRRED_PARAMETERS, b"")
    if len(parameters) < _MIRRED.size:
        return 0
    *_, action, target = _MIRRED.unpack_from(parameters)
    return int(target) if action == _REDIRECT else 0


# --- changing
def apply(tap: str, wanted: Shaping, done: Callable[[str], None]) -> None:
    """Bring a tap to what is wanted; `done` is told after each change."""
    with translated(f"shaping {tap}"), netlink.open_socket(netlink.ROUTE) as ask:
        found = links.read([tap, wanted.ifb])
        if tap not in found:
            raise OSError(errno.ENODEV, f"there is no {tap}")
        seen = read(found, {tap: wanted.ifb}).get(tap, SeenShape())
        index = found[tap].index
        if wanted.egress is None:
            _stop_redirecting(ask, index, found.get(wanted.ifb), seen)
            done("unhooked")
        else:
            ifb = _make_ifb(ask, wanted, found.get(wanted.ifb), done)
            _set_bucket(ask, ifb, wanted.egress, seen.egress)
            done("ifb_shaped")
            if seen.redirect != wanted.ifb or wanted.ifb not in found:
                _hook(ask, index, ifb, seen)
                done("hooked")
        _set_bucket(ask, index, wanted.ingress, seen.ingress)


def _make_ifb(
    ask: socket.socket, wanted: Shaping, found: Link | None, done: Callable[[str], None]
) -> int:
    name = netlink.attribute(_IFNAME, wanted.ifb.encode() + b"\0")
    if found is None:
        kind = netlink.attribute(_INFO_KIND, IFB.encode())
        body = _INFO.pack(0, 0, 0, 0, 0) + name + netlink.attribute(_LINKINFO, kind)
        body += netlink.attribute(_TX_QUEUES, struct.pack("=I", 1))
        with _feature("the link kind ifb"):
            _tell(ask, _NEW_LINK, _CREATE | _EXCLUSIVE, body)
        done("ifb_made")
        found = links.read([wanted.ifb])[wanted.ifb]
    body = _INFO.pack(0, 0, found.index, _UP, _UP)
    body += netlink.attribute(_IFALIAS, wanted.alias.encode())
    _tell(ask, _SET_LINK, 0, body)
    return found.index


def _set_bucket(ask: socket.socket, index: int, wanted: Bucket | None, seen: Bucket | None) -> None:
    if seen is not None and (wanted is None or seen == FOREIGN):
        _delete_qdisc(ask, index, _ROOT, 0)
    if wanted is None:
        return
    rate = (0, _ETHERNET, 0, 0, 0, min(wanted.rate, _RATE32_MAX))
    ticks = min(wanted.burst_bytes * 10**9 // wanted.rate // _TICK_NS, 2**32 - 1)
    parameters = _TBF.pack(*rate, *(0,) * 6, wanted.queue_bytes, ticks, 0)
    options = netlink.attribute(_TBF_PARAMETERS, parameters)
    options += netlink.attribute(_TBF_BURST, struct.pack("=I", wanted.burst_bytes))
    if wanted.rate > _RATE32_MAX:
        options += netlink.attribute(_TBF_RATE64, struct.pack("=Q", wanted.rate))
    body = _TC.pack(0, index, _ROOT_HANDLE, _ROOT, 0) + netlink.attribute(_KIND, b"tbf\0")
    body += netlink.attribute(_OPTIONS, options)
    with _feature("the queueing discipline tbf"):
        _tell(ask, _NEW_QDISC, _CREATE | _REPLACE, body)


def _hook(ask: socket.socket, index: int, ifb: int, seen: SeenShape) -> None:
    if seen.redirect:
        _delete_qdisc(ask, index, _INGRESS, _INGRESS_HANDLE)
    body = _TC.pack(0, index, _INGRESS_HANDLE, _INGRESS, 0)
    with _feature("the queueing discipline ingress"):
        kind = netlink.attribute(_KIND, b"ingress\0")
        _tell(ask, _NEW_QDISC, _CREATE | _EXCLUSIVE, body + kind)
    mirred = _MIRRED.pack(0, 0, _STOLEN, 0, 0, _REDIRECT, ifb)
    action = netlink.attribute(_ACTION_KIND, b"mirred\0")
    action += netlink.attribute(_ACTION_OPTIONS, netlink.attribute(_MIRRED_PARAMETERS, mirred))
    options = netlink.attribute(_U32_SELECTOR, _SELECTOR_ANY)
    options += netlink.attribute(_U32_ACTION, netlink.attribute(1, action))
    body = _TC.pack(0, index, 0, _INGRESS_HANDLE, _PRIORITY << 16 | _ANY_PROTOCOL)
    body += netlink.attribute(_KIND, b"u32\0") + netlink.attribute(_OPTIONS, options)
    with _feature("the filter u32 or the action mirred"):
        _tell(ask, _NEW_FILTER, _CREATE | _EXCLUSIVE, body)


def _stop_redirecting(ask: socket.socket, index: int, ifb: Link | None, seen: SeenShape) -> None:
    """First let packets in directly, then take the ifb away."""
    if seen.redirect:
        _delete_qdisc(ask, index, _INGRESS, _INGRESS_HANDLE)
    if ifb is not None and ifb.kind == IFB:
        _tell(ask, _DELETE_LINK, 0, _INFO.pack(0, 0, ifb.index, 0, 0))


def _delete_qdisc(ask: socket.socket, index: int, parent: int, handle: int) -> None:
    try:
        _tell(ask, _DELETE_QDISC, 0, _TC.pack(0, index, handle, parent, 0))
    except OSError as error:
        if error.errno not in _GONE:
            raise


def _tell(ask: socket.socket, kind: int, flags: int, body: bytes) -> None:
    netlink.ask(ask, netlink.message(kind, flags | netlink.ACK, body))


@contextmanager
def _feature(name: str) -> Iterator[None]:
    """Name the part that the kernel says it does not have."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EOPNOTSUPP, errno.EAFNOSUPPORT):
            raise Unsupported(f"this kernel lacks {name}", field="shape") from error
        raise


# --- probing, in a namespace that is thrown away
def _attempt_bucket() -> None:
    _attempt(Shaping(ingress=_PROBE, ifb="p1"))


def _attempt_ifb() -> None:
    with translated("making an ifb"), netlink.open_socket(netlink.ROUTE) as ask:
        _make_ifb(ask, Shaping(ifb="p1", alias="probe"), None, _nobody)
        _stop_redirecting(ask, 0, links.read(["p1"])["p1"], SeenShape())


def _attempt_redirect() -> None:
    _attempt(Shaping(egress=_PROBE, ifb="p1", alias="probe"))


def _attempt(wanted: Shaping) -> None:
    apply("lo", wanted, _nobody)
    apply("lo", Shaping(ifb=wanted.ifb), _nobody)


def _nobody(_change: str) -> None:
    return


_PROBE = Bucket(10**6, 10**5, 10**5)
ATTEMPTS = (_attempt_bucket, _attempt_ifb, _attempt_redirect)  # as `shaping.FEATURES` names them
