"""What the probe says of its devices, disks and NICs: one Struct for each event, as in `events`."""

from __future__ import annotations

from typing import Literal

from chv.probe.events import Event


class Device(Event, frozen=True):
    """A virtio device; type 1 is a NIC, 2 a disk. hot: it came after the start."""

    dev: str
    type: int
    features: str
    hot: bool


class DeviceError(Event, frozen=True):
    """A virtio device that cannot be used."""

    dev: str
    type: int
    reason: str


class DeviceGone(Event, frozen=True):
    """A device was let go of, or is not there any more."""

    dev: str
    type: int
    how: Literal["requested", "vanished", "replaced"]


class Clings(Event, frozen=True):
    """Whether it keeps the devices that it is asked for."""

    devices: bool


class SlotEjected(Event, frozen=True):
    """QEMU was told that a slot may be emptied."""

    bus_select: int
    slot: int


class Disk(Event, frozen=True):
    """A disk. flush, config_wce: features; wce: whether its write cache is on."""

    disk: int
    dev: str
    serial: str
    sectors: int
    ro: bool
    flush: bool
    config_wce: bool
    wce: bool
    queue: int


class DiskPlanned(Event, frozen=True, rename={"from_seq": "from"}):
    """A plan begins on a disk."""

    disk: int
    plan: str
    first: int
    sectors: int
    seed: int
    depth: int
    from_seq: int


class DiskRefused(Event, frozen=True):
    """A plan cannot be carried out: too-small, read-only."""

    disk: int
    plan: str
    reason: str


class DiskDone(Event, frozen=True):
    """A pattern plan has ended."""

    disk: int
    plan: str
    ok: bool
    sectors: int
    bad: int
    first_bad: int
    errors: int
    write_us: int
    flush_us: int
    read_us: int


class Acked(Event, frozen=True):
    """All records up to `seq` were written and flushed; us: how long the last one took."""

    disk: int
    seq: int
    us: int


class Records(Event, frozen=True):
    """The writer's records were read back. lost: acknowledged ones that are not there."""

    disk: int
    ok: bool
    valid: int
    empty: int
    bad: int
    first_bad: int
    lost: int
    first_lost: int
    newest: int
    errors: int


class DiskError(Event, frozen=True):
    """A request was answered with an error; the writer repeats it."""

    disk: int
    op: str
    sector: int
    seq: int
    status: int
    errors: int


class DiskStall(Event, frozen=True):
    """A request has no answer for two seconds; it is waited for."""

    disk: int
    op: str
    sector: int
    seq: int
    waited_us: int
    status: int


class DiskResumed(Event, frozen=True):
    """A stalled request was answered."""

    disk: int
    op: str
    seq: int
    after_us: int


class DiskReset(Event, frozen=True):
    """The device asked for a reset (NEEDS_RESET), and its requests were sent again."""

    disk: int
    ok: bool


class DiskResize(Event, frozen=True):
    """The device says another size."""

    disk: int
    sectors: int
    was: int


class DiskBogus(Event, frozen=True):
    """The device answered what was not asked."""

    disk: int
    id: int


class Nic(Event, frozen=True):
    """A NIC."""

    nic: int
    dev: str
    mac: str
    link: bool
    mtu: int


class NetStuck(Event, frozen=True):
    """No transmit buffer has come back."""

    nic: int


class Lease(Event, frozen=True):
    """DHCP gave an address; us: from the first question on."""

    nic: int
    addr: str
    mask: str
    router: str
    dns: str
    server: str
    domain: str
    mtu: int
    secs: int
    us: int


class LeaseLate(Event, frozen=True):
    """No lease in time; the guest goes on asking, its checks fail."""

    nic: int
    waited_us: int


class LeaseNak(Event, frozen=True):
    """DHCP refused."""

    nic: int
    server: str


class Check(Event, frozen=True):
    """How a target answered; ok also heeds that a failure was wanted."""

    nic: int
    kind: str
    target: str
    result: str
    ok: bool
    addr: str
    us: int


class CheckUnknown(Event, frozen=True):
    """A check that the guest does not know."""

    nic: int
    text: str
