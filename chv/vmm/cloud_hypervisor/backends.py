"""Whether the back ends of vhost-user disks listen: asked before the VMM would wait for them.

Cloud Hypervisor tries for 60 s to connect, answers nothing meanwhile, and then gives up a boot
together with its list of disks.
"""

from __future__ import annotations

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
    """Tell whether somebody accepts on a Unix socket; never waits."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # its queue is full of others
        except OSError:
            return False
        return True


def require_listening(info: Info) -> None:
    """Raise Unavailable naming the disks whose back end is not there."""
    dead = {device: path for device, path in vhost_sockets(info).items() if not listens(path)}
    if dead:
        raise Unavailable(
            f"nothing listens for {', '.join(sorted(dead))}: {', '.join(sorted(dead.values()))}",
            field="disks",
            hint="start the storage daemon first",
        )
