"""Which limits of a volume QEMU would refuse, said before anything is asked of it. Pure."""

from __future__ import annotations

from chv.common.errors import InvalidArgument
from chv.common.wire.stord import Limits, Rate

KINDS = ("iops", "bps")
# The highest rate that QEMU takes (THROTTLE_VALUE_MAX).
RATE_MAX = 10**15


def check(limits: Limits) -> None:
    """Raise InvalidArgument, with field and remedy, for what QEMU takes neither alone nor so."""
    for kind in KINDS:
        rates = {name: rate_of(limits, f"{kind}_{name}") for name in ("total", "read", "write")}
        for name, rate in rates.items():
            _check_rate(rate, f"backend.limits.{kind}_{name}")
        if rates["total"].limit and (rates["read"].limit or rates["write"].limit):
            other = "read" if rates["read"].limit else "write"
            raise InvalidArgument(
                f"{kind}_total and {kind}_{other} limit the same requests twice",
                field=f"backend.limits.{kind}_total",
                hint=f"{kind}_total alone, or {kind}_read and {kind}_write",
            )
    if limits.iops_size_bytes and not any(
        rate_of(limits, f"iops_{name}").limit for name in ("total", "read", "write")
    ):
        raise InvalidArgument(
            f"iops_size_bytes {limits.iops_size_bytes} says how operations count, and none do",
            field="backend.limits.iops_size_bytes",
            hint="set a limit of operations too, or leave it out",
        )


def rate_of(limits: Limits, name: str) -> Rate:
    """Return one of the six rates by its name."""
    rate: Rate = getattr(limits, name)
    return rate


def _check_rate(rate: Rate, field: str) -> None:
    if max(rate.limit, rate.burst) > RATE_MAX:
        raise InvalidArgument(
            f"{max(rate.limit, rate.burst)} per second is more than {RATE_MAX}", field=field
        )
    if not rate.burst:
        return
    if not rate.limit:
        raise InvalidArgument(
            f"a burst of {rate.burst} without a limit",
            field=f"{field}.burst",
            hint="set the limit that holds when the burst is over",
        )
    if rate.burst < rate.limit:
        raise InvalidArgument(
            f"a burst of {rate.burst} is less than the limit of {rate.limit}",
            field=f"{field}.burst",
            hint=f"at least {rate.limit}, or no burst",
        )
    if rate.burst * rate.burst_s > RATE_MAX:
        raise InvalidArgument(
            f"a burst of {rate.burst} for {rate.burst_s} s is more than {RATE_MAX} in all",
            field=f"{field}.burst_s",
            hint="a shorter or a smaller burst",
        )
