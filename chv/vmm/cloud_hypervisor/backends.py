"""Whether the back ends of vhost-user disks listen: asked before the VMM would wait for them.

Cloud Hypervisor tries for 60 s to connect, answers nothing meanwhile, and then gives up a boot
together with its list of disks.
"""

from __future__ import annotations

import errno
import socket
from typing import Any

from chv.common.errors import Unavailable
from chv.vmm.cloud_hypervisor.api import Info


def vhost_sockets(info: Info) -> dict[str, str]:
    """Return the socket of each vhost-user disk, by device id."""
    return {str(disk["id"]): str(disk["vhost_socket"]) for disk in vhost_disks(info)}


def vhost_disks(info: Info) -> list[dict[str, Any]]:
    """Return the vhost-user disks of the configuration."""
    return [disk for disk in info.listed("disks") if disk.get("vhost_user")]


def listens(path: str) -> bool:
    """Tell whether somebody holds the stream socket at `path`; nobody notices being asked.

    A datagram socket cannot connect to it, and the kernel says why: it is of another type, or it
    is held by nobody. That works across network namespaces, where lists of sockets end.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            return error.errno == errno.EPROTOTYPE
        return False  # somebody's datagrams: no back end


def require_listening(info: Info) -> None:
    """Raise Unavailable naming the disks whose back end is not there."""
    dead = {device: path for device, path in vhost_sockets(info).items() if not listens(path)}
    if dead:
        raise Unavailable(
            f"nothing listens for {', '.join(sorted(dead))}: {', '.join(sorted(dead.values()))}",
            field="disks",
            hint="start the storage daemon first",
        )
