"""From the probe's words to checks. Pure: events in, checks out.

Each failure says what was seen, its likely cause and the command that helps. Nothing here raises:
what the probe did not say is a failure with the words for silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from chv.host.verify import Check, failure
from chv.host.verify_plan import DiskWanted, Trial
from chv.host.verify_targets import NicWanted, Target
from chv.probe.device_events import (
    Check as ProbeCheck,
)
from chv.probe.device_events import (
    Disk,
    DiskDone,
    DiskError,
    DiskRefused,
    DiskStall,
    Lease,
    LeaseLate,
    Nic,
)
from chv.probe.events import Boot, Event, Machine

E = TypeVar("E", bound=Event)
NWD_LOG = "`chv logs daemon/nwd`"
STORD_LOG = "`chv logs daemon/stord`"
# How a closed way may answer: with nothing, or with the word of a filter. `refused` is the word of
# the target itself: the packet came through.
CLOSED = ("timeout", "unreachable")
OPEN = ("ok", "open", "echo", "reply")


@dataclass(frozen=True, slots=True)
class Said:
    """What the probe said in one boot."""

    events: Sequence[Event]

    def all(self, kind: type[E]) -> list[E]:
        """Return the events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def last(self, kind: type[E]) -> E | None:
        """Return the last event of a kind."""
        found = self.all(kind)
        return found[-1] if found else None

    def nic(self, mac: str) -> Nic | None:
        """Return the NIC with a MAC."""
        return next((nic for nic in self.all(Nic) if nic.mac == mac), None)


def boots(events: Sequence[Event]) -> list[Said]:
    """Return what was said in each boot, the first one first."""
    starts = [at for at, event in enumerate(events) if isinstance(event, Boot)]
    ends = [*starts[1:], len(events)]
    return [Said(events[start:end]) for start, end in zip(starts, ends, strict=False)]


def machine(said: Said, trial: Trial) -> Check:
    """CPUs and memory are those of the VM."""
    seen = said.last(Machine)
    if seen is None:
        return Check("machine", False, 0, "the probe said nothing of memory and CPUs")
    # A VMM keeps some of the memory back for what is no RAM to the guest.
    ok = seen.cpus == trial.cpus and seen.memory >= trial.memory_bytes * 0.9
    words = f"{seen.cpus} CPUs and {seen.memory >> 20} MiB of memory"
    if not ok:
        wanted = f"{trial.cpus} CPUs and {trial.memory_bytes >> 20} MiB were asked for"
        words = failure(f"the guest sees {words}, {wanted}", "", "`chv logs daemon/agent`")
    return Check("machine", ok, 0, words)


# --- disks


def disks(said: Said, trial: Trial) -> list[Check]:
    """Return the checks of all disks of a first boot: written, flushed and read back; the cache."""
    checks: list[Check] = []
    for wanted in (disk for disk in trial.disks if not disk.read_only):
        disk = _disk(said, wanted.sectors)
        if disk is None:
            checks.append(_unseen("disk", wanted))
        else:
            checks += [_written(said, disk, wanted.what), _cache(disk)]
    return checks


def reads(said: Said, trial: Trial) -> list[Check]:
    """Return the checks of the disks that are read alone."""
    checks: list[Check] = []
    for wanted in (disk for disk in trial.disks if disk.read_only):
        disk = _disk(said, wanted.sectors)
        seen = _read(said, disk, wanted.what) if disk else _unseen("disk-read", wanted)
        checks.append(seen)
    return checks


def _unseen(check_id: str, wanted: DiskWanted) -> Check:
    words = failure(
        f"the guest sees no disk of {wanted.sectors * 512 >> 20} MiB ({wanted.what})",
        "the storage daemon did not serve it",
        STORD_LOG,
    )
    return Check(check_id, False, 0, words)


