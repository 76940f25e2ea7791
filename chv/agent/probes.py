"""Which VMM can run a guest here: probed for real, once per host boot, cached and shown.

A try-boot of the probe guest tells what KVM is good for. On a broken one it takes a second or two,
so its result is kept in the cache directory, keyed by boot id, VMM versions and binaries, the guest
that was tried, and the owner and mode of the KVM device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import msgspec

from chv.agent.ports import VmmSelection
from chv.common.clock import boot_id
from chv.common.config import VmmConfig as VmmSettings
from chv.common.errors import ChvError, FailedPrecondition
from chv.common.files import atomic_write, ensure_dir, sha256_file
from chv.common.wire.agent import VmmProbe
from chv.common.wire.resources import VmmChoice
from chv.probe import image
from chv.probe.command import INSTRUCTIONS
from chv.vmm.driver import DriverProbe, ProbeGuest, VmmDriver
from chv.vmm.select import FAKE, choose, configured

CACHE_FILE = "vmm-probes.json"
KVM = Path("/dev/kvm")


def settings_of(settings: VmmSettings, environment: Mapping[str, str]) -> VmmSettings:
    """Return the settings with CHV_VMM taken into account."""
    wanted = configured(settings.driver, environment)
    return msgspec.convert(msgspec.to_builtins(settings) | {"driver": wanted}, VmmSettings)


class CachedProbes(msgspec.Struct, frozen=True):
    """The file; `key` says what the results hold for."""

    key: str
    probes: list[DriverProbe]


class Probes:
    """Probes every driver when the first VM needs to know, or when `run` is started."""

    def __init__(
        self,
        settings: VmmSettings,
        drivers: Mapping[str, VmmDriver],
        cache_dir: Path,
        binaries: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.drivers = drivers
        self._binaries = binaries or {}  # all that are configured, by driver
        self._settings = settings
        self._cache = cache_dir / CACHE_FILE
        self._results: list[DriverProbe] = []
        self._lock = anyio.Lock()

    def results(self) -> list[VmmProbe]:
        """Return what is known so far, for the node's status."""
        return [
            VmmProbe(
                name=probe.driver,
                usable=probe.usable,
                accelerator=probe.accelerator,
                version=probe.version,
                reason=probe.reason,
                auto=probe.auto,
                missing=list(probe.missing),
                binary=probe.binary,
                sha256=probe.sha256,
            )
            for probe in self._results
            if probe.driver != FAKE or self._settings.driver == FAKE
        ]

    async def select(self, choice: VmmChoice) -> VmmSelection:
        """Return the VMM for a new VM; Unsupported says why each one is out."""
        await self.ensure()
        return self._selected(choice)

    def _selected(self, choice: VmmChoice) -> VmmSelection:
        name, reason = choose(self._settings.driver, str(choice), self._results)
        probe = next(probe for probe in self._results if probe.driver == name)
        return VmmSelection(
            name=name,
            accelerator=probe.accelerator,
            version=probe.version,
            reason=reason,
            binary=probe.binary,
            sha256=probe.sha256,
        )

    def expected(self, choice: VmmChoice) -> VmmSelection | None:
        """Return what `select` would choose; None where that is not known, without a probe."""
        if not self._results:
            return None
        try:
            return self._selected(choice)
        except ChvError:
            return None  # said where it is needed

    async def find_binary(self, driver: str, sha256: str, hint: str) -> str:
        """Return where the VMM of this very content is: at `hint`, or among all that are known."""
        found = (probe.binary for probe in self._results if probe.driver == driver)
        for path in dict.fromkeys((hint, *found, *self._binaries.get(driver, ()))):
            if path and await anyio.to_thread.run_sync(_digest, path) == sha256:
                return path
        raise FailedPrecondition(
            f"this node has no {driver} with SHA-256 {sha256}",
            field="vmm.sha256",
            hint="install that binary again, beside the newer one",
        )

    async def ensure(self) -> None:
        """Probe unless that was done in this boot."""
        async with self._lock:
            if not self._results:
                self._results = await self._probe()

    async def _probe(self) -> list[DriverProbe]:
        quick = [await driver.probe(None) for driver in self.drivers.values()]
        if not self._wants_try_boot(quick):
            return quick
        key = _key(quick)
        cached = await anyio.to_thread.run_sync(self._cached, key)
        if cached is None:
            cached = await self._try_boot()
            content = msgspec.json.encode(CachedProbes(key, cached))
            await anyio.to_thread.run_sync(lambda: atomic_write(self._cache, content, mode=0o644))
        for probe in cached:
            self.drivers[probe.driver].recall(probe)
        return cached

    def _wants_try_boot(self, quick: list[DriverProbe]) -> bool:
        """A try-boot is for KVM alone: without the device or with KVM off nothing is to learn."""
        return (
            self._settings.kvm == "auto"
            and self._settings.driver != FAKE
            and KVM.exists()
            and any(probe.usable for probe in quick if probe.driver != FAKE)
        )

    def _cached(self, key: str) -> list[DriverProbe] | None:
        try:
            cached = msgspec.json.decode(self._cache.read_bytes(), type=CachedProbes)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        return cached.probes if cached.key == key else None

    async def _try_boot(self) -> list[DriverProbe]:
        """What one VMM finds out about KVM spares the next one the search."""
        await anyio.to_thread.run_sync(lambda: ensure_dir(self._cache.parent, mode=0o755))
        results: list[DriverProbe] = []
        for driver in self.drivers.values():
            missing = tuple(dict.fromkeys(name for each in results for name in each.missing))
            guest = ProbeGuest(
                kernel=str(image.ELF_PATH), instructions=INSTRUCTIONS, missing=missing
            )
            results.append(await driver.probe(guest))
        return results


def _digest(path: str) -> str:
    try:
        return sha256_file(Path(path))
    except (OSError, ChvError):
        return ""  # it is not there, or no file


def _key(probes: list[DriverProbe]) -> str:
    versions = ",".join(f"{p.driver}={p.version}:{p.binary}:{p.sha256}" for p in probes)
    status = KVM.stat()
    device = f"{status.st_mode:o}:{status.st_gid}:{status.st_rdev}"
    return f"{boot_id()}|{versions}|{image.sha256()}|{device}"
