"""The VMM: a configuration, perhaps a VM object made of it, and the verbs that change both."""

from __future__ import annotations

import copy
import os
import random
import signal
from pathlib import Path
from typing import Any

from tests.doubles.cloud_hypervisor import checks, migration, sizes, snapshots
from tests.doubles.cloud_hypervisor.events import Events
from tests.doubles.cloud_hypervisor.guest import BOOT_S, LOOK_S, Guest
from tests.doubles.cloud_hypervisor.loop import Loop
from tests.doubles.cloud_hypervisor.refusal import (
    Refusal,
    already_created,
    invalid,
    migrating,
    not_created,
    not_running,
    os_error,
)
from tests.doubles.cloud_hypervisor.serial import Serial
from tests.doubles.cloud_hypervisor.switches import Switches
from tests.doubles.cloud_hypervisor.vm import LISTS, Config, Device, Vm, forget

PAUSE = ("Cannot pause VM", "Failed to pause migratable component")
RESUME = ("Cannot resume VM", "Failed to resume migratable component")
SNAPSHOT = ("Cannot snapshot VM", "Failed to snapshot migratable component")
NESTED = "Could not get vCPU state GetNestedState(Invalid argument (os error 22))"
ELF_CORE = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + b"\x04\x00\x3e\x00\x01\x00\x00\x00"


