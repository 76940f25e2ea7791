"""The VMM: a configuration, perhaps a VM object made of it, and the verbs that change both."""

from __future__ import annotations

import copy
import os
import random
import signal
from pathlib import Path
from typing import Any

from tests.doubles.cloud_hypervisor import checks, migration, sizes
from tests.doubles.cloud_hypervisor.events import Events
from tests.doubles.cloud_hypervisor.guest import BOOT_S, LOOK_S, Guest
from tests.doubles.cloud_hypervisor.loop import Loop
from tests.doubles.cloud_hypervisor.refusal import (
    Refusal,
    already_created,
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


def _sends(fd: int) -> bool:
    """Put a frame on a tap; one that is down takes none, which ends the real NIC's worker."""
    try:
        os.write(fd, bytes(12) + b"\xff" * 6 + bytes(54))
    except OSError:
        return False
    return True
