"""`chv verify` through the agent of a node: the probe on its VMM, its storage, its networks.

In order: what earlier runs left is removed; the objects are made; the probe boots and tries disk
and network; the power button; a start, after which what was written must still be there, and a
reset, after which it must be as well; all is removed, also when the run is cut short.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from chv.common.errors import ChvError, InvalidArgument, NotFound
from chv.common.ids import Ids, short_uid
from chv.common.process import scan
from chv.common.rpc import connect
from chv.common.wire import agent, manifest
from chv.common.wire.resources import Network, Resource, VirtualMachine, Volume
from chv.common.wire.types import Empty
from chv.host import verify_judge, verify_plan
from chv.host.verify import Check, Failed, Findings, Report, failure, since_ms
from chv.host.verify_host import kvm_check, next_hop
from chv.host.verify_plan import Found, Names, Trial
from chv.host.verify_session import Session, owner
from chv.probe.events import Boot, Button, Done, Event

BOOT_S_MAX = 20.0
BUTTON_S_MAX = 2.0
REMOVE_S_MAX = 60.0
READY = "TenantReady"
AGENT_LOG = "`chv logs daemon/agent`"
_WHAT = {
    "Image": ("image", AGENT_LOG),
    "SecurityGroup": ("network", "`chv logs daemon/nwd`"),
    "Network": ("network", "`chv logs daemon/nwd`"),
    "Volume": ("volume", "`chv logs daemon/stord`"),
    "VirtualMachine": ("vmm", AGENT_LOG),
}


@dataclass(frozen=True, slots=True)
class Subject:
    """What is verified: `node`, `network` and `volume` by name, or `file` with its documents."""

    kind: str = "node"
    name: str = ""
    namespace: str = "default"
    documents: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """How: by which VMM, in whose name, and who hears of each check at once.

    `scope`: to be cancelled where the run is to end early; what was made is removed all the same.
    """

    vmm: str = "auto"
    requester: str = "verify"
    on_check: Callable[[Check], None] = lambda check: None
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


async def verify_node(socket: Path, subject: Subject, asked: Asked) -> Report:
    """Verify through the agent at a socket; ChvError where the subject is not there."""
    findings = Findings(asked.on_check)
    # The scope is inside: the removal needs the connection.
    async with connect(socket) as client:
        with asked.scope:
            await _verify(Session(client, asked.requester), subject, asked, findings)
    return findings.report()


async def _verify(session: Session, subject: Subject, asked: Asked, findings: Findings) -> None:
    try:
        status = await _node(session, findings)
        names = Names(Ids().nonce(), owner(), asked.vmm, await next_hop(status.instance))
        await session.sweep()
        trial = await _planned(session, subject, names)
        findings.add(kvm_check(status, trial.documents[-1]["spec"]["vmm"]))
        if trial.notes:
            findings.add(Check("not-proven", True, 0, "; ".join(trial.notes)))
        await _made_and_removed(session, findings, trial, names, status)
    except Failed:
        return  # its check is told


async def _node(session: Session, findings: Findings) -> agent.NodeStatusReply:
    status = await session.client.call(agent.NODE_STATUS, Empty())
    message = f"{status.name} ({status.instance}) is {status.state}"
    if status.state == READY:
        findings.add(Check("node", True, 0, message))
        return status
    lacking = [each.message for each in status.conditions if each.status != "True"]
    if status.hold is not None:
        lacking.insert(0, f"by {status.hold.requester}, {status.hold.reason or 'without a reason'}")
    findings.add(Check("node", False, 0, failure(message, "; ".join(lacking), "`chv node status`")))
    raise Failed


# --- what is verified


async def _planned(session: Session, subject: Subject, names: Names) -> Trial:
    match subject.kind:
        case "node":
            return verify_plan.of_node(names)
        case "network":
            return await _network(session, subject, names)
        case "volume":
            return await _volume(session, subject, names)
        case _:
            return await _vm(session, subject, names)


async def _network(session: Session, subject: Subject, names: Names) -> Trial:
    network = await session.get("Network", subject.name, subject.namespace)
    assert isinstance(network, Network)
    taken: set[str] = set()
    for vm in await session.all("VirtualMachine", subject.namespace):
        assert isinstance(vm, VirtualMachine)
        taken |= {nic.address for nic in vm.spec.interfaces}
        taken |= {nic.address for nic in (vm.status.interfaces if vm.status else [])}
    for exposure in await session.all("Exposure", subject.namespace):
        taken |= set(getattr(exposure.spec, "addresses", ()))
    return verify_plan.of_network(names, network, frozenset(taken))


async def _volume(session: Session, subject: Subject, names: Names) -> Trial:
    volume = await session.get("Volume", subject.name, subject.namespace)
    assert isinstance(volume, Volume)
    users = [
        vm.metadata.name
        for vm in await session.all("VirtualMachine", subject.namespace)
        if isinstance(vm, VirtualMachine)
        and any(disk.volume == subject.name for disk in vm.spec.disks)
        and (vm.status is None or vm.status.phase != "Stopped")
    ]
    return verify_plan.of_volume(names, volume, ", ".join(users))


async def _vm(session: Session, subject: Subject, names: Names) -> Trial:
    objects = [manifest.parse(document) for document in subject.documents]
    vms = [item for item in objects if isinstance(item, VirtualMachine)]
    if len(vms) != 1:
        raise InvalidArgument(
            f"{len(vms)} VirtualMachines in the file: exactly one can be verified", field="-f"
        )
    vm = vms[0]
    namespace = vm.metadata.namespace
    given = {(item.kind, item.metadata.name): item for item in objects}
    networks, volumes, groups = {}, {}, set()
    for name in {nic.network for nic in vm.spec.interfaces}:
        found = await _of_node_or_file(session, "Network", name, namespace, given)
        if isinstance(found, Network):
            networks[name] = found
    for name in {disk.volume for disk in vm.spec.disks}:
        found = await _of_node_or_file(session, "Volume", name, namespace, given)
        if isinstance(found, Volume):
            volumes[name] = found
    for name in {group for nic in vm.spec.interfaces for group in nic.security_groups}:
        if await _of_node_or_file(session, "SecurityGroup", name, namespace, {}):
            groups.add(name)
    if lacking := {nic.network for nic in vm.spec.interfaces} - set(networks):
        raise NotFound(f"networks {sorted(lacking)} are neither on the node nor in the file")
    return verify_plan.of_vm(names, vm, Found(networks, volumes, frozenset(groups)))


async def _of_node_or_file(
    session: Session, kind: str, name: str, namespace: str, given: dict[tuple[str, str], Resource]
) -> Resource | None:
    try:
        return await session.get(kind, name, namespace)
    except NotFound:
        return given.get((kind, name))


# --- the run


async def _made_and_removed(
    session: Session,
    findings: Findings,
    trial: Trial,
    names: Names,
    status: agent.NodeStatusReply,
) -> None:
    uids: list[str] = []
    try:
        async with anyio.create_task_group() as tasks:
            try:
                await _make(session, findings, trial, uids, tasks)
                await _drive(session, findings, trial)
            except Failed:
                pass  # its check is told; the rest of the run is the removal
            tasks.cancel_scope.cancel()
    finally:
        with anyio.move_on_after(REMOVE_S_MAX, shield=True):
            findings.add(await _remove(session, names, status, uids))


async def _make(
    session: Session,
    findings: Findings,
    trial: Trial,
    uids: list[str],
    tasks: anyio.abc.TaskGroup,
) -> None:
    started = time.monotonic()
    try:
        applied = await session.apply(trial.documents)
    except ChvError as error:
        check_id, command = _blamed(error)
        message = failure(error.message, error.hint or "", command)
        findings.add(Check(check_id, False, since_ms(started), message))
        raise Failed from error
    uids += [item.uid for item in applied]
    tasks.start_soon(session.follow, trial.vm, trial.namespace)
    made: dict[str, str] = {}
    for item in applied:
        check_id, command = _WHAT[item.kind]
        try:
            await session.done(item.operation_id)
        except ChvError as error:
            message = failure(f"{item.kind} {error.message}", error.hint or "", command)
            findings.add(Check(check_id, False, since_ms(started), message))
            raise Failed from error
        made[item.kind] = check_id
    vm = await session.get("VirtualMachine", trial.vm, trial.namespace)
    assert isinstance(vm, VirtualMachine)
    assert vm.status is not None
    vmm = vm.status.vmm
    accelerated = f" with {vmm.accelerator}" if vmm.accelerator else ""
    findings.vmm = f"{vmm.name} {vmm.version}{accelerated}"
    findings.add(Check("vmm", True, since_ms(started), f"{findings.vmm} runs the probe"))


def _blamed(error: ChvError) -> tuple[str, str]:
    if (error.field or "").startswith("spec.vmm"):
        return "vmm", "`chv doctor` and `chv node status`"
    return "node", AGENT_LOG


async def _drive(session: Session, findings: Findings, trial: Trial) -> None:
    recorded = await _first_boot(session, findings, trial)
    said = verify_judge.boots(session.events)[0]
    findings.add(verify_judge.machine(said, trial))
    for check in verify_judge.disks(said, trial):
        findings.add(check)
    for check in verify_judge.network(said, trial, recorded):
        findings.add(check)
    await _button(session, findings, trial)
    if trial.second is not None:
        await _again(session, findings, trial)
        return
    for check in verify_judge.reads(said, trial):
        findings.add(check)


async def _first_boot(session: Session, findings: Findings, trial: Trial) -> dict[str, str]:
    started = time.monotonic()
    if not await session.hear_until(lambda events: bool(_of(events, Boot)), BOOT_S_MAX):
        words = failure(
            f"the VMM runs, and the guest has said nothing for {BOOT_S_MAX:.0f} s",
            "KVM does not run its first instructions, or its serial port is not recorded",
            "`chv doctor` and `chv logs daemon/console`",
        )
        findings.add(Check("serial", False, since_ms(started), words))
        raise Failed
    words = "the guest's first line is on the serial port"
    findings.add(Check("serial", True, since_ms(started), words))
    await session.hear_until(lambda events: bool(_of(events, Done)), BOOT_S_MAX)
    vm = await session.get("VirtualMachine", trial.vm, trial.namespace)
    assert isinstance(vm, VirtualMachine)
    interfaces = vm.status.interfaces if vm.status else []
    return {nic.name: nic.address for nic in interfaces}


async def _button(session: Session, findings: Findings, trial: Trial) -> None:
    started = time.monotonic()
    try:
        operation = await session.act(agent.VmVerb.STOP, trial.vm, trial.namespace)
    except ChvError as error:
        findings.add(Check("button", False, since_ms(started), failure(error.message, "", "")))
        raise Failed from error
    heard = await session.hear_until(lambda events: bool(_of(events, Button)), BUTTON_S_MAX)
    words = "the guest heard the power button and went off"
    if not heard or "acpi" not in operation.message:
        words = failure(
            f"{operation.message}: the guest " + ("heard" if heard else "did not hear")
            + " the power button",
            "the VMM's ACPI does not reach guests",
            AGENT_LOG,
        )  # fmt: skip
        findings.add(Check("button", False, since_ms(started), words))
        return
    findings.add(Check("button", True, since_ms(started), words))


async def _again(session: Session, findings: Findings, trial: Trial) -> None:
    """Start the VM with the second command, then reset it: both times the data is there."""
    assert trial.second is not None
    vm = trial.documents[-1]
    boot = {**vm["spec"]["boot"], "cmdline": trial.second.render()}
    changed = {**vm, "spec": {**vm["spec"], "boot": boot}}
    changed["spec"].pop("runStrategy")
    steps = ((agent.VmVerb.START, "start", "a stop and a start"),
             (agent.VmVerb.RESET, "reset", "a reset"))  # fmt: skip
    for item in await session.apply([changed]):
        if item.operation_id:
            await session.done(item.operation_id)
    for verb, check_id, after in steps:
        started = time.monotonic()
        before = len(_of(session.events, Boot))
        try:
            await session.act(verb, trial.vm, trial.namespace)
        except ChvError as error:
            message = failure(error.message, error.hint or "", AGENT_LOG)
            findings.add(Check(check_id, False, since_ms(started), message))
            raise Failed from error
        await session.hear_until(partial(_booted, before), BOOT_S_MAX)
        boots = verify_judge.boots(session.events)[before:]
        said = boots[-1] if boots else verify_judge.Said(())
        for check in verify_judge.kept(said, trial, check_id, after):
            findings.add(Check(check.id, check.ok, since_ms(started), check.message))
        for check in verify_judge.reads(said, trial) if verb is agent.VmVerb.START else ():
            findings.add(check)


def _booted(before: int, events: list[Event]) -> bool:
    boots = verify_judge.boots(events)
    return len(boots) > before and bool(boots[-1].all(Done))


def _of(events: list[Event], kind: type[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, kind)]


async def _remove(
    session: Session, names: Names, status: agent.NodeStatusReply, uids: list[str]
) -> Check:
    """Remove all that was made; look for what it was made of on the machine."""
    started = time.monotonic()
    try:
        left = await session.remove(names.owner)
    except ChvError as error:
        message = failure(error.message, "the agent does not remove it", AGENT_LOG)
        return Check("left-behind", False, since_ms(started), message)
    left += await anyio.to_thread.run_sync(_traces, status, uids)
    if left:
        message = failure(f"left behind: {', '.join(left)}", "", f"{AGENT_LOG}; the next run tries")
        return Check("left-behind", False, since_ms(started), message)
    words = "all that was made is gone"
    return Check("left-behind", True, since_ms(started), words)


def _traces(status: agent.NodeStatusReply, uids: list[str]) -> list[str]:
    """Return processes, directories and namespaces of objects that are gone."""
    shorts = [short_uid(uid) for uid in uids]
    workers = [worker.worker_id for worker in scan(f"chv:{status.instance}:")]
    left = [f"process {worker}" for worker in workers if any(s in worker for s in shorts)]
    paths = [Path(status.run_dir, "vm", short) for short in shorts]
    paths += [Path(status.state_dir, "volumes", uid) for uid in uids]
    paths += [Path("/run/netns", f"chv-{status.instance}-{short}") for short in shorts]
    return left + [str(path) for path in paths if _exists(path)]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        return False  # not ours to see
