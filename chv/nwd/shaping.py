"""The rates of a NIC as token buckets: what is wanted, what is seen, how the two compare. Pure.

What a guest receives is shaped where the tap sends; what it sends is redirected, as it enters, to
an ifb and shaped where that sends. A bucket holds what passes at once after a pause; behind it is
a queue. Both are sized by the rate, so that a timer that comes late loses nothing of it and what
waits is not old. Rates below `RATE_BPS_MIN` are refused: a full frame would take seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from chv.common.errors import InvalidArgument, Unsupported
from chv.common.wire.nwd import Shape
from chv.common.wire.types import Feature

RATE_BPS_MIN = 64_000
BURST_BYTES_MIN = 32 * 1024  # a jumbo frame must fit, and one of a segmented packet
BURST_BYTES_MAX = 2**28
BURST_S = 0.025
QUEUE_S = 0.05
BURST_TOLERANCE = 0.02  # the kernel keeps a burst as a time in ticks
FEATURES = ("tc_tbf", "ifb", "tc_redirect")
_NEEDED_OUT = FEATURES[:1]  # of what a guest receives


@dataclass(frozen=True, slots=True)
class Bucket:
    """A token bucket: rate in bytes per second, burst and queue in bytes."""

    rate: int
    burst_bytes: int
    queue_bytes: int


@dataclass(frozen=True, slots=True)
class Shaping:
    """What is wanted. `ifb` and `alias` are those of the NIC, whether it needs one or not."""

    ingress: Bucket | None = None
    egress: Bucket | None = None
    ifb: str = ""
    alias: str = ""


@dataclass(frozen=True, slots=True)
class SeenShape:
    """What the kernel has. A queue that is none of ours is a bucket of rate 0.

    `redirect`: the ifb that gets all that enters; `OTHER` where something else becomes of it.
    """

    ingress: Bucket | None = None
    egress: Bucket | None = None
    redirect: str = ""
    ifb_alias: str | None = None  # None: there is no ifb
    ifb_up: bool = False


OTHER = "?"
FOREIGN = Bucket(0, 0, 0)
UNSHAPED = Shaping()


def bucket(bps: int, burst_bytes: int) -> Bucket | None:
    """Return the bucket for a rate, None for no limit."""
    if not bps:
        return None
    rate = bps // 8
    burst = burst_bytes or int(rate * BURST_S)
    burst = min(max(burst, BURST_BYTES_MIN), BURST_BYTES_MAX)
    queue = min(int(rate * QUEUE_S) + 2 * burst, 2**31)
    return Bucket(rate, burst, queue)


def shaping(shape: Shape, ifb: str, alias: str) -> Shaping:
    """Return what a NIC with this shape should have."""
    return Shaping(
        ingress=bucket(shape.ingress_bps, shape.burst_bytes),
        egress=bucket(shape.egress_bps, shape.burst_bytes),
        ifb=ifb,
        alias=alias,
    )


def check(shape: Shape, features: list[Feature]) -> None:
    """Raise for a shape that is nonsense, or that this kernel cannot give."""
    for field, bps in (("ingress_bps", shape.ingress_bps), ("egress_bps", shape.egress_bps)):
        if 0 < bps < RATE_BPS_MIN:
            raise InvalidArgument(
                f"{bps} bits per second are too few",
                field=f"shape.{field}",
                hint=f"at least {RATE_BPS_MIN}, or 0 for no limit",
            )
    present = {feature.name for feature in features if feature.present}
    needed = FEATURES if shape.egress_bps else _NEEDED_OUT if shape.ingress_bps else ()
    lacking = [name for name in needed if name not in present]
    if lacking:
        raise Unsupported(
            f"this kernel lacks {', '.join(lacking)}, which rates of a NIC need",
            field="shape",
            hint="a kernel with NET_SCH_TBF, NET_SCH_INGRESS, NET_CLS_U32, NET_ACT_MIRRED and IFB",
        )


def is_right(wanted: Shaping, seen: SeenShape) -> bool:
    """Tell whether the kernel has what is wanted, and nothing more."""
    if not holds(wanted, seen):
        return False
    return seen.ifb_alias == (None if wanted.egress is None else wanted.alias)


def holds(wanted: Shaping, seen: SeenShape) -> bool:
    """Tell whether packets are held to what is wanted."""
    if not (_alike(wanted.ingress, seen.ingress) and _alike(wanted.egress, seen.egress)):
        return False
    if wanted.egress is None:
        return seen.redirect == ""
    return (seen.redirect, seen.ifb_up) == (wanted.ifb, True)


def is_wanted(shaping: Shaping) -> bool:
    """Tell whether there is any limit."""
    return shaping.ingress is not None or shaping.egress is not None


def _alike(wanted: Bucket | None, seen: Bucket | None) -> bool:
    if wanted is None or seen is None:
        return wanted is seen
    if (wanted.rate, wanted.queue_bytes) != (seen.rate, seen.queue_bytes):
        return False
    return abs(wanted.burst_bytes - seen.burst_bytes) <= wanted.burst_bytes * BURST_TOLERANCE


def shape_of(wanted: Shape, ifb: str, seen: SeenShape) -> Shape:
    """Return what the kernel does, in the words of the caller where it is what they asked for."""
    if holds(shaping(wanted, ifb, ""), seen):
        return wanted
    buckets = [each for each in (seen.ingress, seen.egress) if each is not None]
    through = seen.egress if seen.redirect == ifb else None
    return Shape(
        ingress_bps=seen.ingress.rate * 8 if seen.ingress is not None else 0,
        egress_bps=through.rate * 8 if through is not None else 0,
        burst_bytes=min(max((each.burst_bytes for each in buckets), default=0), 2**30),
    )
