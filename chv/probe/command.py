"""What the probe is told: words of the kernel command line, also its serial commands; pure.

Every value is checked against what the guest can read back (no blanks, no commas, numbers in
their range): a wrong one is `InvalidArgument` here and never a guest that does something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from chv.common.errors import InvalidArgument

COMMAND_BYTES_MAX = 2048
CHECKS_BYTES_MAX = 511
DEPTH_MAX = 32
SERIAL_LENGTH_MAX = 20

PlanKind = Literal["check", "write", "verify", "writer", "records", "none"]
CheckKind = Literal["ping", "tcp", "echo", "udp", "dns"]
End = Literal["off", "reboot", "halt", "spin", "fault", "triple", "stay"]
# All that the guest knows, in the order in which it tries them.
INSTRUCTIONS = (
    "cpuid", "rdmsr", "wrmsr", "mov-cr", "mov-dr", "clts", "sgdt", "ltr", "lsl", "verw",
    "invlpg", "wbinvd", "swapgs", "int3", "ud2", "iret", "cmpxchg8b", "cmpxchg16b", "xadd",
    "bts", "bsf", "popcnt", "tzcnt", "movbe", "crc32", "mfence", "lfence", "sfence", "prefetch",
    "clflush", "clflushopt", "rdtsc", "rdtscp", "rdpid", "rdrand", "rdseed", "clac", "stac",
    "invpcid", "wrgsbase", "fninit", "ldmxcsr", "sse", "fxsave", "fxrstor", "xgetbv", "xsetbv",
    "xsave", "xsaveopt", "xsavec", "xrstor", "iret-user", "sysret",
)  # fmt: skip
_WITH_PORT = ("tcp", "echo", "udp")
_ADDRESS = re.compile(r"(?:[0-9]{1,3}\.){3}[0-9]{1,3}|router|dns|server")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*")
_INSTRUCTION = re.compile(r"[a-z0-9-]{1,32}")
_WHO = re.compile(r"[A-Za-z0-9_:-]{1,20}")
_NETWORK = re.compile(r"(?:[0-9]{1,3}\.){3}[0-9]{1,3}/[0-9]{1,2}")


def _match(pattern: re.Pattern[str], value: str, field: str) -> str:
    if pattern.fullmatch(value) is None:
        raise InvalidArgument(f"{field}: the probe cannot be told {value!r}", field=field)
    return value


def _number(value: int, least: int, most: int, field: str) -> int:
    if not least <= value <= most:
        raise InvalidArgument(f"{field}: {value} is not in {least}..{most}", field=field)
    return value


def _who(kind: str, who: str) -> str:
    return f"{kind}.{_match(_WHO, who, kind)}" if who else kind


class DiskPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a disk; `disk` is its index or serial number, empty: of all.

    check writes a pattern of `seed` over `sectors` from `first` on, flushes and reads it back;
    write and verify are its halves. writer writes records for ever, into `window` sectors, `depth`
    at a time, and says every `every`-th acknowledgement; records reads them back and misses none
    up to `acked`. None: what the guest takes by itself.
    """

    kind: PlanKind
    disk: str = ""
    sectors: int | None = None
    first: int | None = None
    seed: int | None = None
    depth: int | None = None
    every: int | None = None
    window: int | None = None
    from_seq: int | None = None
    acked: int | None = None

    def word(self) -> str:
        """Return the word of the command line."""
        key, given = _who("disk", self.disk), [*self._given()]
        return f"{key}=" + ",".join([self.kind, *given])

    def _given(self) -> Iterator[str]:
        largest = 2**63 - 1
        limits = {"depth": (1, DEPTH_MAX), "every": (1, largest), "window": (1, largest)}
        for field in msgspec.structs.fields(self)[2:]:
            value: int | None = getattr(self, field.name)
            if value is None:
                continue
            name = field.name.removesuffix("_seq")
            yield f"{name}={_number(value, *limits.get(name, (0, largest)), f'disk.{name}')}"


class NetCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One target: an address (or router, dns, server of the lease), or a name to be resolved.

    `timeout_ms`: how long an answer is waited for, from this check on.
    """

    kind: CheckKind
    target: str
    port: int | None = None
    must_fail: bool = False
    timeout_ms: int | None = None

    def item(self) -> str:
        """Return the item of a list of checks."""
        pattern = _NAME if self.kind == "dns" else _ADDRESS
        text = f"{self.kind}:{_match(pattern, self.target, 'net.target')}"
        if (self.kind in _WITH_PORT) != (self.port is not None):
            raise InvalidArgument(
                f"net.port: {self.port} does not go with {self.kind}", field="net.port"
            )
        if self.port is not None:
            text += f":{_number(self.port, 1, 65535, 'net.port')}"
        return "!" + text if self.must_fail else text


class NicPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a NIC; `nic` is its index or MAC, empty: of all.

    address: a fixed one instead of a lease.
    """

    nic: str = ""
    checks: tuple[NetCheck, ...] = ()
    timeout_ms: int | None = None
    lease_ms: int | None = None
    address: str | None = None
    router: str | None = None
    dns: str | None = None
    off: bool = False

    def word(self) -> str:
        """Return the word of the command line."""
        key = _who("net", self.nic)
        items = "off" if self.off else ",".join(self._items())
        if len(items) > CHECKS_BYTES_MAX:
            raise InvalidArgument(f"net: {len(items)} characters of checks", field="net.checks")
        return f"{key}={items or 'dhcp'}"

    def _items(self) -> Iterator[str]:
        if self.address is not None:
            yield f"address={_match(_NETWORK, self.address, 'net.address')}"
        if self.router is not None:
            yield f"router={_match(_ADDRESS, self.router, 'net.router')}"
        if self.dns is not None:
            yield f"dns={_match(_ADDRESS, self.dns, 'net.dns')}"
        if self.lease_ms is not None:
            yield f"lease={_number(self.lease_ms, 0, 3600_000, 'net.lease_ms')}"
        if self.timeout_ms is not None:
            yield f"timeout={_number(self.timeout_ms, 1, 3600_000, 'net.timeout_ms')}"
        patience = self.timeout_ms
        for check in self.checks:
            if check.timeout_ms not in (None, patience):
                patience = check.timeout_ms
                yield f"timeout={_number(patience or 0, 1, 3600_000, 'net.timeout_ms')}"
            yield check.item()


class CpuPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which instructions are tried: all but some, or some alone."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()

    def word(self) -> str:
        """Return the word of the command line."""
        if self.only and self.skip:
            raise InvalidArgument("cpu: either only some or all but some", field="cpu.skip")
        only = [_match(_INSTRUCTION, name, "cpu.only") for name in self.only]
        skip = ["-" + _match(_INSTRUCTION, name, "cpu.skip") for name in self.skip]
        return "cpu=" + ",".join(only or ["all", *skip])


class ProbeCommand(msgspec.Struct, frozen=True, kw_only=True):
    """All that a probe is told at its start; without anything it describes and stays up."""

    cpu: CpuPlan | None = None
    disks: tuple[DiskPlan, ...] = ()
    nics: tuple[NicPlan, ...] = ()
    end: End | None = None
    end_after_ms: int | None = None
    beat_ms: int | None = None
    button: End | None = None

    def words(self) -> list[str]:
        """Return the words, in the order in which they are written."""
        words = [self.cpu.word()] if self.cpu is not None else []
        words += [plan.word() for plan in self.disks]
        words += [plan.word() for plan in self.nics]
        if self.end is not None:
            words.append(f"end={self.end}")
        if self.end_after_ms is not None:
            words.append(f"end.after={_number(self.end_after_ms, 0, 2**53, 'end_after_ms')}")
        if self.beat_ms is not None:
            words.append(f"beat={_number(self.beat_ms, 0, 2**53, 'beat_ms')}")
        if self.button is not None:
            words.append(f"button={self.button}")
        return words

    def render(self) -> str:
        """Return the kernel command line."""
        text = " ".join(self.words())
        if len(text) > COMMAND_BYTES_MAX:
            raise InvalidArgument(
                f"the probe's command line has {len(text)} characters", field="command",
                hint=f"at most {COMMAND_BYTES_MAX}",
            )  # fmt: skip
        return text
