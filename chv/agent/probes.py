"""Which VMM can run a guest here: probed for real, once per host boot, cached and shown.

A try-boot on a KVM that does not work costs seconds until its deadline, so its result is kept in
the cache directory, keyed by boot id, VMM version and the guest that was tried.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import anyio
import msgspec

from chv.agent.ports import ImageArtifacts, VmmSelection
from chv.common import logs
from chv.common.clock import boot_id
from chv.common.config import VmmConfig as VmmSettings
from chv.common.errors import ChvError
from chv.common.files import atomic_write, ensure_dir
from chv.common.wire.agent import VmmProbe
from chv.common.wire.resources import VmmChoice
from chv.guest.tiny import KERNEL_CMDLINE
from chv.vmm.driver import DriverProbe, ProbeGuest, VmmDriver
from chv.vmm.select import FAKE, choose, configured

log = logs.get(__name__)
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
        guest: Callable[[], Awaitable[ImageArtifacts]],
    ) -> None:
        self.drivers = drivers
        self._settings = settings
        self._cache = cache_dir / CACHE_FILE
        self._guest = guest
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
            )
            for probe in self._results
            if probe.driver != FAKE or self._settings.driver == FAKE
        ]

    async def select(self, choice: VmmChoice) -> VmmSelection:
        """Return the VMM for a new VM; Unsupported says why each one is out."""
        await self.ensure()
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

    async def ensure(self) -> None:
        """Probe unless that was done in this boot."""
        async with self._lock:
            if not self._results:
                self._results = await self._probe()

    async def _probe(self) -> list[DriverProbe]:
        quick = [await driver.probe(None) for driver in self.drivers.values()]
        if not self._wants_try_boot(quick):
            return quick
        try:
            artifacts = await self._guest()
        except ChvError as error:
            log.warning("probe.no_guest", error=error.message)
            return quick
        key = _key(quick, artifacts)
        cached = await anyio.to_thread.run_sync(self._cached, key)
        if cached is None:
            cached = await self._try_boot(artifacts)
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

    async def _try_boot(self, artifacts: ImageArtifacts) -> list[DriverProbe]:
        assert artifacts.kernel is not None
        assert artifacts.initramfs is not None
        ensure_dir(self._cache.parent, mode=0o755)
        work = Path(tempfile.mkdtemp(prefix="chv-probe-", dir="/run"))
        try:
            guest = ProbeGuest(
                kernel=artifacts.kernel.path,
                initramfs=artifacts.initramfs.path,
                cmdline=KERNEL_CMDLINE,
                work_dir=str(work),
            )
            return [await driver.probe(guest) for driver in self.drivers.values()]
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _key(probes: list[DriverProbe], artifacts: ImageArtifacts) -> str:
    versions = ",".join(f"{probe.driver}={probe.version}" for probe in probes)
    kernel = artifacts.kernel.sha256 if artifacts.kernel else ""
    return f"{boot_id()}|{versions}|{kernel}"
