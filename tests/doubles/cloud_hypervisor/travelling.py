"""Verbs for a VM that goes elsewhere or comes from there: snapshots, dumps, moves."""

from __future__ import annotations

import os
from typing import Any

from tests.doubles.cloud_hypervisor import migration, snapshots
from tests.doubles.cloud_hypervisor.machine import Machine
from tests.doubles.cloud_hypervisor.refusal import Refusal, already_created, invalid, os_error
from tests.doubles.cloud_hypervisor.vm import Config, Vm

SNAPSHOT = ("Cannot snapshot VM", "Failed to snapshot migratable component")
NESTED = "Could not get vCPU state GetNestedState(Invalid argument (os error 22))"
ELF_CORE = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + b"\x04\x00\x3e\x00\x01\x00\x00\x00"


class TravellingMachine(Machine):
    """The whole VMM."""

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


def _given(asked: dict[str, Any], fds: list[int]) -> dict[str, list[int]]:
    """Deal out the descriptors that came along, in order."""
    left, given = list(fds), {}
    for nic in asked.get("net_fds") or ():
        given[nic["id"]], left = left[: nic["num_fds"]], left[nic["num_fds"] :]
    return given