def kept(said: Said, trial: Trial, check_id: str, after: str) -> list[Check]:
    """Return whether what the first boot wrote is still there."""
    checks: list[Check] = []
    for wanted in (disk for disk in trial.disks if not disk.read_only):
        disk = _disk(said, wanted.sectors)
        done = _done(said, disk, "verify") if disk else None
        if done is not None and done.ok:
            words = f"what was written and flushed is there after {after}"
            checks.append(Check(check_id, True, done.read_us / 1000, words))
            continue
        lost = f"{done.bad} of {done.sectors} sectors differ" if done else "it was not read"
        if done is not None and done.errors:
            lost = f"{done.errors} requests failed"
        words = failure(
            f"{lost} after {after} ({wanted.what})",
            "what a flush had acknowledged is lost: do not keep data there",
            STORD_LOG,
        )
        checks.append(Check(check_id, False, 0, words))
    return checks


def _disk(said: Said, sectors: int) -> Disk | None:
    return next((disk for disk in said.all(Disk) if disk.sectors == sectors), None)


def _done(said: Said, disk: Disk, plan: str) -> DiskDone | None:
    found = (done for done in said.all(DiskDone) if done.disk == disk.disk and done.plan == plan)
    return next(found, None)


def _written(said: Said, disk: Disk, what: str) -> Check:
    done = _done(said, disk, "check")
    failed = [error for error in said.all(DiskError) if error.disk == disk.disk]
    flushes = [error for error in failed if error.op == "flush"]
    if done is not None and done.ok:
        us = done.write_us + done.flush_us + done.read_us
        return Check("disk", True, us / 1000, f"{what}: written, flushed, read back")
    if flushes:
        seen, cause = (
            f"a flush failed with status {flushes[0].status}",
            "what lies below the volume does not keep data: a full or broken file system or device",
        )
    elif failed:
        seen, cause = f"a {failed[0].op} failed with status {failed[0].status}", "no space below it"
    elif done is not None:
        seen, cause = f"{done.bad} of {done.sectors} sectors differ", "the storage loses writes"
    else:
        seen, cause = _silence(said, disk)
    return Check("disk", False, 0, failure(f"{what}: {seen}", cause, STORD_LOG))


def _silence(said: Said, disk: Disk) -> tuple[str, str]:
    stalls = [stall for stall in said.all(DiskStall) if stall.disk == disk.disk]
    if stalls:
        waited_s = stalls[-1].waited_us / 1e6
        return f"a {stalls[-1].op} has no answer for {waited_s:.0f} s", "its storage stands still"
    refused = [each for each in said.all(DiskRefused) if each.disk == disk.disk]
    if refused:
        return f"the probe was refused: {refused[0].reason}", "it is read-only to the guest"
    return "the probe said nothing of it", "it has not come that far"


def _read(said: Said, disk: Disk, what: str) -> Check:
    """Whatever stands there: that it is no pattern of ours is no error, a failed request is."""
    done = _done(said, disk, "verify")
    if done is not None and not done.errors and disk.ro:
        return Check("disk-read", True, done.read_us / 1000, f"{what}: {done.sectors} sectors read")
    seen = _silence(said, disk)[0] if done is None else f"{done.errors} reads failed"
    if not disk.ro:
        seen = "the guest may write to it"
    return Check("disk-read", False, 0, failure(f"{what}: {seen}", "", STORD_LOG))


def _cache(disk: Disk) -> Check:
    if disk.flush and disk.wce:
        return Check("disk-cache", True, 0, "the guest flushes: write cache on, flush offered")
    lacking = "no flush is offered" if not disk.flush else "the write cache is off"
    words = failure(
        f"{lacking}: a guest would not flush, and lose what it believes safe with its storage",
        "the storage daemon was not primed",
        STORD_LOG,
    )
    return Check("disk-cache", False, 0, words)


# --- network


def network(said: Said, trial: Trial, recorded: Mapping[str, str]) -> list[Check]:
    """Return the checks of all NICs; `recorded`: the address of each as the VM's status has it."""
    if not trial.nics:
        return []
    checks = [_merged("dhcp", [_lease(said, nic, recorded) for nic in trial.nics])]
    named = {nic.mac: nic for nic in trial.nics}
    for check_id in dict.fromkeys(target.id for target in trial.targets):
        targets = [target for target in trial.targets if target.id == check_id]
        parts = [_target(said, target, named[target.mac]) for target in targets]
        checks.append(_merged(check_id, parts))
    return checks


