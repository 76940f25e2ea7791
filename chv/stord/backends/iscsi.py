"""Volumes that are a LUN of an iSCSI target, reached by QEMU itself without the host's initiator.

The LUN is somebody else's: it is never made, enlarged or wiped, and deletion forgets it. Nothing
keeps another node away from it; one LUN is one volume on this node. There are no credentials
(CHAP) yet: a target that asks for them refuses.
"""

from __future__ import annotations

from chv.common.config import StorageConfig
from chv.common.errors import InvalidArgument
from chv.common.layout import Layout
from chv.common.wire.stord import IscsiPlace, VolumeBackend, VolumeClass
from chv.stord import allow
from chv.stord.backends.remote import EXTRA_PACKAGE, OnServer, require_driver
from chv.stord.qsd.graph import Protocol as ProtocolNode

# A request that the target does not answer in this time fails, and QEMU connects anew.
REQUEST_TIMEOUT_S = 15


class IscsiBackend(OnServer):
    """Class `iscsi`."""

    class_name = VolumeClass.ISCSI
    driver = "iscsi"
    package = EXTRA_PACKAGE

    def place(self, spec: VolumeBackend) -> IscsiPlace:
        """Return the target's part of the spec."""
        assert spec.iscsi is not None, "`check` refuses a spec without its place"
        return spec.iscsi

    async def check(self, spec: VolumeBackend) -> VolumeBackend:
        """Return the spec, or raise; asked before anything is made."""
        spec = await super().check(spec)
        await require_driver(self._layout, self.driver)
        return spec

    def permit(self, spec: VolumeBackend) -> None:
        """Refuse a target that is not allowed."""
        place = self.place(spec)
        if not place.target:
            raise InvalidArgument("give the name of the target", field="backend.iscsi.target")
        allow.check_remote(place, self._storage.remotes)

    def protocol(self, _volume_id: str, spec: VolumeBackend) -> ProtocolNode:
        """Describe how the storage daemon reaches the LUN."""
        place = self.place(spec)
        options: dict[str, object] = {
            "transport": "tcp",
            "portal": allow.host_and_port(place.host, place.port),
            "target": place.target,
            "lun": place.lun,
            "timeout": REQUEST_TIMEOUT_S,
        }
        if place.initiator:
            options["initiator-name"] = place.initiator
        return ProtocolNode(driver=self.driver, options=options, direct=None, local=False)

    def same_bytes(self, spec: VolumeBackend, other: VolumeBackend) -> bool:
        """Tell whether two volumes are the same LUN."""
        one, two = self.place(spec), self.place(other)
        return (allow.remote_of(one).lower(), one.lun) == (allow.remote_of(two).lower(), two.lun)


def make(layout: Layout, storage: StorageConfig) -> IscsiBackend:
    """Return the backend of this class."""
    return IscsiBackend(layout, storage)