class Machine:
    """Verbs raise `Refusal`. `loop.exit_code` is set where the process is to end."""

    def __init__(self, loop: Loop, events: Events, switches: Switches, *, stays: bool) -> None:
        self.loop, self.events, self.switches, self.stays = loop, events, switches, stays
        self.config: Config | None = None
        self.vm: Vm | None = None
        self.serial: Serial | None = None
        self.sending: migration.Sending | None = None

    # --- what is asked for

    def info(self) -> dict[str, Any]:
        config = self._known()
        found = {
            "config": config,
            "state": self._state(),
            "memory_actual_size": config["memory"]["size"],
        }
        if self.vm is not None:
            found["device_tree"] = self.vm.tree()
        return found

    def _state(self) -> str:
        if self.vm is None or not self.vm.booted:
            return "Created"
        return "Paused" if self.vm.paused else "Running"

    def counters(self) -> dict[str, dict[str, int]]:
        return self._running().counters()

    def _known(self) -> Config:
        if self.config is None:
            raise not_created()
        return self.config

    def _running(self) -> Vm:
        if self.sending is not None:
            raise migrating()
        if self.vm is None or not self.vm.booted:
            raise not_running()
        return self.vm

    def _idle(self) -> None:
        if self.sending is not None:
            raise migrating()

    # --- from nothing to a guest and back

    def create(self, config: Config) -> None:
        self._idle()
        if self.config is not None:
            raise already_created()
        self.config = config
        for nic in config.get("net") or ():
            nic.pop("fds", None)
            self._dress(nic)
        self._open_serial(config)

    def _dress(self, nic: Config) -> None:
        if not nic.get("mac"):
            nic["mac"] = "2e:" + ":".join(f"{random.randrange(256):02x}" for _ in range(5))

    def _open_serial(self, config: Config) -> None:
        serial = config["serial"]
        needed = {"File": "file", "Socket": "socket"}.get(serial["mode"])
        if needed and not serial.get(needed):
            os._exit(1)  # the thread that answers is gone, and the process with it
        self.serial = Serial(self.loop, serial, replays=self.switches.major >= 53)

    def boot(self) -> None:
        self._idle()
        if self.vm is not None:  # also one that did not come up
            raise already_created()
        self.events.vm("booting")
        if self.config is None:
            raise Refusal("VM config is missing", status=404)
        checks.check(self.config)
        self._make_and_start()
        self.events.vm("booted")

    def _make_and_start(self) -> None:
        assert self.config is not None
        vm = self._make(self.config)
        payload = self.config["payload"]
        path = payload.get("kernel") or payload.get("firmware")
        try:
            with Path(path).open("rb"):
                pass
        except OSError as error:
            raise Refusal("Cannot open kernel file", os_error(error)) from error
        vm.lock()
        self._start(payload.get("cmdline") or "")

    def _make(self, config: Config) -> Vm:
        if self.serial is None:
            self._open_serial(config)
        try:
            self.vm = Vm(config, self.loop, self.switches)
        except Refusal:
            self._drop_vm()
            raise
        return self.vm

    def _start(self, command_line: str, kept: dict[str, Any] | None = None) -> None:
        assert self.vm is not None and self.serial is not None
        vm = self.vm
        vm.booted = True
        guest = vm.guest = Guest(self, command_line, silent=kept is not None)
        if kept is not None:
            guest.restore(kept)
        self.serial.typed = guest.typed
        self.serial.start()
        self.loop.later(BOOT_S, lambda: self._look(vm))

    def _look(self, vm: Vm) -> None:
        if self.vm is not vm:
            return
        if not vm.paused and vm.guest is not None:
            vm.guest.look()
        self.loop.later(LOOK_S, lambda: self._look(vm))

    def _drop_vm(self) -> None:
        vm, self.vm = self.vm, None
        if vm is not None:
            vm.close()
        serial, self.serial = self.serial, None
        if serial is not None:
            serial.close()

    def shutdown(self) -> None:
        self._idle()
        if self.vm is None:
            raise not_running()
        self._drop_vm()
        self.events.vm("shutdown")

    def delete(self) -> None:
        self._idle()
        if self.vm is not None:
            self.shutdown()
        if self.serial is not None:
            self.serial.abandon()
        if self.config is None:
            return
        for fd in [fd for nic in self.config.get("net") or () for fd in nic.get("fds") or ()]:
            os.close(fd)
        self.config = self.serial = None
        self.events.vm("deleted")

    def end(self) -> None:
        """Stop everything; the process ends."""
        busy = self.sending is not None
        self.loop.exit_code = 0
        if not busy:
            self.delete()
        self.events.say("vmm", "shutdown")
        self._idle()

    def reboot(self) -> None:
        self.events.vm("rebooting")
        self._idle()
        if self.vm is None:
            raise not_created()
        self._rebuild()
        self.events.vm("rebooted")

    def _rebuild(self) -> None:
        assert self.config is not None
        self._drop_vm()
        self._make_and_start()

    # --- vCPUs

    def pause(self) -> None:
        vm = self._running()
        self.events.vm("pausing")
        if vm.paused:
            raise _transition(PAUSE, "Paused")
        while any(device.dead for device in vm.devices.values()):
            signal.pause()  # for a worker that will never come: nothing is answered any more
        vm.paused = True
        self.events.vm("paused")

    def resume(self) -> None:
        vm = self._running()
        self.events.vm("resuming")
        if not vm.paused:
            raise _transition(RESUME, "Running")
        vm.paused = False
        self.events.vm("resumed")

    def power_button(self) -> None:
        guest = self._running().guest
        assert guest is not None
        guest.press()

    def nmi(self) -> None:
        self._running()

    # --- devices and sizes

    def add(self, kind: str, config: Config, fds: list[int]) -> dict[str, str] | None:
        """Plug a device, or note it down where no VM runs. `fds` are taken over."""
        known = self._known()
        self._idle()
        changed = copy.deepcopy(known)
        if kind == "net":
            config.pop("fds", None)
            self._dress(config)
            if fds:
                config["fds"] = list(fds)
            fds.clear()  # refused or not: what came stays open
        self._check_added(changed, kind, copy.deepcopy(config))
        if self.vm is not None and self.vm.booted:
            device = self.vm.plug(kind, config)
            return {"id": device.id, "bdf": device.bdf}
        if kind in LISTS:
            known[LISTS[kind]] = [*(known.get(LISTS[kind]) or ()), config]
        else:
            known[kind] = config
        return None

    def _check_added(self, changed: Config, kind: str, config: Config) -> None:
        if kind in LISTS:
            changed[LISTS[kind]] = [*(changed.get(LISTS[kind]) or ()), config]
        elif changed.get(kind):
            raise Refusal("Too many virtio-vsock devices")
        else:
            changed[kind] = config
        checks.check(changed)

    def remove(self, name: str) -> None:
        known = self._known()
        self._idle()
        if self.vm is not None and self.vm.booted:
            self.vm.unplug(name)
            return
        if not forget(known, name):  # the descriptors of a NIC stay open
            raise Refusal(f'No device with id "{name}" to remove')

    def resize(self, asked: dict[str, Any]) -> None:
        known = self._known()
        self._idle()
        if self.vm is None:
            sizes.resize_cold(known, asked)
            return
        self.events.vm("resizing")
        sizes.resize(self.vm, asked)
        self.events.vm("resized")

    def resize_disk(self, name: str, size_bytes: int) -> None:
        self._known()
        self._idle()
        if self.vm is None:
            raise Refusal("Failed resizing a disk image")
        self.vm.disk(name).resize(size_bytes)

    def resize_zone(self) -> None:
        self._known()
        raise Refusal("Failed resizing a memory zone")

    # --- a VM that goes elsewhere, or comes from there

    def _kept(self, vm: Vm) -> dict[str, Any]:
        assert vm.guest is not None
        return {"guest": vm.guest.kept(), "paused": vm.paused}

    def snapshot(self, url: str) -> None:
        vm = self._running()
        self.events.vm("snapshotting")
        if not vm.paused:
            raise Refusal(*SNAPSHOT, "Trying to snapshot while VM is running")
        if not self.switches.nested_state:
            raise Refusal(*SNAPSHOT, NESTED)
        snapshots.write(url, vm.config, self._kept(vm))
        self.events.vm("snapshotted")

    def core_dump(self, url: str) -> None:
        self._running()
        self.events.vm("coredumping")
        path = url.removeprefix("file://")
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise Refusal("Cannot create coredump file", os_error(error)) from error
        os.write(fd, ELF_CORE)
        os.close(fd)

    def restore(self, asked: dict[str, Any], fds: list[int]) -> None:
        self._idle()
        if self.config is not None:
            raise already_created()
        config, state = snapshots.read(asked["source_url"])
        given = _given(asked, fds)
        fds.clear()
        for nic in config.get("net") or ():
            if nic.get("fds") and nic["id"] not in given:
                raise invalid(f"Net id {nic['id']} is associated with FDs and is required")
            if nic.get("fds"):
                nic["fds"] = given[nic["id"]]
        try:
            self._revive(config, state)
        except Refusal:
            self.delete()
            raise
        if asked.get("resume"):
            self.resume()

    def _revive(self, config: Config, state: dict[str, Any]) -> None:
        self.config = config
        vm = self._make(config)
        vm.paused = True
        self._start((config["payload"] or {}).get("cmdline") or "", state["guest"])
        self.guest_activates(None)
        self.events.vm("restoring", "restored")

    def receive(self, url: str) -> None:
        self._idle()

        begun = False

        def ready() -> None:
            nonlocal begun
            begun = True
            self.events.vm("migration-receive-ready")
            self.events.flush()

        def take(parcel: dict[str, Any]) -> None:
            self.events.vm("migration-receive-started")
            try:
                self._revive(parcel["config"], parcel["state"])
            except Refusal:
                self._drop_vm()
                self.config = None
                raise

        def go(parcel: dict[str, Any]) -> None:
            if not parcel["state"]["paused"]:
                self.resume()

        try:
            migration.receive(migration.path_of(url, "receive"), ready, take, go)
        except Refusal:
            if begun:
                self.events.vm("migration-receive-failed")
            raise
        self.events.vm("migration-receive-finished")

    def send(self, url: str) -> None:
        if self.vm is None:
            raise Refusal(snapshots.SENT, "VM is not running")
        vm = self._running()
        path = migration.path_of(url, "send")
        parcel = {"config": vm.config, "state": self._kept(vm)}
        for nic in vm.config.get("net") or ():
            if nic.get("fds"):
                raise Refusal(snapshots.SENT, f"NIC {nic['id']} stands on descriptors")
        self.events.vm("migration-started")
        self.sending = migration.Sending(path, parcel, takes_s=self.switches.migration_s)
        if self.switches.major < 53:
            os.read(self.sending.bell, 1)
            self._sent()
        else:
            self.loop.watch(self.sending.bell, self._sent)

    def _sent(self) -> None:
        sending, self.sending = self.sending, None
        assert sending is not None
        self.loop.forget(sending.bell)
        sending.close()
        if not sending.accepted:
            self.events.vm("migration-failed")
            return
        self.events.vm("pausing", "paused", "snapshotting", "snapshotted", "migration-finished")
        self._drop_vm()
        self.events.vm("deleted")
        self.events.say("vmm", "shutdown")
        self.loop.exit_code = 0

    # --- what the guest does

    def guest_says(self, data: bytes) -> None:
        assert self.serial is not None
        self.serial.say(data)

    def guest_activates(self, ids: tuple[str, ...] | None) -> int:
        assert self.vm is not None
        found = [d for d in self.vm.devices.values() if ids is None or d.id in ids]
        for device in found:
            if device.kind in LISTS:
                self.events.say("virtio-device", "activated", {"id": device.id})
        return len(found)

    def guest_sends(self) -> None:
        assert self.vm is not None
        for device in self.vm.devices.values():
            device.dead = device.dead or not all(_sends(fd) for fd in device.fds)

    def guest_ejects(self, ids: tuple[str, ...]) -> None:
        assert self.vm is not None
        for name in ids:
            if not name:
                self.vm.cpus_leaving = False
                continue
            self._told_gone(self.vm.ejected(name))

    def _told_gone(self, device: Device) -> None:
        if self.switches.major >= 53:
            self.events.say("vm", "device-removed", {"id": device.id, "bdf": device.bdf})

    def guest_ends(self, how: str) -> None:
        """Let it, once whoever is at work has come to an end."""
        if how == "panic" and self.config is not None and self.config["pvpanic"]:
            self.events.say("guest", "panic", {"event": "panic"})
        elif how in ("off", "reboot"):
            vm = self.vm
            self.loop.later(0, lambda: self._ended(how) if self.vm is vm else None)

    def _ended(self, how: str) -> None:
        if how == "off":
            self._drop_vm()
            self.events.vm("shutdown")
            if not self.stays:
                self.end()
            return
        self.events.vm("rebooting")
        try:
            self._rebuild()
        except Refusal:
            self.loop.exit_code = 1
        else:
            self.events.vm("rebooted")


def _transition(messages: tuple[str, str], state: str) -> Refusal:
    return Refusal(*messages, f"Invalid transition: InvalidStateTransition({state}, {state})")


def _given(asked: dict[str, Any], fds: list[int]) -> dict[str, list[int]]:
    """Deal out the descriptors that came along, in order."""
    left, given = list(fds), {}
    for nic in asked.get("net_fds") or ():
        given[nic["id"]], left = left[: nic["num_fds"]], left[nic["num_fds"] :]
    return given


def _sends(fd: int) -> bool:
    """Put a frame on a tap; one that is down takes none, which ends the real NIC's worker."""
    try:
        os.write(fd, bytes(12) + b"\xff" * 6 + bytes(54))
    except OSError:
        return False
    return True