def _merged(check_id: str, parts: Sequence[Check]) -> Check:
    """Return several as one: the first failure, or all that holds."""
    bad = [part for part in parts if not part.ok]
    if bad:
        return Check(check_id, False, bad[0].ms, bad[0].message)
    words = "; ".join(dict.fromkeys(part.message for part in parts))
    return Check(check_id, True, max(part.ms for part in parts), words)


def _lease(said: Said, nic: NicWanted, recorded: Mapping[str, str]) -> Check:
    seen = said.nic(nic.mac)
    if seen is None:
        words = failure(
            f"the guest sees no NIC {nic.name} ({nic.mac})",
            "the VMM did not get its tap",
            "`chv logs daemon/agent`",
        )
        return Check("dhcp", False, 0, words)
    leases = [lease for lease in said.all(Lease) if lease.nic == seen.nic]
    if not leases:
        late = [event for event in said.all(LeaseLate) if event.nic == seen.nic]
        waited = f" within {late[0].waited_us / 1e6:.0f} s" if late else ""
        words = failure(
            f"{nic.name} got no lease{waited}",
            f"the DHCP server (dnsmasq) of {nic.network} does not answer",
            f"{NWD_LOG} and `chv describe network {nic.network}`",
        )
        return Check("dhcp", False, 0, words)
    lease, record = leases[-1], recorded.get(nic.name, "")
    if lease.addr != record:
        words = failure(
            f"{nic.name} got {lease.addr}, its record says {record or 'nothing'}",
            f"another DHCP server ({lease.server}) is on the network",
            f"`chv describe network {nic.network}`",
        )
        return Check("dhcp", False, lease.us / 1000, words)
    return Check("dhcp", True, lease.us / 1000, f"{nic.name} got {lease.addr}, as recorded")


def _target(said: Said, target: Target, nic: NicWanted) -> Check:
    seen = said.nic(target.mac)
    text = target.check.target
    text += f":{target.check.port}" if target.check.port is not None else ""
    answers = [
        check
        for check in said.all(ProbeCheck)
        if seen and (check.nic, check.kind, check.target) == (seen.nic, target.check.kind, text)
    ]
    if not answers:
        words = failure(f"{target.words}: not tried", "the probe did not come that far", NWD_LOG)
        return Check(target.id, False, 0, words)
    answer, ms = answers[-1], answers[-1].us / 1000
    if _holds(answer, target):
        return Check(target.id, True, ms, target.words)
    if answer.result in ("no-lease", "no-target"):
        return Check(target.id, False, 0, f"{target.words}: not tried, {nic.name} has no lease")
    seen_words = f"{target.words}: no, {nic.name} got {_result(answer)}"
    cause, command = _cause(answer, target, nic)
    return Check(target.id, False, ms, failure(seen_words, cause, command))


def _holds(answer: ProbeCheck, target: Target) -> bool:
    if target.check.must_fail:
        return answer.result in CLOSED
    return answer.result in OPEN and (not target.addresses or answer.addr in target.addresses)


def _result(answer: ProbeCheck) -> str:
    words = {
        "timeout": f"no answer within {answer.us / 1e6:.1f} s",
        "no-arp": "no answer to ARP",
        "nxdomain": "the answer that there is no such name",
        "refused": "a refusal",
        "ok": f"the answer {answer.addr}" if answer.kind == "dns" else "an answer",
        "open": "a connection",
    }
    return words.get(answer.result, answer.result)


def _cause(answer: ProbeCheck, target: Target, nic: NicWanted) -> tuple[str, str]:
    """Return the likely cause and the command that helps."""
    network_story = f"`chv describe network {nic.network}` and {NWD_LOG}"
    if target.id == "firewall-closed":
        cause = "the network's rules are not in force: something lets through what none allows"
        return cause, network_story
    if answer.result == "no-arp":
        return "the bridge does not lead to the gateway", network_story
    if target.id == "dns" and answer.result in ("timeout", "refused"):
        return f"the DNS server (dnsmasq) of {nic.network} does not answer", network_story
    if target.id == "dns":
        return "the DNS server knows other records than the node", network_story
    if target.id == "uplink":
        return "a firewall of the host keeps guests from the outside", "`chv doctor`"
    if target.id == "metadata":
        return "the metadata service of the network does not answer", network_story
    return "a firewall rule drops what is allowed", network_story
